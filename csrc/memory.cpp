// The pool of recycled blocks behind pool_empty.
//
// Blocks are private anonymous mappings, most recently freed first. Resident memory, used or free,
// exceeds the most that recent tensors needed at a time by a sixteenth and 8 MiB (or 32 MiB) at
// most. So memory goes back after a peak, and a loop of steady batches maps nothing.

#include "pool.h"

#include <pthread.h>
#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

namespace pyg_scale {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr size_t kSmallest = size_t{256} << 10;  // below, malloc recycles well enough
constexpr size_t kFreeFloor = size_t{32} << 20;
constexpr size_t kTails = size_t{8} << 20;  // batches of unequal sizes would fault them in again
constexpr size_t kHugePage = size_t{2} << 20;
constexpr uint64_t kRecent = 256;  // allocations: a few batches, also of a many-typed graph

size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

// Classes an eighth of a power of two apart.
size_t capacity_for(size_t bytes) { return round_up(bytes, std::bit_floor(bytes) / 8); }

struct Block {
  char* data;
  size_t capacity;  // address space
  size_t resident;  // the part of it that tensors have had so far
  size_t used;      // what the tensor on it needs; 0 if it is free

  // What is there beyond the tensor and a sixteenth of it.
  size_t tail() const {
    const size_t enough = used + used / 16;
    return resident > enough ? resident - enough : 0;
  }
};

// A new mapping, null if there is no memory. Large ones begin at a huge page, which older kernels
// do not ensure.
Block* map(size_t bytes) {
  const size_t capacity = capacity_for(bytes);
  const size_t spare = capacity >= 2 * kHugePage ? kHugePage : 0;
  void* mapped =
      mmap(nullptr, capacity + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* data = static_cast<char*>(mapped);
  if (spare) {
    const size_t head =
        round_up(reinterpret_cast<size_t>(data), kHugePage) - reinterpret_cast<size_t>(data);
    if (head) munmap(data, head);
    data += head;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    char* end = data + round_up(capacity, page);
    char* mapped_end = static_cast<char*>(mapped) + round_up(capacity + spare, page);
    if (mapped_end > end) munmap(end, static_cast<size_t>(mapped_end - end));
  }
#ifdef MADV_HUGEPAGE
  madvise(data, capacity, MADV_HUGEPAGE);  // a hint; refusal is fine
#endif
  return new Block{data, capacity, 0, 0};
}

void unmap(const std::vector<Block*>& blocks) {
  for (Block* block : blocks) {
    munmap(block->data, block->capacity);
    delete block;
  }
}

class Pool {
 public:
  // Never destroyed: tensors may outlive every static object.
  static Pool& get() {
    static Pool* pool = [] {
      auto* made = new Pool;
      pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                     [] {
                       get().forget_free();
                       get().mutex_.unlock();
                     });
      return made;
    }();
    return *pool;
  }

  Block* take(size_t bytes) {
    std::vector<Block*> evicted;
    Block* block;
    {
      std::lock_guard lock(mutex_);
      note(bytes);
      block = find(bytes);
      reuses_ += block != nullptr;
      if (block) use(block, bytes);
      evict(block ? 0 : bytes, evicted);
    }
    unmap(evicted);
    if (!block) {
      block = map(bytes);
      if (!block) {
        trim();
        block = map(bytes);
      }
      if (!block) {
        forget(bytes);
        throw std::bad_alloc();
      }
      std::lock_guard lock(mutex_);
      ++maps_;
      ++blocks_;
      use(block, bytes);
    }
    return block;
  }

  void give_back(Block* block) {
    std::vector<Block*> evicted;
    {
      std::lock_guard lock(mutex_);
      live_ -= block->used;
      tails_ -= block->tail();
      block->used = 0;
      free_bytes_ += block->resident;
      free_.push_back(block);
      evict(0, evicted);
    }
    unmap(evicted);
  }

  void trim() {
    std::vector<Block*> evicted;
    {
      std::lock_guard lock(mutex_);
      peak_ = peak_before_ = live_;
      evicted.swap(free_);
      for (const Block* block : evicted) resident_ -= block->resident;
      blocks_ -= static_cast<int64_t>(evicted.size());
      free_bytes_ = 0;
    }
    unmap(evicted);
  }

  std::vector<int64_t> stats() {
    std::lock_guard lock(mutex_);
    return {static_cast<int64_t>(live_), static_cast<int64_t>(free_bytes_), blocks_, reuses_,
            maps_};
  }

 private:
  // Counts `bytes` as used from now on, and remembers the peak of this and the last period.
  void note(size_t bytes) {
    live_ += bytes;
    if (++allocations_ % kRecent == 0) {
      peak_before_ = peak_;
      peak_ = live_;
    }
    peak_ = std::max(peak_, live_);
  }

  void forget(size_t bytes) {
    std::lock_guard lock(mutex_);
    live_ -= bytes;
  }

  // The closest fit, of equal ones the most recently freed; null if none is near enough.
  Block* find(size_t bytes) {
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const size_t capacity = (*it)->capacity;
      if (capacity < bytes || capacity > 2 * bytes) continue;
      if (best == free_.end() || capacity <= (*best)->capacity) best = it;
    }
    if (best == free_.end()) return nullptr;
    Block* block = *best;
    free_.erase(best);
    free_bytes_ -= block->resident;
    resident_ -= block->resident;
    return block;
  }

