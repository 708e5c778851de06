// gat_attention and its gradient, see pyg_scale/ops/attention.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention.h"

namespace pyg_scale {
namespace {

template <typename T>
struct GatLogits {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges;
  Rows<T> x;
  const A *a_src, *a_dst, *a_edge;
  int64_t heads, channels;
  A slope;

  int64_t numbers() const { return 0; }
  PYG_SCALE_INLINE const A* begin(int64_t row, A*) const { return a_dst + row * heads; }

  PYG_SCALE_INLINE void look_ahead(int64_t e, int64_t limit) const {
    if (e + kBlock < limit) __builtin_prefetch(a_src + edges.indices[e + kBlock] * heads);
    x.prefetch(edges.indices[e]);  // for add_value, after the block's logits
  }

  PYG_SCALE_INLINE void of(const A* of_row, int64_t e, A* to, int64_t stride) const {
    const A* of_source = a_src + edges.indices[e] * heads;
    const A* of_edge = a_edge ? a_edge + edges.id(e) * heads : nullptr;
    for (int64_t h = 0; h < heads; ++h) {
      to[h * stride] = of_source[h] + of_row[h] + (of_edge ? of_edge[h] : A{0});
    }
  }

  // In vectors, as a branch on the sign would be mispredicted every other time.
  PYG_SCALE_INLINE void finish(A* of_head, int64_t size) const {
    for (int64_t k = 0; k < size; k += kLanes<A>) {
      keep<A>(of_head + k, leaky<A>(load(of_head + k), slope));
    }
  }

  PYG_SCALE_INLINE void add_value(int64_t e, const A* weights, int64_t stride, A* sum) const {
    const T* from = x[edges.indices[e]];
    for (int64_t h = 0; h < heads; ++h) {
      add_scaled(sum + h * channels, from + h * channels, weights[h * stride], channels);
    }
  }
};

// Over the out-edges of a source: the gradients of its features and of its part of the logits.
template <typename T>
struct GatBackward {
  using A = AccumulatorOf<T>;
  const CsrEdges& by_source;  // ids are positions by destination
  const CsrEdges& edges;
  Rows<T> x, grad;
  const A *a_src, *a_dst, *a_edge;
  Heads shape;
  A slope;
  WeightGradient<A> weight;
  A* logits_grad;  // [edges, heads] by id

  PYG_SCALE_INLINE void row(int64_t source, int64_t begin, int64_t end, int64_t limit, A* scratch,
                            A* x_grad, A* a_grad) const {
    const int64_t heads = shape.heads, channels = shape.channels, ahead = grad.ahead();
    A *exps = scratch, *slopes = exps + kBlock * heads;
    const A* of_source = a_src + source * heads;
    const A* features = widened(x[source], shape.size(), slopes + kBlock * heads);
    std::fill_n(x_grad, shape.size(), A{0});
    std::fill_n(a_grad, heads, A{0});
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t count = std::min(kBlock, end - first);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t p = first + k, target = by_source.indices[p];
        if (p + kBlock < limit) {
          const int64_t coming = by_source.indices[p + kBlock];
          __builtin_prefetch(a_dst + coming * heads);
          __builtin_prefetch(weight.lse + coming * heads);
        }
        const A* of_edge = a_edge ? a_edge + edges.id(by_source.edge_id[p]) * heads : nullptr;
        for (int64_t h = 0; h < heads; ++h) {
          const A sum = of_source[h] + a_dst[target * heads + h] + (of_edge ? of_edge[h] : A{0});
          slopes[k * heads + h] = sum;
          exps[k * heads + h] = weight.lse[target * heads + h];
        }
      }
      // The block has whole vectors; what is behind `count` edges is not used.
      const Vector<A> one = all<A>(A{1}), other = all<A>(slope);
      for (int64_t k = 0; k < count * heads; k += kLanes<A>) {
        const Vector<A> sum = load(slopes + k), factor = sum > Vector<A>{} ? one : other;
        keep<A>(exps + k, sum * factor - load(exps + k));
        keep<A>(slopes + k, factor);
      }
      exp_row(exps, count * heads);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t p = first + k, target = by_source.indices[p];
        const int64_t id = edges.id(by_source.edge_id[p]);
        if (p + ahead < limit) {
          grad.prefetch(by_source.indices[p + ahead]);
          __builtin_prefetch(logits_grad + edges.id(by_source.edge_id[p + ahead]) * heads, 1);
        }
        const T* from = grad[target];
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t c = h * channels;
          const A product = dot(features + c, from + c, channels);
          const auto [stays, logit] = weight.of(exps[k * heads + h], product, target, id, heads, h);
          const A change = logit * slopes[k * heads + h];
          logits_grad[id * heads + h] = change;
          a_grad[h] += change;
          add_scaled(x_grad + c, from + c, stays, channels);
        }
      }
    }
  }

  int64_t numbers() const { return 2 * kBlock * shape.heads + shape.size(); }
};

