// From the memory of a batch in the making to tensors of their own.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "buffer.h"
#include "graph_view.h"
#include "parallel.h"
#include "pool.h"

namespace pyg_scale {

// Allocates the outputs, then writes them all, side by side if there are several threads.
class Outputs {
 public:
  explicit Outputs(int64_t num_threads) : num_threads_(num_threads) {}

  // A copy of `count` numbers, as int32 or int64.
  template <typename From>
  Tensor copy(const From* from, int64_t count, bool int32) {
    Tensor out = pool_empty({count}, int32 ? ScalarType::Int : ScalarType::Long);
    void* to = out.mutable_data_ptr();
    add(count, [=] {
      int32 ? convert(from, count, static_cast<int32_t*>(to))
            : convert(from, count, static_cast<int64_t*>(to));
    });
    return out;
  }

  // A copy of `count` floats.
  Tensor copy(const float* from, int64_t count) {
    Tensor out = pool_empty({count}, ScalarType::Float);
    auto* to = static_cast<float*>(out.mutable_data_ptr());
    add(count, [=] { std::copy_n(from, count, to); });
    return out;
  }

  // The ends of each edge: a copy of `row`, and i for the edges colptr[i] to colptr[i + 1] - 1.
  // Where rows begin anew, at `first_rows` (none: never), i counts from there.
  // They lie one after the other in memory, so an edge index is made of them without copying.
  template <typename From>
  std::pair<Tensor, Tensor> edges(const From* row, const Buffer<int64_t>& colptr,
                                  const std::vector<int64_t>& first_rows, bool int32) {
    const int64_t *from = colptr.data(), count = colptr.size(), size = from[count - 1];
    Tensor both = pool_empty({2, size}, int32 ? ScalarType::Int : ScalarType::Long);
    void* to = both.mutable_data_ptr();
    add(size, [=] {
      int32 ? convert(row, size, static_cast<int32_t*>(to))
            : convert(row, size, static_cast<int64_t*>(to));
    });
    add(size, [=] {
      int32 ? expand(from, count, first_rows, static_cast<int32_t*>(to) + size)
            : expand(from, count, first_rows, static_cast<int64_t*>(to) + size);
    });
    return {torch::stable::select(both, 0, 0), torch::stable::select(both, 0, 1)};
  }

  // Writes all outputs. Nothing is written before.
  void write() {
    const auto count = static_cast<int64_t>(jobs_.size());
    if (num_threads_ > 1 && size_ > kWorthThreads) {
      for_each_task(count, [&](int64_t i) { jobs_[static_cast<size_t>(i)](); });
    } else {
      for (const auto& job : jobs_) job();
    }
    jobs_.clear();
  }

 private:
  static constexpr int64_t kWorthThreads = int64_t{1} << 16;  // numbers

  void add(int64_t size, std::function<void()> job) {
    size_ += size;
    jobs_.push_back(std::move(job));
  }

  template <typename To, typename From>
  static void convert(const From* from, int64_t count, To* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
  }

  template <typename To>
  static void expand(const int64_t* colptr, int64_t count, const std::vector<int64_t>& first_rows,
                     To* to) {
    // Rows are short, and differ in length: some numbers too many, which the next row overwrites,
    // cost less than counting them.
    constexpr int64_t kAtOnce = 8;
    const int64_t size = colptr[count - 1];
    int64_t first = 0;
    size_t next = 0;
    for (int64_t i = 0; i + 1 < count; ++i) {
      // A hop without rows begins where the next one does.
      while (next < first_rows.size() && first_rows[next] == i) first = first_rows[next++];
      const auto value = static_cast<To>(i - first);
      const int64_t stop = colptr[i + 1];
      int64_t e = colptr[i];
      for (; e < stop && e + kAtOnce <= size; e += kAtOnce) std::fill_n(to + e, kAtOnce, value);
      for (; e < stop; ++e) to[e] = value;
    }
  }

  int64_t num_threads_;
  int64_t size_ = 0;
  std::vector<std::function<void()>> jobs_;
};

}  // namespace pyg_scale
