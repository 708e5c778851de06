// Growable memory that is never cleared and survives between batches.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace pyg_scale {

// Like std::vector of a trivial type, but new elements are left uninitialised, so that memory is
// touched once. Large blocks ask for huge pages, as random access into them is what costs.
template <typename T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept
      : data_(other.data_), size_(other.size_), capacity_(other.capacity_) {
    other.data_ = nullptr;
    other.size_ = other.capacity_ = 0;
  }
  ~Buffer() { std::free(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }
  size_t bytes() const { return static_cast<size_t>(capacity_) * sizeof(T); }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

  void clear() { size_ = 0; }
  void set_size(int64_t size) { size_ = size; }  // size <= what was reserved

  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

  void release() {
    std::free(data_);
    data_ = nullptr;
    size_ = capacity_ = 0;
  }

  // Makes room for `capacity` elements in all; what is there stays.
  void reserve(int64_t capacity) {
    if (capacity > capacity_) [[unlikely]]
      grow(capacity);
  }

  void push(T value) {
    if (size_ == capacity_) [[unlikely]]
      grow(size_ + 1);
    data_[size_++] = value;
  }

  void append(const T* values, int64_t count) {
    reserve(size_ + count);
    if (count) std::memcpy(data_ + size_, values, static_cast<size_t>(count) * sizeof(T));
    size_ += count;
  }

 private:
  void grow(int64_t wanted) {
    constexpr size_t kHugePage = size_t{1} << 21;
    const size_t capacity =
        std::max<size_t>({static_cast<size_t>(wanted), static_cast<size_t>(capacity_) * 2, 64});
    if (capacity > (size_t{1} << 62) / sizeof(T)) throw std::bad_alloc();
    size_t bytes = capacity * sizeof(T);
    T* data;
    if (bytes >= 2 * kHugePage) {
      bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
      data = static_cast<T*>(std::aligned_alloc(kHugePage, bytes));
#ifdef MADV_HUGEPAGE
      if (data) madvise(data, bytes, MADV_HUGEPAGE);  // a hint; refusal is fine
#endif
    } else {
      data = static_cast<T*>(std::malloc(bytes));
    }
    if (!data) throw std::bad_alloc();
    if (size_) std::memcpy(data, data_, static_cast<size_t>(size_) * sizeof(T));
    std::free(data_);
    data_ = data;
    capacity_ = static_cast<int64_t>(bytes / sizeof(T));
  }

  T* data_ = nullptr;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
};

// What this thread keeps between calls, for one use. A function of its own: where the compiler sees
// that a reference leads to something thread_local, loops look up again and again where that is.
template <typename T, typename Use>
[[gnu::noinline]] T& kept_by_thread() {
  thread_local T kept;
  return kept;
}

}  // namespace pyg_scale
