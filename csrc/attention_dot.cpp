// dot_product_attention and its gradient, see pyg_scale/ops/attention.py. The gradients of keys and
// values are sums by source (csr_sum) with the weights that the gradient here finds for each edge.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention.h"

namespace pyg_scale {
namespace {

template <typename T>
struct DotRows {
  using A = AccumulatorOf<T>;
  Rows<T> query, key, value, edge;  // edge.data is null if there are no edge features
  A scale;
};

struct DotInput {
  DotInput(const CsrEdges& edges, const Tensor& q, const Tensor& k, const Tensor& v,
           const MaybeTensor& of_edges)
      : query(with_rows(q, "query")), key(with_rows(k, "key")), value(with_rows(v, "value")) {
    check(query.dim() == 3 && query.size(0) == edges.rows,
          "query must be of shape [num_dst, heads, channels]");
    check_heads(key, query, key.size(0), "key");
    check_heads(value, query, key.size(0), "value");
    has_edge = of_edges.has_value();
    if (has_edge) {
      edge = with_rows(*of_edges, "edge");
      check_heads(edge, query, edges.edges, "edge");
    }
  }

  template <typename T>
  DotRows<T> rows(double scale) const {
    return {rows_of<T>(query), rows_of<T>(key), rows_of<T>(value),
            has_edge ? rows_of<T>(edge) : Rows<T>{}, static_cast<AccumulatorOf<T>>(scale)};
  }

  Tensor query, key, value, edge;
  bool has_edge;
};

// x · y + x · z
template <typename A, typename T>
PYG_SCALE_INLINE A dot_both(const A* x, const T* y, const T* z, int64_t size) {
  return z ? dot(x, y, size) + dot(x, z, size) : dot(x, y, size);
}

template <typename T>
struct DotLogits {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges;
  DotRows<T> in;
  Heads shape;

  int64_t numbers() const { return shape.size(); }
  PYG_SCALE_INLINE const A* begin(int64_t row, A* scratch) const {
    return widened(in.query[row], shape.size(), scratch);
  }

  PYG_SCALE_INLINE void look_ahead(int64_t e, int64_t limit) const {
    in.value.prefetch(edges.indices[e]);  // for add_value, after the block's logits
    const int64_t coming = e + in.key.ahead();
    if (coming >= limit) return;
    in.key.prefetch(edges.indices[coming]);
    if (in.edge.data) in.edge.prefetch(edges.id(coming));
  }

  PYG_SCALE_INLINE void of(const A* of_row, int64_t e, A* to, int64_t stride) const {
    const T* from = in.key[edges.indices[e]];
    const T* of_edge = in.edge.data ? in.edge[edges.id(e)] : nullptr;
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t c = h * shape.channels;
      to[h * stride] = in.scale * dot_both(of_row + c, from + c, of_edge ? of_edge + c : nullptr,
                                           shape.channels);
    }
  }

  PYG_SCALE_INLINE void finish(A*, int64_t) const {}

  PYG_SCALE_INLINE void add_value(int64_t e, const A* weights, int64_t stride, A* sum) const {
    const T* from = in.value[edges.indices[e]];
    const T* of_edge = in.edge.data ? in.edge[edges.id(e)] : nullptr;
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t c = h * shape.channels;
      add_scaled(sum + c, from + c, weights[h * stride], shape.channels);
      if (of_edge) add_scaled(sum + c, of_edge + c, weights[h * stride], shape.channels);
    }
  }
};

// Over the in-edges of a destination.
template <typename T>
struct DotBackward {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges;
  DotRows<T> in;
  Rows<T> grad;
  Heads shape;
  WeightGradient<A> weight;
  A *stays, *logits_grad;  // [edges, heads] by position; the latter times `scale`
  T* edge_grad;            // [edges, heads, channels] by id, or null

  int64_t numbers() const { return 2 * kBlock * shape.heads + 2 * shape.size(); }

