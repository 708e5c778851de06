// What the samplers read of a graph: the in-edges of one edge type (see pyg_scale.store.base.CSC).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

namespace pyg_scale {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Out of line: a loop that contains the building of a message is slower, even if it never happens.
[[noreturn, gnu::noinline, gnu::cold]] inline void fail(const std::string& message) {
  throw std::invalid_argument(message);
}
[[noreturn, gnu::noinline, gnu::cold]] inline void fail(const char* message) {
  throw std::invalid_argument(message);
}
[[noreturn, gnu::noinline, gnu::cold]] inline void fail_missing(const char* what, int64_t id,
                                                                int64_t count) {
  fail(std::string(what) + " " + std::to_string(id) + " does not exist: there are " +
       std::to_string(count));
}

// The message is built when it is needed.
inline void check(bool condition, const char* message) {
  if (!condition) [[unlikely]]
    fail(message);
}

// For checks that are made once a call: the message is built whether needed or not.
inline void check(bool condition, const std::string& message) {
  if (!condition) fail(message);
}

// A one-dimensional int32 or int64 tensor, possibly strided. Absent if `data` is null.
struct IntColumn {
  const void* data = nullptr;
  int64_t stride = 1;
  bool wide = true;  // int64

  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride]
                : static_cast<const int32_t*>(data)[i * stride];
  }
};

inline IntColumn int_column(const Tensor& tensor, const char* name) {
  check(tensor.is_cpu() && tensor.dim() == 1, std::string(name) + " must be 1-D, on the CPU");
  const bool wide = tensor.scalar_type() == ScalarType::Long;
  check(wide || tensor.scalar_type() == ScalarType::Int,
        std::string(name) + " must be int32 or int64");
  return {tensor.const_data_ptr(), tensor.numel() ? tensor.stride(0) : 1, wide};
}

// Whether all of `n` numbers are in [0, count). Otherwise a number or count - 1 - number is
// negative.
template <typename T>
bool all_within(const T* numbers, int64_t n, int64_t count) {
  uint64_t signs = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto number = static_cast<uint64_t>(static_cast<int64_t>(numbers[i]));
    signs |= number | (static_cast<uint64_t>(count) - 1 - number);
  }
  return signs >> 63 == 0;
}

// Refuses ids unless all are in [0, count). The error names the first that is not.
inline void check_each_within(const int64_t* ids, int64_t n, const char* what, int64_t count) {
  if (all_within(ids, n, count)) [[likely]]
    return;
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= count) fail_missing(what, ids[i], count);
  }
}

// The first of `n` numbers that is not in [0, count), or n.
inline int64_t first_outside(const IntColumn& column, int64_t n, int64_t count) {
  if (column.stride == 1 &&
      (column.wide ? all_within(static_cast<const int64_t*>(column.data), n, count)
                   : all_within(static_cast<const int32_t*>(column.data), n, count))) {
    return n;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (column[i] < 0 || column[i] >= count) return i;
  }
  return n;
}

// A contiguous int64 tensor of `size` numbers; null if it is empty and may be absent.
inline const int64_t* int64_data(const Tensor& tensor, int64_t size, const char* name) {
  check(tensor.is_cpu() && tensor.dim() == 1 && tensor.is_contiguous() &&
            tensor.scalar_type() == ScalarType::Long,
        std::string(name) + " must be a contiguous 1-D int64 tensor on the CPU");
  check(tensor.numel() == size, std::string(name) + " has " + std::to_string(tensor.numel()) +
                                    " entries, expected " + std::to_string(size));
  return tensor.const_data_ptr<int64_t>();
}

inline const int64_t* optional_int64_data(const Tensor& tensor, int64_t size, const char* name) {
  return tensor.numel() ? int64_data(tensor, size, name) : nullptr;
}

[[noreturn, gnu::noinline, gnu::cold]] inline void fail_entries(int64_t node, int64_t begin,
                                                                int64_t end, int64_t size) {
  fail("indptr: the pointers of node " + std::to_string(node) + " are " + std::to_string(begin) +
       " and " + std::to_string(end) + ", but there are " + std::to_string(size) + " edges");
}

