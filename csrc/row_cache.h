// What the plans of all caches have in common: which rows of a request are where.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "graph_view.h"
#include "pool.h"

namespace pyg_scale {

using Tensors = std::vector<Tensor>;

// A contiguous tensor of a known type on the CPU.
template <typename T>
T* data_of(Tensor& tensor, ScalarType type, int64_t size, const char* name) {
  check(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type &&
            (size < 0 || tensor.numel() == size),
        std::string(name) + " has a wrong type, size or layout");
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline const int64_t* checked_ids(const Tensor& ids, int64_t num_rows) {
  const int64_t count = ids.numel();
  const int64_t* id = int64_data(ids, count, "index");
  for (int64_t i = 0; i < count; ++i) {
    if (static_cast<uint64_t>(id[i]) >= static_cast<uint64_t>(num_rows)) {
      throw std::out_of_range("row " + std::to_string(id[i]) + " does not exist, there are only " +
                              std::to_string(num_rows) + " rows");
    }
  }
  return id;
}

constexpr int64_t kMostSlots = std::numeric_limits<int32_t>::max() - 1;  // that int32 numbers

// Refuses a state if two of its tensors share memory.
inline void check_state(std::initializer_list<const Tensor*> tensors) {
  std::vector<std::pair<uintptr_t, uintptr_t>> extents;
  for (const Tensor* each : tensors) extents.push_back(extent(*each));
  std::sort(extents.begin(), extents.end());
  for (size_t i = 1; i < extents.size(); ++i) {
    check(extents[i - 1].second <= extents[i].first,
          "what a cache keeps must not share memory with another argument");
  }
}

// An entry of `slot_of` is 0 for a row that is in no slot, otherwise its slot + 1. While a plan is
// made, it is -(k + 1) for the k-th miss.
constexpr int64_t kPlanAhead = 24;  // rows; covers the latency of memory

template <typename T>
Tensor numbers(const std::vector<T>& values) {
  constexpr ScalarType type = sizeof(T) == 8 ? ScalarType::Long : ScalarType::Int;
  Tensor out = pool_empty({static_cast<int64_t>(values.size())}, type);
  if (!values.empty()) {
    std::memcpy(out.mutable_data_ptr(), values.data(), values.size() * sizeof(T));
  }
  return out;
}

struct Plan {
  explicit Plan(int64_t count) : slot_at(pool_empty({count}, ScalarType::Int)) {
    check(count <= kMostSlots, "there are too many rows in a request");
    at = static_cast<int32_t*>(slot_at.mutable_data_ptr());
  }

  Tensors tensors() const {
    return {slot_at,        numbers(miss), numbers(fill), numbers(fill_slot),
            numbers(again), numbers(same)};
  }

  // The position of the miss that `found` stands for, a negative entry of slot_of.
  int64_t earlier(int32_t found) const {
    const auto k = static_cast<size_t>(-(int64_t{found} + 1));
    if (k >= miss.size()) [[unlikely]]
      fail("slot_of: there is no slot " + std::to_string(found));
    return miss[k];
  }

  Tensor slot_at;
  int32_t* at;                       // the slot of each row of the request, -1 for none
  std::vector<int64_t> miss;         // positions to be read
  std::vector<int64_t> fill;         // those of them to be kept,
  std::vector<int32_t> fill_slot;    // and in which slots
  std::vector<int64_t> again, same;  // positions that repeat an earlier miss, and its position
};

}  // namespace pyg_scale
