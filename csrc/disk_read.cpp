// disk_read: rows of a file into rows of a tensor (the meaning is in pyg_scale/ops/disk_read.py).

#include <fcntl.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "graph_view.h"
#include "io_ring.h"
#include "parallel.h"
#include "pool.h"
#include "stream.h"

namespace pyg_scale {
namespace {

constexpr int64_t kThreads = 16;          // a fast device wants many reads under way
constexpr int64_t kRingBytes = 16 << 20;  // of buffers, as sixteen threads have at most
constexpr int64_t kLeastDepth = 16, kMostDepth = 128;

// The ring of this thread, kept between calls: making one takes as long as dozens of reads.
class KeptRing {
 public:
  IoRing& get() {
    if (!ring_ || process_ != getpid()) {  // after a fork the ring is the other process's
      ring_ = std::make_unique<IoRing>(static_cast<unsigned>(kMostDepth));
      process_ = getpid();
    }
    return *ring_;
  }

  void drop() { ring_.reset(); }

 private:
  std::unique_ptr<IoRing> ring_;
  pid_t process_ = 0;
};

struct Wanted {
  int64_t row;       // of the file
  int64_t position;  // row of the output
};

// Consecutive entries of `wanted` that one read brings.
struct Run {
  int64_t begin, end;   // of `wanted`
  int64_t first, last;  // bytes of the file, whole blocks
};

// A radix sort, least significant digit first: a batch has hundreds of thousands of rows.
void sort_by_row(std::vector<Wanted>& wanted) {
  const auto less = [](const Wanted& a, const Wanted& b) { return a.row < b.row; };
  if (std::is_sorted(wanted.begin(), wanted.end(), less)) return;
  constexpr int kBits = 11;
  int64_t largest = 0;
  for (const Wanted& each : wanted) largest = std::max(largest, each.row);
  std::vector<Wanted> other(wanted.size());
  for (int shift = 0; shift < 63 && (largest >> shift) > 0; shift += kBits) {
    std::array<int64_t, (1 << kBits) + 1> start{};
    const auto digit = [&](const Wanted& w) { return (w.row >> shift) & ((1 << kBits) - 1); };
    for (const Wanted& each : wanted) ++start[static_cast<size_t>(digit(each) + 1)];
    for (size_t d = 1; d < start.size(); ++d) start[d] += start[d - 1];
    for (const Wanted& each : wanted) {
      other[static_cast<size_t>(start[static_cast<size_t>(digit(each))]++)] = each;
    }
    wanted.swap(other);
  }
}

std::vector<Run> merge(const std::vector<Wanted>& wanted, int64_t offset, int64_t row_bytes,
                       int64_t block, int64_t gap, int64_t longest) {
  std::vector<Run> runs;
  for (int64_t i = 0; i < static_cast<int64_t>(wanted.size()); ++i) {
    const int64_t begin = offset + wanted[static_cast<size_t>(i)].row * row_bytes;
    const int64_t first = begin / block * block;
    const int64_t last = (begin + row_bytes + block - 1) / block * block;
    if (!runs.empty()) {
      Run& run = runs.back();
      if (first - run.last <= gap && last - run.first <= longest) {
        run.end = i + 1;
        run.last = std::max(run.last, last);
        continue;
      }
    }
    runs.push_back({i, i + 1, first, last});
  }
  return runs;
}

// Reads until `size` bytes are there, or the file ends. Returns how many, or -1 with errno set.
int64_t read_fully(int fd, char* to, int64_t size, int64_t at, int64_t block) {
  int64_t got = 0;
  while (got < size) {
    const ssize_t more = pread(fd, to + got, static_cast<size_t>(size - got), at + got);
    if (more < 0) {
      if (errno == EINTR) continue;
      return -1;
    }
    if (more == 0) break;
    got += more;
    if (got % block != 0) break;  // only at the end of a file is a block not whole
  }
  return got;
}

class Reader {
 public:
  Reader(int fd, int64_t offset, int64_t row_bytes, int64_t block, std::vector<Wanted> wanted,
         std::vector<Run> runs, char* out)
      : fd_(fd),
        offset_(offset),
        row_bytes_(row_bytes),
        block_(block),
        wanted_(std::move(wanted)),
        runs_(std::move(runs)),
        out_(out) {
    for (const Run& run : runs_) largest_ = std::max(largest_, run.last - run.first);
  }