// Refuses the entries [begin, end) of a node if they are not among `size`: files may be damaged.
inline void check_entries(int64_t node, int64_t begin, int64_t end, int64_t size) {
  if (begin < 0 || begin > end || end > size) [[unlikely]]
    fail_entries(node, begin, end, size);
}

// The number of nodes (or rows) that have pointers; there is one pointer more.
inline int64_t num_pointed(const Tensor& pointers, const char* name = "indptr") {
  check(pointers.numel() > 0,
        std::string(name) + " must hold one number more than there are nodes");
  return pointers.numel() - 1;
}

// Refuses a count that is negative or too large for arithmetic.
inline void check_count(int64_t count, const char* name) {
  if (count < 0 || count >= int64_t{1} << 62) [[unlikely]] {
    fail(std::string(name) + " must be from 0 to 2**62 - 1 (got " + std::to_string(count) + ")");
  }
}

// Refuses numbers if one is negative, or if their sum is so large that arithmetic with them could
// exceed 64 bits. Returns the sum.
inline int64_t checked_sum(const int64_t* numbers, int64_t n, const char* name) {
  constexpr int64_t kMost = int64_t{1} << 59;
  uint64_t either = 0;
  int64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    either |= static_cast<uint64_t>(numbers[i]);
    sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(numbers[i]));
    if (either >> 59 || sum >= kMost) [[unlikely]] {
      fail(std::string(name) + " must not be negative, and together less than 2**59 (entry " +
           std::to_string(i) + " is " + std::to_string(numbers[i]) + ")");
    }
  }
  return sum;
}

// The number of an open file, as the system wants it.
inline int checked_file(int64_t fd) {
  check(fd >= 0 && fd <= INT32_MAX, "fd must be the number of an open file");
  return static_cast<int>(fd);
}

// The bytes among which the numbers of a tensor lie.
inline std::pair<uintptr_t, uintptr_t> extent(const Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + static_cast<uintptr_t>(last + 1) * tensor.element_size()};
}

// Refuses to write to memory that is read as well: numbers would change after they were checked.
inline void check_apart(const Tensor& written, const char* name,
                        std::initializer_list<const Tensor*> others) {
  const auto [begin, end] = extent(written);
  for (const Tensor* other : others) {
    const auto [from, to] = extent(*other);
    if (begin < to && from < end) {
      fail(std::string(name) + " must not share memory with another argument");
    }
  }
}

struct Places;

struct EdgeView {
  const int64_t* indptr = nullptr;
  IntColumn indices;
  IntColumn edge_id;              // absent: the position itself
  const int64_t* time = nullptr;  // of each position
  const int64_t* weight_prefix = nullptr;
  const int64_t* neighbor_time = nullptr;  // of each node of the neighbour type
  int64_t num_expanded = 0;                // nodes of the expanded type
  int64_t num_neighbors = 0;               // nodes of the neighbour type
  int64_t num_edges = 0;                   // positions
  int64_t expanded_type = 0;
  int64_t neighbor_type = 0;
  uint64_t hash = 0;
  bool times_of_neighbors = false;  // what `time` holds; else times of edges
  // Set if the in-edges lie in several parts: the view of each part, and the places of nodes. Then
  // this view itself only says what all parts have in common, and which columns there are.
  const EdgeView* parts = nullptr;
  const Places* places = nullptr;

  bool temporal() const { return time || neighbor_time; }

  // The number of positions in [begin, end) that are not after `when`. They are in order of time.
  int64_t until(int64_t begin, int64_t end, int64_t when) const {
    int64_t low = begin, high = end;
    while (low < high) {
      const int64_t mid = low + (high - low) / 2;
      if ((time ? time[mid] : time_of(indices[mid])) <= when) {
        low = mid + 1;
      } else {
        high = mid;
      }
    }
    return low - begin;
  }

  int64_t time_of(int64_t neighbor) const {
    if (static_cast<uint64_t>(neighbor) >= static_cast<uint64_t>(num_neighbors)) [[unlikely]] {
      fail("indices: neighbour " + std::to_string(neighbor) + " is not a node; there are " +
           std::to_string(num_neighbors));
    }
    return neighbor_time[neighbor];
  }
};

}  // namespace pyg_scale
