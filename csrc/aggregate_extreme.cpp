// csr_extreme: the largest or smallest row entries by destination and the edges they come from, and
// its gradient, see pyg_scale/ops/aggregate.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "aggregate_extreme.h"

namespace pyg_scale {
namespace {

std::tuple<Tensor, Tensor> csr_extreme(Tensor indptr, Tensor indices, MaybeTensor edge_id,
                                       MaybeTensor, MaybeTensor, MaybeTensor, Tensor x,
                                       MaybeTensor weight, bool minimum) {
  const CsrEdges edges(indptr, indices, edge_id);
  x = matrix(x, "x");
  const EdgeWeights weights(weight, edges, x.scalar_type(), x.size(1));
  Tensor out = pool_empty({edges.rows, x.size(1)}, x.scalar_type());
  Tensor arg = pool_empty({edges.rows, x.size(1)}, ScalarType::Int);
  visit(x.scalar_type(), "x", [&](auto one) {
    using T = decltype(one);
    extreme_rows<T>(edges, rows_of<T>(x), weights, minimum, out, arg);
  });
  return {out, arg};
}

// Gradient ##################################################################################

// For a source, over its out-edges: the gradient of the entries that came over that edge.
template <typename T>
struct ExtremeGrad {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges;  // by source; ids are positions by destination
  const int64_t* indptr;  // by destination
  IntColumn edge_id;      // of positions
  Rows<T> grad;
  const int32_t* arg;
  const A* weight;
  int64_t heads;

  PYG_SCALE_INLINE void row(int64_t begin, int64_t end, int64_t limit, A* out) const {
    const int64_t channels = grad.size / heads, ahead = grad.ahead();
    std::fill_n(out, grad.size, A{0});
    for (int64_t e = begin; e < end; ++e) {
      if (e + ahead < limit) {
        const int64_t coming = edges.indices[e + ahead];
        grad.prefetch(coming);
        prefetch_row(arg + coming * grad.size, grad.size * 4);
      }
      const int64_t target = edges.indices[e], position = edges.edge_id[e];
      const auto here = static_cast<int32_t>(static_cast<uint64_t>(position) -
                                             static_cast<uint64_t>(indptr[target]));
      const T* from = grad[target];
      const int32_t* chosen = arg + target * grad.size;
      const A* w =
          weight ? weight + (edge_id.data ? edge_id[position] : position) * heads : nullptr;
      for (int64_t h = 0; h < heads; ++h) {
        const A factor = w ? w[h] : A{1};
        const int64_t first = h * channels;
#pragma omp simd
        for (int64_t c = first; c < first + channels; ++c) {
          out[c] += chosen[c] == here ? widen(from[c]) * factor : A{0};
        }
      }
    }
  }
};

template <typename T>
struct ExtremeGradRows {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const ExtremeGrad<T>* op, const RowTasks* tasks, int64_t first,
                                   int64_t last, A* scratch, T* out) const {
    const int64_t *indptr = op->edges.indptr, limit = indptr[last], size = op->grad.size;
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      op->row(indptr[row], indptr[row + 1], limit, scratch);
      store_row(out + row * size, scratch, A{1}, size);
    }
  }
};

template <typename T>
struct ExtremeGradPiece {
  PYG_SCALE_INLINE void operator()(const ExtremeGrad<T>* op, const Piece* piece,
                                   AccumulatorOf<T>* out) const {
    op->row(piece->begin, piece->end, piece->end, out);
  }
};

Tensor csr_extreme_grad(Tensor t_indptr, Tensor t_indices, Tensor t_position, Tensor indptr,
                        MaybeTensor edge_id, Tensor arg, Tensor grad, MaybeTensor weight) {
  const CsrEdges edges(t_indptr, t_indices, t_position);
  grad = matrix(grad, "grad");
  const EdgeWeights weights(weight, edges, grad.scalar_type(), grad.size(1));
  const int64_t size = grad.size(1), count = grad.size(0);
  const Tensor chosen = dense(arg, ScalarType::Int, count * size, "arg");
  IntColumn ids;
  if (edge_id) {
    check(edge_id->numel() == edges.edges, "edge_id must have one entry per edge");
    ids = int_column(*edge_id, "edge_id");
    check_numbers(ids, 0, edges.edges, edges.edges, "edge_id", "edges");
  }
  Tensor out = pool_empty({edges.rows, size}, grad.scalar_type());
  const RowTasks tasks(edges.indptr, edges.rows, edges.edges, 2 * size);
  visit(grad.scalar_type(), "grad", [&](auto one) {
    using T = decltype(one);
    using A = AccumulatorOf<T>;
    const ExtremeGrad<T> op{edges,
                            int64_data(indptr, count + 1, "indptr"),
                            ids,
                            rows_of<T>(grad),
                            const_data_of<int32_t>(chosen),
                            weights.data<A>(),
                            weights.heads};
    T* to = data_of<T>(out);
    std::vector<A> partial(tasks.pieces.size() * static_cast<size_t>(size));
    const auto rows = [&](int64_t, int64_t first, int64_t last) {
      edges.check_range(edges.indptr[first], edges.indptr[last], count);
      std::vector<A> scratch(static_cast<size_t>(size));
      dispatch(ExtremeGradRows<T>{}, &op, &tasks, first, last, scratch.data(), to);
    };
    const auto piece = [&](int64_t i, const Piece& which) {
      edges.check_range(which.begin, which.end, count);
      dispatch(ExtremeGradPiece<T>{}, &op, &which, partial.data() + i * size);
    };
    const auto merge = [&](const LongRow& row) {
      A* total = partial.data() + row.first * size;
      for (int64_t i = row.first + 1; i < row.last; ++i)
        add(total, partial.data() + i * size, size);
      store_row(to + row.row * size, total, A{1}, size);
    };
    if (size) run_tasks(tasks, rows, piece, merge);
  });
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "csr_extreme(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor? t_indptr, "
      "Tensor? t_indices, Tensor? t_position, Tensor x, Tensor? weight, bool minimum) "
      "-> (Tensor, Tensor)");
  m.def(
      "csr_extreme_grad(Tensor t_indptr, Tensor t_indices, Tensor t_position, Tensor indptr, "
      "Tensor? edge_id, Tensor arg, Tensor grad, Tensor? weight) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("csr_extreme", TORCH_BOX(&pyg_scale::csr_extreme));
  m.impl("csr_extreme_grad", TORCH_BOX(&pyg_scale::csr_extreme_grad));
}