  void use(Block* block, size_t bytes) {
    block->used = bytes;
    // Parts of huge pages would not go back.
    const size_t keep = round_up(bytes, bytes >= 16 * kHugePage ? kHugePage : page_);
    if (block->resident > keep && tails_ + block->tail() > kTails) {
      madvise(block->data + keep, block->capacity - keep, MADV_DONTNEED);
      block->resident = keep;
    }
    block->resident = std::max(block->resident, bytes);
    tails_ += block->tail();
    resident_ += block->resident;
  }

  // Chooses free blocks to unmap, those that were freed first, so that `coming` bytes fit too.
  void evict(size_t coming, std::vector<Block*>& evicted) {
    const size_t most = std::max(peak_, peak_before_);
    const size_t limit = std::max(most + most / 16 + kTails, live_ + kFreeFloor);
    auto end = free_.begin();
    for (; end != free_.end() && resident_ + coming > limit; ++end) {
      resident_ -= (*end)->resident;
      free_bytes_ -= (*end)->resident;
      --blocks_;
      evicted.push_back(*end);
    }
    free_.erase(free_.begin(), end);
  }

  // For a forked child, in which writing to the parent's free blocks would copy every page.
  void forget_free() {
    for (Block* block : free_) {
      munmap(block->data, block->capacity);
      resident_ -= block->resident;
    }
    blocks_ -= static_cast<int64_t>(free_.size());
    free_bytes_ = 0;
    free_.clear();
  }

  std::mutex mutex_;
  std::vector<Block*> free_;  // in the order in which they were freed
  size_t live_ = 0;           // bytes that tensors need
  size_t tails_ = 0;          // bytes that their blocks have beyond that and a sixteenth
  size_t resident_ = 0;       // bytes of all blocks
  size_t free_bytes_ = 0;     // bytes of free blocks
  size_t peak_ = 0, peak_before_ = 0;
  uint64_t allocations_ = 0;
  int64_t blocks_ = 0, reuses_ = 0, maps_ = 0;
  const size_t page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
};

std::vector<int64_t> pool_stats() { return Pool::get().stats(); }

void pool_trim() { Pool::get().trim(); }

// The bytes of a tensor; throws if its sizes cannot be.
size_t bytes_of(const std::vector<int64_t>& sizes, ScalarType dtype) {
  size_t bytes = torch::stable::empty({0}, dtype).element_size();
  for (const int64_t size : sizes) {
    if (size < 0) throw std::invalid_argument("a tensor cannot have a negative size");
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes) ||
        bytes > (size_t{1} << 60)) {
      throw std::bad_alloc();
    }
  }
  return bytes;
}

// A tensor on a block, which `release` takes when the tensor is gone.
Tensor on_block(Block* block, const std::vector<int64_t>& sizes, ScalarType dtype,
                void (*release)(Block*)) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
  try {
    return torch::stable::from_blob(block->data, sizes, strides,
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                    dtype, [block, release](void*) { release(block); });
  } catch (...) {
    release(block);
    throw;
  }
}

Tensor pool_empty_op(std::vector<int64_t> sizes, ScalarType dtype) {
  return pool_empty(sizes, dtype);
}

Tensor huge_empty_op(std::vector<int64_t> sizes, ScalarType dtype) {
  return huge_empty(sizes, dtype);
}

}  // namespace

Tensor pool_empty(const std::vector<int64_t>& sizes, ScalarType dtype) {
  const size_t bytes = bytes_of(sizes, dtype);
  if (bytes < kSmallest) return torch::stable::empty(sizes, dtype);
  return on_block(Pool::get().take(bytes), sizes, dtype,
                  [](Block* block) { Pool::get().give_back(block); });
}

Tensor huge_empty(const std::vector<int64_t>& sizes, ScalarType dtype) {
  const size_t bytes = bytes_of(sizes, dtype);
  if (bytes < kSmallest) return torch::stable::empty(sizes, dtype);
  Block* block = map(bytes);
  if (!block) throw std::bad_alloc();
  return on_block(block, sizes, dtype, [](Block* gone) { unmap({gone}); });
}

}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("pool_empty(int[] sizes, ScalarType dtype) -> Tensor");
  m.def("huge_empty(int[] sizes, ScalarType dtype) -> Tensor");
  m.def("pool_stats() -> int[]");
  m.def("pool_trim() -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("pool_empty", TORCH_BOX(&pyg_scale::pool_empty_op));
  m.impl("huge_empty", TORCH_BOX(&pyg_scale::huge_empty_op));
  m.impl("pool_stats", TORCH_BOX(&pyg_scale::pool_stats));
  m.impl("pool_trim", TORCH_BOX(&pyg_scale::pool_trim));
}