  // Uses a ring where there is one and it pays, unless a number of threads was asked for.
  void read(int64_t num_threads) {
    if (num_threads == 0 && runs_.size() > 1 && is_direct() && read_by_ring()) return;
    read_by_threads(num_threads == 0 ? kThreads : num_threads);
  }

  // A ring's reads through the page cache are done by threads of the kernel, one for each.
  bool is_direct() const {
#ifdef O_DIRECT
    return (fcntl(fd_, F_GETFL) & O_DIRECT) != 0;
#else
    return false;
#endif
  }

  void read_by_threads(int64_t num_threads) {
    std::vector<std::thread> threads;
    const auto count = std::min(num_threads, static_cast<int64_t>(runs_.size()));
    const int64_t size = buffer_bytes();
    Tensor buffers = buffers_for(count);
    char* data = aligned(buffers);
    threads.reserve(static_cast<size_t>(count));  // so that this cannot fail once threads run
    for (int64_t t = 1; t < count; ++t) {
      try {
        threads.emplace_back([this, buffer = data + t * size] { work(buffer); });
      } catch (const std::system_error&) {
        break;  // the threads that there are do the work
      }
    }
    work(data);
    for (std::thread& thread : threads) thread.join();
  }

  // Reads, bytes, error (0: none, -1: the file is too short), rows that could not be read.
  std::vector<int64_t> result() const {
    if (failed_ < 0) return {static_cast<int64_t>(runs_.size()), bytes_.load(), 0, 0, 0};
    const Run& run = runs_[static_cast<size_t>(failed_)];
    return {static_cast<int64_t>(runs_.size()), bytes_.load(), error_,
            wanted_[static_cast<size_t>(run.begin)].row,
            wanted_[static_cast<size_t>(run.end - 1)].row};
  }

 private:
  int64_t align() const { return std::max<int64_t>(block_, kLine); }

  int64_t buffer_bytes() const { return (largest_ + align() - 1) / align() * align(); }

  // Recycled, as the next call needs as much: fresh pages cost as much as reading into them.
  Tensor buffers_for(int64_t count) const {
    check(buffer_bytes() < int64_t{1} << 40, "longest: a read would be of more than 2**40 bytes");
    return pool_empty({count * buffer_bytes() + align()}, ScalarType::Byte);
  }

  char* aligned(Tensor& buffers) const {
    char* data = static_cast<char*>(buffers.mutable_data_ptr());
    const auto beyond = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % align());
    return data + (align() - beyond) % align();
  }

  // Returns false if there is no ring. Otherwise everything is read, or has failed.
  bool read_by_ring() {
    const int64_t size = buffer_bytes();
    const auto count = static_cast<int64_t>(runs_.size());
    const int64_t most = std::clamp<int64_t>(kRingBytes / size, kLeastDepth, kMostDepth);
    const int64_t depth = std::min(count, most);
    Tensor buffers = buffers_for(depth);  // first: it may fail, which must leave no read behind
    thread_local KeptRing kept;
    IoRing& ring = kept.get();
    if (!ring.usable()) return false;
    char* data = aligned(buffers);
    std::vector<int64_t> run_of(static_cast<size_t>(depth)), free;
    for (int64_t b = 0; b < depth; ++b) free.push_back(b);
    bool fine = true;
    for (;;) {
      while (fine && !stop_ && !free.empty() && next_ < count) {
        const int64_t r = next_++, b = free.back();
        free.pop_back();
        run_of[static_cast<size_t>(b)] = r;
        const Run& run = runs_[static_cast<size_t>(r)];
        ring.read(fd_, data + b * size, static_cast<unsigned>(run.last - run.first), run.first,
                  static_cast<uint64_t>(b));
      }
      const int64_t under_way = depth - static_cast<int64_t>(free.size());
      if (under_way == (fine ? 0 : ring.queued())) break;
      // Each wait wakes this thread up once; the last reads are waited for together.
      const auto least =
          static_cast<unsigned>(next_ < count ? std::max<int64_t>(1, under_way / 4) : under_way);
      fine &= ring.wait(fine ? least : 1, [&](uint64_t tag, int64_t got) {
        const auto b = static_cast<int64_t>(tag);
        const int64_t r = run_of[static_cast<size_t>(b)];
        const Run& run = runs_[static_cast<size_t>(r)];
        if (got != run.last - run.first) {  // the file ended, or another try may help
          got = read_fully(fd_, data + b * size, run.last - run.first, run.first, block_);
        }
        take(r, data + b * size, got);
        free.push_back(b);
      });
    }
    if (!fine) kept.drop();  // it may hold reads that the kernel did not begin
    if (!fine && !stop_) {   // the kernel refused: read what it did not begin, and the rest
      std::vector<bool> left(static_cast<size_t>(depth), true);
      for (int64_t b : free) left[static_cast<size_t>(b)] = false;
      for (int64_t b = 0; b < depth; ++b) {
        if (!left[static_cast<size_t>(b)]) continue;
        const int64_t r = run_of[static_cast<size_t>(b)];
        const Run& run = runs_[static_cast<size_t>(r)];
        take(r, data, read_fully(fd_, data, run.last - run.first, run.first, block_));
      }
      work(data);
    }
    return true;
  }