  PYG_SCALE_INLINE void row(int64_t row, int64_t begin, int64_t end, int64_t limit, A* scratch,
                            A* query_grad) const {
    const int64_t heads = shape.heads, channels = shape.channels, size = shape.size();
    const int64_t ahead = in.key.ahead();
    A *exps = scratch, *products = exps + kBlock * heads, *space = products + kBlock * heads;
    const A* query = widened(in.query[row], size, space);
    const A* of_grad = widened(grad[row], size, space + size);
    std::fill_n(query_grad, size, A{0});
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t count = std::min(kBlock, end - first);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t e = first + k;
        if (e + ahead < limit) {
          in.key.prefetch(edges.indices[e + ahead]);
          in.value.prefetch(edges.indices[e + ahead]);
          if (in.edge.data) in.edge.prefetch(edges.id(e + ahead));
        }
        const T *key = in.key[edges.indices[e]], *value = in.value[edges.indices[e]];
        const T* of_edge = in.edge.data ? in.edge[edges.id(e)] : nullptr;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t c = h * channels;
          const T* term = of_edge ? of_edge + c : nullptr;
          exps[k * heads + h] =
              in.scale * dot_both(query + c, key + c, term, channels) - weight.lse[row * heads + h];
          products[k * heads + h] = dot_both(of_grad + c, value + c, term, channels);
        }
      }
      exp_row(exps, count * heads);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t e = first + k, id = edges.id(e);
        const T* key = in.key[edges.indices[e]];
        const T* of_edge = in.edge.data ? in.edge[id] : nullptr;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = k * heads + h, c = h * channels;
          const auto [kept, logit] = weight.of(exps[at], products[at], row, id, heads, h);
          const A change = logit * in.scale;
          stays[e * heads + h] = kept;
          logits_grad[e * heads + h] = change;
          add_scaled(query_grad + c, key + c, change, channels);
          if (!of_edge) continue;
          add_scaled(query_grad + c, of_edge + c, change, channels);
          T* to = edge_grad + id * size + c;
          for (int64_t i = 0; i < channels; ++i) {
            to[i] = static_cast<T>(query[c + i] * change + of_grad[c + i] * kept);
          }
        }
      }
    }
  }
};

template <typename T>
struct DotBackwardRows {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const DotBackward<T>* op, const RowTasks* tasks, int64_t first,
                                   int64_t last, A* scratch, T* query_grad) const {
    const int64_t *indptr = op->edges.indptr, size = op->shape.size();
    A* sum = scratch + op->numbers();
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      op->row(row, indptr[row], indptr[row + 1], indptr[last], scratch, sum);
      store_row(query_grad + row * size, sum, A{1}, size);
    }
  }
};

template <typename T>
struct DotBackwardPiece {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const DotBackward<T>* op, const Piece* piece, A* scratch,
                                   A* query_grad) const {
    op->row(piece->row, piece->begin, piece->end, piece->end, scratch, query_grad);
  }
};

