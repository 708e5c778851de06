// dot_product_attention_grad_by_source, see pyg_scale/ops/attention_rules.py: the gradients of keys
// and values, from what dot_product_attention_grad found for each edge, in one pass over sources.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "attention.h"

namespace pyg_scale {
namespace {

template <typename T>
struct DotBySource {
  using A = AccumulatorOf<T>;
  const CsrEdges& by_source;  // ids are positions by destination
  Rows<T> query, grad;
  Heads shape;
  const A *logits_grad, *stays;  // [edges, heads] by position

  PYG_SCALE_INLINE void row(int64_t begin, int64_t end, int64_t limit, A* sums) const {
    const int64_t heads = shape.heads, channels = shape.channels, size = shape.size();
    const int64_t ahead = query.ahead();
    std::fill_n(sums, 2 * size, A{0});
    for (int64_t p = begin; p < end; ++p) {
      if (p + ahead < limit) {
        const int64_t coming = by_source.indices[p + ahead];
        query.prefetch(coming);
        grad.prefetch(coming);
      }
      const int64_t target = by_source.indices[p], position = by_source.edge_id[p];
      const T *of_query = query[target], *of_grad = grad[target];
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t c = h * channels, at = position * heads + h;
        add_scaled(sums + c, of_query + c, logits_grad[at], channels);
        add_scaled(sums + size + c, of_grad + c, stays[at], channels);
      }
    }
  }
};

template <typename T>
struct DotBySourceRows {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const DotBySource<T>* op, const RowTasks* tasks, int64_t first,
                                   int64_t last, A* sums, T* key_grad, T* value_grad) const {
    const int64_t *indptr = op->by_source.indptr, size = op->shape.size();
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      op->row(indptr[row], indptr[row + 1], indptr[last], sums);
      store_row(key_grad + row * size, sums, A{1}, size);
      store_row(value_grad + row * size, sums + size, A{1}, size);
    }
  }
};

template <typename T>
struct DotBySourcePiece {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const DotBySource<T>* op, const Piece* piece, A* sums) const {
    op->row(piece->begin, piece->end, piece->end, sums);
  }
};

std::tuple<Tensor, Tensor> dot_by_source(Tensor t_indptr, Tensor t_indices, Tensor t_position,
                                         Tensor query, Tensor out_grad, Tensor logits_grad,
                                         Tensor weights) {
  const CsrEdges by_source(t_indptr, t_indices, t_position);
  query = with_rows(query, "query");
  check(query.dim() == 3, "query must be of shape [num_dst, heads, channels]");
  out_grad = with_rows(out_grad, "grad");
  const int64_t num_dst = query.size(0), num_src = by_source.rows;
  check_heads(out_grad, query, num_dst, "grad");
  const Heads shape(query);
  const ScalarType type = query.scalar_type(), dtype = accumulator_type(type);
  const int64_t size = shape.size();
  logits_grad = dense(logits_grad, dtype, by_source.edges * shape.heads, "logits_grad");
  weights = dense(weights, dtype, by_source.edges * shape.heads, "weights");
  Tensor key_grad = pool_empty({num_src, shape.heads, shape.channels}, type);
  Tensor value_grad = pool_empty({num_src, shape.heads, shape.channels}, type);
  visit(type, "query", [&](auto one) {
    using T = decltype(one);
    using A = AccumulatorOf<T>;
    const DotBySource<T> op{by_source,
                            rows_of<T>(query),
                            rows_of<T>(out_grad),
                            shape,
                            const_data_of<A>(logits_grad),
                            const_data_of<A>(weights)};
    const RowTasks tasks(by_source.indptr, num_src, by_source.edges, 2 * size);
    const int64_t numbers = 2 * size;
    std::vector<A> partial(tasks.pieces.size() * static_cast<size_t>(numbers));
    T *to_key = data_of<T>(key_grad), *to_value = data_of<T>(value_grad);
    const auto rows = [&](int64_t, int64_t first, int64_t last) {
      by_source.check_range(by_source.indptr[first], by_source.indptr[last], num_dst);
      std::vector<A> sums(static_cast<size_t>(numbers));
      dispatch(DotBySourceRows<T>{}, &op, &tasks, first, last, sums.data(), to_key, to_value);
    };
    const auto piece = [&](int64_t i, const Piece& which) {
      by_source.check_range(which.begin, which.end, num_dst);
      dispatch(DotBySourcePiece<T>{}, &op, &which, partial.data() + i * numbers);
    };
    const auto merge = [&](const LongRow& row) {
      A* total = partial.data() + row.first * numbers;
      for (int64_t i = row.first + 1; i < row.last; ++i) {
        add(total, partial.data() + i * numbers, numbers);
      }
      store_row(to_key + row.row * size, total, A{1}, size);
      store_row(to_value + row.row * size, total + size, A{1}, size);
    };
    run_tasks(tasks, rows, piece, merge);
  });
  return {key_grad, value_grad};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "dot_product_attention_grad_by_source(Tensor t_indptr, Tensor t_indices, Tensor t_position, "
      "Tensor query, Tensor out_grad, Tensor logits_grad, Tensor weights) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("dot_product_attention_grad_by_source", TORCH_BOX(&pyg_scale::dot_by_source));
}