  void work(char* buffer) {
    for (int64_t r; !stop_ && (r = next_++) < static_cast<int64_t>(runs_.size());) {
      const Run& run = runs_[static_cast<size_t>(r)];
      take(r, buffer, read_fully(fd_, buffer, run.last - run.first, run.first, block_));
    }
  }

  // Puts the rows of a run where they belong; `got` is what `read_fully` returned.
  void take(int64_t r, const char* buffer, int64_t got) {
    const Run& run = runs_[static_cast<size_t>(r)];
    if (got < 0) return fail(r, errno);
    bytes_ += got;
    for (int64_t i = run.begin; i < run.end; ++i) {
      const Wanted& each = wanted_[static_cast<size_t>(i)];
      const int64_t at = offset_ + each.row * row_bytes_ - run.first;
      if (at + row_bytes_ > got) return fail(r, -1);
      std::memcpy(out_ + each.position * row_bytes_, buffer + at, static_cast<size_t>(row_bytes_));
    }
  }

  void fail(int64_t run, int64_t error) {
    std::lock_guard lock(mutex_);
    if (failed_ < 0 || run < failed_) {
      failed_ = run;
      error_ = error;
    }
    stop_ = true;
  }

  int fd_;
  int64_t offset_, row_bytes_, block_;
  std::vector<Wanted> wanted_;
  std::vector<Run> runs_;
  char* out_;
  int64_t largest_ = 0;
  std::atomic<int64_t> next_{0}, bytes_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  int64_t failed_ = -1, error_ = 0;
};

std::vector<int64_t> disk_read(int64_t fd, int64_t offset, int64_t num_rows, Tensor rows,
                               Tensor position, Tensor out, int64_t block, int64_t gap,
                               int64_t longest, int64_t num_threads) {
  const int64_t count = rows.numel();
  const int64_t* row = int64_data(rows, count, "rows");
  const int64_t* place = int64_data(position, count, "position");
  check(out.is_cpu() && out.dim() == 2 && out.is_contiguous() &&
            out.scalar_type() == ScalarType::Byte,
        "out must be a contiguous 2-D uint8 tensor on the CPU");
  constexpr int64_t kMostBlock = int64_t{1} << 30;
  check(block > 0 && block <= kMostBlock, "block must be from 1 to 2**30 bytes");
  check_count(offset, "offset");
  check_count(num_rows, "num_rows");
  check(num_threads >= 0, "num_threads must not be negative");
  check_apart(out, "out", {&rows, &position});
  const int64_t size = out.size(0), row_bytes = out.size(1);
  check(row_bytes == 0 || num_rows <= ((int64_t{1} << 62) - offset) / row_bytes,
        "offset and num_rows lead beyond 2**62 bytes");
  if (count == 0 || row_bytes == 0) return {0, 0, 0, 0, 0};
  std::vector<Wanted> wanted(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    check(row[i] >= 0 && row[i] < num_rows && place[i] >= 0 && place[i] < size,
          "rows and position must be rows of the file and of out");
    wanted[static_cast<size_t>(i)] = {row[i], place[i]};
  }
  sort_by_row(wanted);
  std::vector<Run> runs = merge(wanted, offset, row_bytes, block, gap, longest);
  Reader reader(checked_file(fd), offset, row_bytes, block, std::move(wanted), std::move(runs),
                static_cast<char*>(out.mutable_data_ptr()));
  reader.read(std::min(num_threads, usable_threads(num_threads)));
  return reader.result();
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "disk_read(int fd, int offset, int num_rows, Tensor rows, Tensor position, Tensor(a!) out, "
      "int block, int gap, int longest, int num_threads) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("disk_read", TORCH_BOX(&pyg_scale::disk_read));
}