template <typename T>
struct GatBackwardRows {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const GatBackward<T>* op, const RowTasks* tasks, int64_t first,
                                   int64_t last, A* scratch, T* x_grad, A* a_grad) const {
    const int64_t *indptr = op->by_source.indptr, size = op->shape.size();
    A* sum = scratch + op->numbers();
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      op->row(row, indptr[row], indptr[row + 1], indptr[last], scratch, sum,
              a_grad + row * op->shape.heads);
      store_row(x_grad + row * size, sum, A{1}, size);
    }
  }
};

template <typename T>
struct GatBackwardPiece {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const GatBackward<T>* op, const Piece* piece, A* scratch,
                                   A* sums) const {
    op->row(piece->row, piece->begin, piece->end, piece->end, scratch, sums,
            sums + op->shape.size());
  }
};

struct GatInput {
  GatInput(const CsrEdges& edges, const Tensor& given, const Tensor& src, const Tensor& dst,
           const MaybeTensor& edge)
      : x(with_rows(given, "x")) {
    check(x.dim() == 3, "x must be of shape [num_src, heads, channels]");
    const ScalarType dtype = accumulator_type(x.scalar_type());
    const int64_t heads = x.size(1);
    a_src = dense(src, dtype, x.size(0) * heads, "a_src");
    a_dst = dense(dst, dtype, edges.rows * heads, "a_dst");
    if (edge) a_edge = dense(*edge, dtype, edges.edges * heads, "a_edge");
    has_edge = edge.has_value();
  }
  Tensor x, a_src, a_dst, a_edge;
  bool has_edge;
};

