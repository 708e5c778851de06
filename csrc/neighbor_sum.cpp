// neighbor_sum: an adjacency matrix times a dense one, see pyg_scale/ops/neighbor_sum.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "graph_view.h"
#include "pool.h"

namespace pyg_scale {
namespace {

constexpr int64_t kTaskNumbers = 1 << 16;  // fewer are not worth a thread
constexpr int64_t kAhead = 16;             // entries; covers the latency of memory

template <typename T>
struct Entries {
  const int64_t* indptr;
  const T* indices;
  int64_t stride;
  const double* weight;
  int64_t end;
};

// A product is rounded before it is added, as in torch: -ffp-contract=off sees to that.
template <typename T>
void sum_row(const Entries<T>& entries, const double* x, int64_t columns, int64_t v, double* out) {
  const auto& [indptr, indices, stride, weight, end] = entries;
  if (columns == 1) {
    double sum = 0;
    for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
      const double product = (weight ? weight[e] : 1.0) * x[indices[e * stride]];
      sum += product;
    }
    out[v] = sum;
    return;
  }
  double* row = out + v * columns;
  std::fill_n(row, columns, 0.0);
  for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
    if (e + kAhead < end) __builtin_prefetch(x + indices[(e + kAhead) * stride] * columns);
    const double* from = x + static_cast<int64_t>(indices[e * stride]) * columns;
    const double w = weight ? weight[e] : 1.0;
    for (int64_t c = 0; c < columns; ++c) {
      const double product = w * from[c];
      row[c] += product;
    }
  }
}

template <typename T>
void check_range(const T* indices, int64_t stride, int64_t count, int64_t rows) {
  for (int64_t e = 0; e < count; ++e) {
    const auto row = static_cast<int64_t>(indices[e * stride]);
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(rows)) [[unlikely]] {
      fail("indices[" + std::to_string(e) + "] is " + std::to_string(row) + ", but x has " +
           std::to_string(rows) + " rows");
    }
  }
}

Tensor neighbor_sum(Tensor indptr, Tensor indices, Tensor weights, Tensor x, int64_t num_threads) {
  const int64_t num_nodes = num_pointed(indptr), num_entries = indices.numel();
  const int64_t* begin = int64_data(indptr, num_nodes + 1, "indptr");
  const IntColumn column = int_column(indices, "indices");
  check(x.is_cpu() && x.dim() == 2 && x.is_contiguous() && x.scalar_type() == ScalarType::Double,
        "x must be a contiguous 2-D float64 tensor on the CPU");
  check(weights.is_cpu() && weights.dim() == 1 && weights.is_contiguous() &&
            weights.scalar_type() == ScalarType::Double &&
            (weights.numel() == 0 || weights.numel() == num_entries),
        "weights must be a contiguous float64 tensor with one number an entry, or empty");
  check(begin[0] == 0 && begin[num_nodes] == num_entries,
        "indptr must go from 0 to the number of entries of indices");
  for (int64_t v = 0; v < num_nodes; ++v) check(begin[v] <= begin[v + 1], "indptr must not fall");
  const int64_t rows = x.size(0), columns = x.size(1);
  column.wide
      ? check_range(static_cast<const int64_t*>(column.data), column.stride, num_entries, rows)
      : check_range(static_cast<const int32_t*>(column.data), column.stride, num_entries, rows);
  Tensor out = pool_empty({num_nodes, columns}, ScalarType::Double);
  if (num_nodes == 0 || columns == 0) return out;
  auto* to = static_cast<double*>(out.mutable_data_ptr());
  const auto* from = rows ? static_cast<const double*>(x.const_data_ptr()) : nullptr;
  const auto* weight =
      weights.numel() ? static_cast<const double*>(weights.const_data_ptr()) : nullptr;
  const Entries<int64_t> wide{begin, static_cast<const int64_t*>(column.data), column.stride,
                              weight, num_entries};
  const Entries<int32_t> narrow{begin, static_cast<const int32_t*>(column.data), column.stride,
                                weight, num_entries};
  const auto run = [&](int64_t first, int64_t last) {
    for (int64_t v = first; v < last; ++v) {
      column.wide ? sum_row(wide, from, columns, v, to) : sum_row(narrow, from, columns, v, to);
    }
  };
  const int64_t work = num_entries * columns / num_nodes + 1;  // of a row
  if (num_threads > 1 && work * num_nodes > 2 * kTaskNumbers) {
    torch::stable::parallel_for(0, num_nodes, std::max<int64_t>(1, kTaskNumbers / work), run);
  } else {
    run(0, num_nodes);
  }
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "neighbor_sum(Tensor indptr, Tensor indices, Tensor weights, Tensor x, int num_threads) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("neighbor_sum", TORCH_BOX(&pyg_scale::neighbor_sum));
}
