// io_uring: many reads under way by one thread, begun and waited for by one system call.
//
// The kernel's own interface (linux/io_uring.h): two rings that are shared with the kernel, one of
// requests and one of results. `usable()` is false where the kernel refuses, as it often does in
// containers.

#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__NR_io_uring_setup) && defined(IORING_FEAT_SINGLE_MMAP)
#define PYG_SCALE_HAS_IO_RING 1
#endif
#endif

namespace pyg_scale {

#ifdef PYG_SCALE_HAS_IO_RING

// Only the thread that makes a ring may use it.
class IoRing {
 public:
  explicit IoRing(unsigned depth) {
    io_uring_params params{};
#ifdef IORING_SETUP_DEFER_TASKRUN  // results are only handled while somebody waits
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
#endif
    if (fd_ < 0) {
      params = {};
      fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
    }
    if (fd_ < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP)) return;
    const size_t submitted = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t completed = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    ring_size_ = submitted > completed ? submitted : completed;
    entries_size_ = params.sq_entries * sizeof(io_uring_sqe);
    ring_ = map(ring_size_, IORING_OFF_SQ_RING);
    entries_ = map(entries_size_, IORING_OFF_SQES);
    if (!usable()) return;
    head_ = at(params.cq_off.head);
    tail_ = at(params.cq_off.tail);
    mask_ = *at(params.cq_off.ring_mask);
    done_ = reinterpret_cast<io_uring_cqe*>(static_cast<char*>(ring_) + params.cq_off.cqes);
    next_ = at(params.sq_off.tail);
    next_mask_ = *at(params.sq_off.ring_mask);
    order_ = at(params.sq_off.array);
  }

  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  ~IoRing() {
    if (entries_ != MAP_FAILED) munmap(entries_, entries_size_);
    if (ring_ != MAP_FAILED) munmap(ring_, ring_size_);
    if (fd_ >= 0) close(fd_);
  }

  bool usable() const { return ring_ != MAP_FAILED && entries_ != MAP_FAILED; }

  // A read that begins with the next `wait`; at most `depth` may be under way.
  void read(int fd, void* to, unsigned size, int64_t offset, uint64_t tag) {
    const unsigned tail = *next_, slot = tail & next_mask_;
    auto& entry = static_cast<io_uring_sqe*>(entries_)[slot];
    entry = {};
    entry.opcode = IORING_OP_READ;
    entry.fd = fd;
    entry.addr = reinterpret_cast<uint64_t>(to);
    entry.len = size;
    entry.off = static_cast<uint64_t>(offset);
    entry.user_data = tag;
    order_[slot] = slot;
    __atomic_store_n(next_, tail + 1, __ATOMIC_RELEASE);
    ++queued_;
  }

  // Begins the queued reads and waits until `least` reads are done. Calls f(tag, result) for each
  // one that is done; the result is that of pread, or minus errno. Returns false if the kernel
  // refuses.
  template <typename F>
  bool wait(unsigned least, F f) {
    const long begun =
        syscall(__NR_io_uring_enter, fd_, queued_, least, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (begun > 0) queued_ -= static_cast<unsigned>(begun);
    const bool fine = begun >= 0 || errno == EINTR || errno == EAGAIN || errno == EBUSY;
    unsigned head = *head_;
    for (const unsigned tail = __atomic_load_n(tail_, __ATOMIC_ACQUIRE); head != tail; ++head) {
      const io_uring_cqe& done = done_[head & mask_];
      f(done.user_data, static_cast<int64_t>(done.res));
    }
    __atomic_store_n(head_, head, __ATOMIC_RELEASE);
    return fine;
  }

  // The number of reads that the kernel has not been told of yet.
  unsigned queued() const { return queued_; }

 private:
  void* map(size_t size, uint64_t what) const {
    return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                static_cast<off_t>(what));
  }

  unsigned* at(unsigned offset) const {
    return reinterpret_cast<unsigned*>(static_cast<char*>(ring_) + offset);
  }

  int fd_ = -1;
  void *ring_ = MAP_FAILED, *entries_ = MAP_FAILED;
  size_t ring_size_ = 0, entries_size_ = 0;
  unsigned *head_ = nullptr, *tail_ = nullptr, *next_ = nullptr, *order_ = nullptr;
  unsigned mask_ = 0, next_mask_ = 0, queued_ = 0;
  io_uring_cqe* done_ = nullptr;
};

#else

class IoRing {
 public:
  explicit IoRing(unsigned) {}
  bool usable() const { return false; }
  void read(int, void*, unsigned, int64_t, uint64_t) {}
  template <typename F>
  bool wait(unsigned, F) {
    return false;
  }
  unsigned queued() const { return 0; }
};

#endif

}  // namespace pyg_scale
