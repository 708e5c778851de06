// csr_weight_grad: for every edge and head the product of the gradient of its destination and the
// features of its source, see pyg_scale/ops/aggregate_rules.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "csr_edges.h"

namespace pyg_scale {
namespace {

template <typename T>
struct WeightGrad {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges;
  Rows<T> x, grad;
  const int32_t* arg;  // of an extreme, or null
  int64_t heads;
  bool mean;

  PYG_SCALE_INLINE void row(int64_t row, int64_t begin, int64_t end, int64_t limit, A* scratch,
                            A* out) const {
    const int64_t channels = x.size / heads, ahead = x.ahead(), row_begin = edges.indptr[row];
    const A* of_row = widened(grad[row], x.size, scratch);
    const int32_t* chosen = arg ? arg + row * x.size : nullptr;
    const A factor = mean ? A{1} / static_cast<A>(edges.indptr[row + 1] - row_begin) : A{1};
    for (int64_t e = begin; e < end; ++e) {
      if (e + ahead < limit) x.prefetch(edges.indices[e + ahead]);
      const T* from = x[edges.indices[e]];
      A* to = out + edges.id(e) * heads;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t first = h * channels;
        if (chosen) {
          A sum = 0;
          for (int64_t c = first; c < first + channels; ++c) {
            sum += chosen[c] == e - row_begin ? of_row[c] * widen(from[c]) : A{0};
          }
          to[h] = sum;
        } else {
          to[h] = dot(of_row + first, from + first, channels) * factor;
        }
      }
    }
  }
};

template <typename T>
struct WeightGradRows {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const WeightGrad<T>* op, const RowTasks* tasks, int64_t first,
                                   int64_t last, A* scratch, A* out) const {
    const int64_t* indptr = op->edges.indptr;
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      op->row(row, indptr[row], indptr[row + 1], indptr[last], scratch, out);
    }
  }
};

template <typename T>
struct WeightGradPiece {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const WeightGrad<T>* op, const Piece* piece, A* scratch,
                                   A* out) const {
    op->row(piece->row, piece->begin, piece->end, piece->end, scratch, out);
  }
};

Tensor csr_weight_grad(Tensor indptr, Tensor indices, MaybeTensor edge_id, Tensor x, Tensor grad,
                       MaybeTensor arg, int64_t heads, bool mean) {
  const CsrEdges edges(indptr, indices, edge_id);
  x = with_rows(x, "x");
  grad = with_rows(grad, "grad");
  const int64_t size = x.size(1);
  check(x.dim() == 2 && grad.dim() == 2 && grad.size(1) == size && grad.size(0) == edges.rows &&
            grad.scalar_type() == x.scalar_type(),
        "grad must be a matrix like x, with one row per destination");
  check(heads > 0 && size % heads == 0, "the columns of x must be shared by the heads");
  Tensor chosen;
  if (arg) chosen = dense(*arg, ScalarType::Int, edges.rows * size, "arg");
  Tensor out = pool_empty({edges.edges, heads}, accumulator_type(x.scalar_type()));
  const RowTasks tasks(edges.indptr, edges.rows, edges.edges, size);
  visit(x.scalar_type(), "x", [&](auto one) {
    using T = decltype(one);
    using A = AccumulatorOf<T>;
    const WeightGrad<T> op{
        edges, rows_of<T>(x), rows_of<T>(grad), arg ? const_data_of<int32_t>(chosen) : nullptr,
        heads, mean};
    A* to = data_of<A>(out);
    const auto scratch = [&] { return std::vector<A>(static_cast<size_t>(size)); };
    const auto rows = [&](int64_t, int64_t first, int64_t last) {
      edges.check_range(edges.indptr[first], edges.indptr[last], x.size(0));
      dispatch(WeightGradRows<T>{}, &op, &tasks, first, last, scratch().data(), to);
    };
    const auto piece = [&](int64_t, const Piece& which) {
      edges.check_range(which.begin, which.end, x.size(0));
      dispatch(WeightGradPiece<T>{}, &op, &which, scratch().data(), to);
    };
    run_tasks(tasks, rows, piece, [](const LongRow&) {});
  });
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "csr_weight_grad(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor x, Tensor grad, "
      "Tensor? arg, SymInt heads, bool mean) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("csr_weight_grad", TORCH_BOX(&pyg_scale::csr_weight_grad));
}