std::tuple<Tensor, Tensor, Tensor> gat_attention(Tensor indptr, Tensor indices, MaybeTensor edge_id,
                                                 MaybeTensor, MaybeTensor, MaybeTensor, Tensor x,
                                                 Tensor a_src, Tensor a_dst, MaybeTensor a_edge,
                                                 double slope, double dropout, MaybeTensor seed,
                                                 bool need_weights) {
  const CsrEdges edges(indptr, indices, edge_id);
  const GatInput in(edges, x, a_src, a_dst, a_edge);
  const Heads shape(in.x);
  const ScalarType dtype = accumulator_type(in.x.scalar_type());
  Tensor out = pool_empty({edges.rows, shape.heads, shape.channels}, in.x.scalar_type());
  Tensor lse = pool_empty({edges.rows, shape.heads}, dtype);
  Tensor weights = pool_empty({need_weights ? edges.edges : 0, shape.heads}, dtype);
  visit(in.x.scalar_type(), "x", [&](auto one) {
    using T = decltype(one);
    using A = AccumulatorOf<T>;
    const GatLogits<T> logits{edges,
                              rows_of<T>(in.x),
                              const_data_of<A>(in.a_src),
                              const_data_of<A>(in.a_dst),
                              in.has_edge ? const_data_of<A>(in.a_edge) : nullptr,
                              shape.heads,
                              shape.channels,
                              static_cast<A>(slope)};
    attend(AttentionForward<T, GatLogits<T>>{edges, logits, shape, Dropout(seed, dropout),
                                             data_of<T>(out), data_of<A>(lse), data_of<A>(weights)},
           in.x.size(0));
  });
  return {out, lse, weights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gat_attention_grad(
    Tensor indptr, Tensor indices, MaybeTensor edge_id, Tensor t_indptr, Tensor t_indices,
    Tensor t_position, Tensor x, Tensor a_src, Tensor a_dst, MaybeTensor a_edge, double slope,
    double dropout, MaybeTensor seed, Tensor out, Tensor lse, MaybeTensor weights, Tensor out_grad,
    MaybeTensor weights_grad) {
  const CsrEdges edges(indptr, indices, edge_id), by_source(t_indptr, t_indices, t_position);
  const GatInput in(edges, x, a_src, a_dst, a_edge);
  const Heads shape(in.x);
  const int64_t heads = shape.heads, size = shape.size(), num_src = in.x.size(0);
  check(by_source.rows == num_src && by_source.edges == edges.edges,
        "the edges by source are not those of this graph");
  const ScalarType dtype = accumulator_type(in.x.scalar_type());
  const AttentionGrad given(edges, in.x, out, lse, weights, out_grad, weights_grad);
  Tensor x_grad = pool_empty({num_src, heads, shape.channels}, in.x.scalar_type());
  Tensor src_grad = pool_empty({num_src, heads}, dtype);
  Tensor dst_grad = pool_empty({edges.rows, heads}, dtype);
  Tensor edge_grad = pool_empty({edges.edges, heads}, dtype);
  visit(in.x.scalar_type(), "x", [&](auto one) {
    using T = decltype(one);
    using A = AccumulatorOf<T>;
    const std::vector<A> mean = given.mean<T>(edges, shape);
    const GatBackward<T> op{by_source,
                            edges,
                            rows_of<T>(in.x),
                            rows_of<T>(given.out_grad),
                            const_data_of<A>(in.a_src),
                            const_data_of<A>(in.a_dst),
                            in.has_edge ? const_data_of<A>(in.a_edge) : nullptr,
                            shape,
                            static_cast<A>(slope),
                            given.weight<A>(mean, Dropout(seed, dropout)),
                            data_of<A>(edge_grad)};
    const RowTasks tasks(by_source.indptr, num_src, edges.edges, 4 * size);
    const int64_t numbers = size + heads;
    std::vector<A> partial(tasks.pieces.size() * static_cast<size_t>(numbers));
    T* to_x = data_of<T>(x_grad);
    A* to_src = data_of<A>(src_grad);
    const auto rows = [&](int64_t, int64_t first, int64_t last) {
      by_source.check_range(by_source.indptr[first], by_source.indptr[last], edges.rows);
      std::vector<A> scratch(static_cast<size_t>(op.numbers() + size));
      dispatch(GatBackwardRows<T>{}, &op, &tasks, first, last, scratch.data(), to_x, to_src);
    };
    const auto piece = [&](int64_t i, const Piece& which) {
      by_source.check_range(which.begin, which.end, edges.rows);
      std::vector<A> scratch(static_cast<size_t>(op.numbers()));
      dispatch(GatBackwardPiece<T>{}, &op, &which, scratch.data(), partial.data() + i * numbers);
    };
    const auto merge = [&](const LongRow& row) {
      A* total = partial.data() + row.first * numbers;
      for (int64_t i = row.first + 1; i < row.last; ++i) {
        add(total, partial.data() + i * numbers, numbers);
      }
      store_row(to_x + row.row * size, total, A{1}, size);
      std::copy_n(total + size, heads, to_src + row.row * heads);
    };
    run_tasks(tasks, rows, piece, merge);
    A* to_dst = data_of<A>(dst_grad);
    const RowTasks by_row(edges.indptr, edges.rows, edges.edges, heads);
    take_turns(by_row.num_ranges(), true, [&](int64_t i) {
      for (int64_t row = by_row.bounds[i]; row < by_row.bounds[i + 1]; ++row) {
        std::fill_n(to_dst + row * heads, heads, A{0});
        for (int64_t e = edges.indptr[row]; e < edges.indptr[row + 1]; ++e) {
          add(to_dst + row * heads, op.logits_grad + edges.id(e) * heads, heads);
        }
      }
    });
  });
  return {x_grad, src_grad, dst_grad, edge_grad};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "gat_attention(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor? t_indptr, "
      "Tensor? t_indices, Tensor? t_position, Tensor x, Tensor a_src, Tensor a_dst, "
      "Tensor? a_edge, float negative_slope, float dropout, Tensor? seed, bool need_weights) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "gat_attention_grad(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor t_indptr, "
      "Tensor t_indices, Tensor t_position, Tensor x, Tensor a_src, Tensor a_dst, "
      "Tensor? a_edge, float negative_slope, float dropout, Tensor? seed, Tensor out, Tensor lse, "
      "Tensor? weights, Tensor out_grad, Tensor? weights_grad) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("gat_attention", TORCH_BOX(&pyg_scale::gat_attention));
  m.impl("gat_attention_grad", TORCH_BOX(&pyg_scale::gat_attention_grad));
}