std::tuple<Tensor, Tensor, Tensor> dot_product_attention(Tensor indptr, Tensor indices,
                                                         MaybeTensor edge_id, MaybeTensor,
                                                         MaybeTensor, MaybeTensor, Tensor query,
                                                         Tensor key, Tensor value, MaybeTensor edge,
                                                         double scale, double dropout,
                                                         MaybeTensor seed, bool need_weights) {
  const CsrEdges edges(indptr, indices, edge_id);
  const DotInput in(edges, query, key, value, edge);
  const Heads shape(in.query);
  const ScalarType type = in.query.scalar_type(), dtype = accumulator_type(type);
  Tensor out = pool_empty({edges.rows, shape.heads, shape.channels}, type);
  Tensor lse = pool_empty({edges.rows, shape.heads}, dtype);
  Tensor weights = pool_empty({need_weights ? edges.edges : 0, shape.heads}, dtype);
  visit(type, "query", [&](auto one) {
    using T = decltype(one);
    using A = AccumulatorOf<T>;
    const DotLogits<T> logits{edges, in.rows<T>(scale), shape};
    attend(AttentionForward<T, DotLogits<T>>{edges, logits, shape, Dropout(seed, dropout),
                                             data_of<T>(out), data_of<A>(lse), data_of<A>(weights)},
           in.key.size(0));
  });
  return {out, lse, weights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dot_product_attention_grad(
    Tensor indptr, Tensor indices, MaybeTensor edge_id, Tensor query, Tensor key, Tensor value,
    MaybeTensor edge, double scale, double dropout, MaybeTensor seed, Tensor out, Tensor lse,
    MaybeTensor weights, Tensor out_grad, MaybeTensor weights_grad) {
  const CsrEdges edges(indptr, indices, edge_id);
  const DotInput in(edges, query, key, value, edge);
  const Heads shape(in.query);
  const int64_t heads = shape.heads, size = shape.size(), num_src = in.key.size(0);
  const ScalarType type = in.query.scalar_type(), dtype = accumulator_type(type);
  const AttentionGrad given(edges, in.query, out, lse, weights, out_grad, weights_grad);
  Tensor query_grad = pool_empty({edges.rows, heads, shape.channels}, type);
  Tensor edge_grad = pool_empty({in.has_edge ? edges.edges : 0, heads, shape.channels}, type);
  Tensor logits = pool_empty({edges.edges, heads}, dtype);
  Tensor stays = pool_empty({edges.edges, heads}, dtype);
  visit(type, "query", [&](auto one) {
    using T = decltype(one);
    using A = AccumulatorOf<T>;
    const std::vector<A> mean = given.mean<T>(edges, shape);
    const DotBackward<T> op{edges,
                            in.rows<T>(scale),
                            rows_of<T>(given.out_grad),
                            shape,
                            given.weight<A>(mean, Dropout(seed, dropout)),
                            data_of<A>(stays),
                            data_of<A>(logits),
                            data_of<T>(edge_grad)};
    const RowTasks tasks(edges.indptr, edges.rows, edges.edges, 6 * size);
    std::vector<A> partial(tasks.pieces.size() * static_cast<size_t>(size));
    T* to = data_of<T>(query_grad);
    const auto rows = [&](int64_t, int64_t first, int64_t last) {
      edges.check_range(edges.indptr[first], edges.indptr[last], num_src);
      std::vector<A> scratch(static_cast<size_t>(op.numbers() + size));
      dispatch(DotBackwardRows<T>{}, &op, &tasks, first, last, scratch.data(), to);
    };
    const auto piece = [&](int64_t i, const Piece& which) {
      edges.check_range(which.begin, which.end, num_src);
      std::vector<A> scratch(static_cast<size_t>(op.numbers()));
      dispatch(DotBackwardPiece<T>{}, &op, &which, scratch.data(), partial.data() + i * size);
    };
    const auto merge = [&](const LongRow& row) {
      A* total = partial.data() + row.first * size;
      for (int64_t i = row.first + 1; i < row.last; ++i)
        add(total, partial.data() + i * size, size);
      store_row(to + row.row * size, total, A{1}, size);
    };
    run_tasks(tasks, rows, piece, merge);
  });
  return {query_grad, edge_grad, logits, stays};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "dot_product_attention(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor? t_indptr, "
      "Tensor? t_indices, Tensor? t_position, Tensor query, Tensor key, Tensor value, "
      "Tensor? edge, float scale, float dropout, Tensor? seed, bool need_weights) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "dot_product_attention_grad(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor query, "
      "Tensor key, Tensor value, Tensor? edge, float scale, float dropout, Tensor? seed, "
      "Tensor out, Tensor lse, Tensor? weights, Tensor out_grad, Tensor? weights_grad) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("dot_product_attention", TORCH_BOX(&pyg_scale::dot_product_attention));
  m.impl("dot_product_attention_grad", TORCH_BOX(&pyg_scale::dot_product_attention_grad));
}
