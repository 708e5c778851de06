// gatv2_attention_grad, see pyg_scale/ops/attention.py.
//
// There are two passes. The first goes by destination: the gradients of the softmax, of the
// destinations and of the attention vector. The second goes by source, with what the first found
// for each edge.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention_gatv2.h"

namespace pyg_scale {
namespace {

template <typename T>
struct ByDestination {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges;
  Gatv2Rows<T> in;
  Rows<T> grad;
  Heads shape;
  WeightGradient<A> weight;
  A *stays, *logits_grad;  // [edges, heads] by position
  T* edge_grad;            // [edges, heads, channels] by id, or null

  int64_t numbers() const { return 2 * kBlock * shape.heads + 2 * shape.size(); }

  // Adds to `att_grad`; `dst_grad` is set.
  PYG_SCALE_INLINE void row(int64_t row, int64_t begin, int64_t end, int64_t limit, A* scratch,
                            A* dst_grad, A* att_grad) const {
    const int64_t heads = shape.heads, channels = shape.channels, size = shape.size();
    const int64_t ahead = in.src.ahead();
    A *exps = scratch, *products = exps + kBlock * heads, *space = products + kBlock * heads;
    const A* to = widened(in.dst[row], size, space);
    const A* of_grad = widened(grad[row], size, space + size);
    std::fill_n(dst_grad, size, A{0});
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t count = std::min(kBlock, end - first);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t e = first + k;
        if (e + ahead < limit) {
          in.src.prefetch(edges.indices[e + ahead]);
          if (in.edge.data) in.edge.prefetch(edges.id(e + ahead));
        }
        const T* from = in.src[edges.indices[e]];
        const T* of_edge = in.edge.data ? in.edge[edges.id(e)] : nullptr;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t c = h * channels;
          exps[k * heads + h] =
              in.logit(from + c, to + c, of_edge ? of_edge + c : nullptr, in.att + c, channels) -
              weight.lse[row * heads + h];
          products[k * heads + h] = dot(of_grad + c, from + c, channels);
        }
      }
      exp_row(exps, count * heads);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t e = first + k, id = edges.id(e);
        const T* from = in.src[edges.indices[e]];
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = k * heads + h, c = h * channels;
          const auto [kept, logit] = weight.of(exps[at], products[at], row, id, heads, h);
          stays[e * heads + h] = kept;
          logits_grad[e * heads + h] = logit;
          edge(from + c, to + c, in.edge.data ? in.edge[id] + c : nullptr, in.att + c, logit,
               dst_grad + c, att_grad + c, edge_grad ? edge_grad + id * size + c : nullptr);
        }
      }
    }
  }

  PYG_SCALE_INLINE void edge(const T* from, const A* to, const T* of_edge, const A* att, A logit,
                             A* dst_grad, A* att_grad, T* of_edge_grad) const {
    const int64_t channels = shape.channels;
    const A slope = in.slope;
    int64_t c = 0;
    for (; c + kLanes<A> <= channels; c += kLanes<A>) {
      Vector<A> both = load(from + c) + load(to + c);
      if (of_edge) both += load(of_edge + c);
      const Vector<A> one = all<A>(logit);
      const Vector<A> slopes = both > Vector<A>{} ? one : one * slope;
      const Vector<A> change = slopes * load(att + c);
      keep<A>(dst_grad + c, load(dst_grad + c) + change);
      keep<A>(att_grad + c, load(att_grad + c) + both * slopes);
      if (of_edge_grad) {
        for (int k = 0; k < kLanes<A>; ++k) of_edge_grad[c + k] = static_cast<T>(change[k]);
      }
    }
    for (; c < channels; ++c) {
      const A both = widen(from[c]) + to[c] + (of_edge ? widen(of_edge[c]) : A{0});
      const A slopes = both > 0 ? logit : logit * slope;
      const A change = slopes * att[c];
      dst_grad[c] += change;
      att_grad[c] += both * slopes;
      if (of_edge_grad) of_edge_grad[c] = static_cast<T>(change);
    }
  }
};

template <typename T>
struct ByDestinationRows {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const ByDestination<T>* op, const RowTasks* tasks, int64_t first,
                                   int64_t last, A* scratch, T* dst_grad, A* att_grad) const {
    const int64_t *indptr = op->edges.indptr, size = op->shape.size();
    A* sum = scratch + op->numbers();
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      op->row(row, indptr[row], indptr[row + 1], indptr[last], scratch, sum, att_grad);
      store_row(dst_grad + row * size, sum, A{1}, size);
    }
  }
};

template <typename T>
struct ByDestinationPiece {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const ByDestination<T>* op, const Piece* piece, A* scratch,
                                   A* dst_grad, A* att_grad) const {
    op->row(piece->row, piece->begin, piece->end, piece->end, scratch, dst_grad, att_grad);
  }
};

template <typename T>
struct BySource {
  using A = AccumulatorOf<T>;
  const CsrEdges& by_source;  // ids are positions by destination
  const CsrEdges& edges;
  Gatv2Rows<T> in;
  Rows<T> grad;
  Heads shape;
  const A *stays, *logits_grad;  // [edges, heads] by position

  int64_t numbers() const { return shape.size(); }

  PYG_SCALE_INLINE void row(int64_t source, int64_t begin, int64_t end, int64_t limit, A* scratch,
                            A* src_grad) const {
    const int64_t heads = shape.heads, channels = shape.channels, ahead = grad.ahead();
    const A* from = widened(in.src[source], shape.size(), scratch);
    std::fill_n(src_grad, shape.size(), A{0});
    for (int64_t p = begin; p < end; ++p) {
      if (p + ahead < limit) {
        const int64_t coming = by_source.indices[p + ahead];
        const int64_t position = by_source.edge_id[p + ahead];
        grad.prefetch(coming);
        in.dst.prefetch(coming);
        __builtin_prefetch(stays + position * heads);
        __builtin_prefetch(logits_grad + position * heads);
        if (in.edge.data) in.edge.prefetch(edges.id(position));
      }
      const int64_t target = by_source.indices[p], position = by_source.edge_id[p];
      const T *to = in.dst[target], *of_grad = grad[target];
      const T* of_edge = in.edge.data ? in.edge[edges.id(position)] : nullptr;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t c = h * channels, at = position * heads + h;
        head(from + c, to + c, of_grad + c, of_edge ? of_edge + c : nullptr, in.att + c, stays[at],
             logits_grad[at], src_grad + c);
      }
    }
  }

  PYG_SCALE_INLINE void head(const A* from, const T* to, const T* of_grad, const T* of_edge,
                             const A* att, A kept, A logit, A* src_grad) const {
    const int64_t channels = shape.channels;
    const A slope = in.slope;
    int64_t c = 0;
    for (; c + kLanes<A> <= channels; c += kLanes<A>) {
      Vector<A> both = load(from + c) + load(to + c);
      if (of_edge) both += load(of_edge + c);
      const Vector<A> one = all<A>(logit);
      const Vector<A> slopes = both > Vector<A>{} ? one : one * slope;
      keep<A>(src_grad + c, load(src_grad + c) + load(of_grad + c) * kept + slopes * load(att + c));
    }
    for (; c < channels; ++c) {
      const A both = from[c] + widen(to[c]) + (of_edge ? widen(of_edge[c]) : A{0});
      src_grad[c] += widen(of_grad[c]) * kept + (both > 0 ? logit : logit * slope) * att[c];
    }
  }
};

template <typename T>
struct BySourceRows {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const BySource<T>* op, const RowTasks* tasks, int64_t first,
                                   int64_t last, A* scratch, T* src_grad) const {
    const int64_t *indptr = op->by_source.indptr, size = op->shape.size();
    A* sum = scratch + op->numbers();
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      op->row(row, indptr[row], indptr[row + 1], indptr[last], scratch, sum);
      store_row(src_grad + row * size, sum, A{1}, size);
    }
  }
};

template <typename T>
struct BySourcePiece {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const BySource<T>* op, const Piece* piece, A* scratch,
                                   A* src_grad) const {
    op->row(piece->row, piece->begin, piece->end, piece->end, scratch, src_grad);
  }
};

// Runs `op` over the rows of `of`; long rows are added up from their pieces.
template <typename T>
void run_by_destination(const ByDestination<T>& op, int64_t num_src, T* dst_grad,
                        AccumulatorOf<T>* att_grad) {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges = op.edges;
  const int64_t size = op.shape.size();
  const RowTasks tasks(edges.indptr, edges.rows, edges.edges, 6 * size);
  const size_t pieces = tasks.pieces.size();
  std::vector<A> partial(pieces * static_cast<size_t>(size));
  // The attention vector's gradient: by task, then added up in the order of tasks.
  std::vector<A> att((pieces + static_cast<size_t>(tasks.num_ranges())) *
                     static_cast<size_t>(size));
  const auto rows = [&](int64_t i, int64_t first, int64_t last) {
    edges.check_range(edges.indptr[first], edges.indptr[last], num_src);
    std::vector<A> scratch(static_cast<size_t>(op.numbers() + size));
    dispatch(ByDestinationRows<T>{}, &op, &tasks, first, last, scratch.data(), dst_grad,
             att.data() + (static_cast<int64_t>(pieces) + i) * size);
  };
  const auto piece = [&](int64_t i, const Piece& which) {
    edges.check_range(which.begin, which.end, num_src);
    std::vector<A> scratch(static_cast<size_t>(op.numbers()));
    dispatch(ByDestinationPiece<T>{}, &op, &which, scratch.data(), partial.data() + i * size,
             att.data() + i * size);
  };
  const auto merge = [&](const LongRow& row) {
    A* total = partial.data() + row.first * size;
    for (int64_t i = row.first + 1; i < row.last; ++i) add(total, partial.data() + i * size, size);
    store_row(dst_grad + row.row * size, total, A{1}, size);
  };
  run_tasks(tasks, rows, piece, merge);
  std::fill_n(att_grad, size, A{0});
  for (size_t at = 0; at < att.size(); at += static_cast<size_t>(size)) {
    add(att_grad, att.data() + at, size);
  }
}

template <typename T>
void run_by_source(const BySource<T>& op, int64_t num_dst, T* src_grad) {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges = op.by_source;
  const int64_t size = op.shape.size();
  const RowTasks tasks(edges.indptr, edges.rows, edges.edges, 4 * size);
  std::vector<A> partial(tasks.pieces.size() * static_cast<size_t>(size));
  const auto rows = [&](int64_t, int64_t first, int64_t last) {
    edges.check_range(edges.indptr[first], edges.indptr[last], num_dst);
    std::vector<A> scratch(static_cast<size_t>(op.numbers() + size));
    dispatch(BySourceRows<T>{}, &op, &tasks, first, last, scratch.data(), src_grad);
  };
  const auto piece = [&](int64_t i, const Piece& which) {
    edges.check_range(which.begin, which.end, num_dst);
    std::vector<A> scratch(static_cast<size_t>(op.numbers()));
    dispatch(BySourcePiece<T>{}, &op, &which, scratch.data(), partial.data() + i * size);
  };
  const auto merge = [&](const LongRow& row) {
    A* total = partial.data() + row.first * size;
    for (int64_t i = row.first + 1; i < row.last; ++i) add(total, partial.data() + i * size, size);
    store_row(src_grad + row.row * size, total, A{1}, size);
  };
  run_tasks(tasks, rows, piece, merge);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gatv2_attention_grad(
    Tensor indptr, Tensor indices, MaybeTensor edge_id, Tensor t_indptr, Tensor t_indices,
    Tensor t_position, Tensor x_src, Tensor x_dst, Tensor att, MaybeTensor x_edge, double slope,
    double dropout, MaybeTensor seed, Tensor out, Tensor lse, MaybeTensor weights, Tensor out_grad,
    MaybeTensor weights_grad) {
  const CsrEdges edges(indptr, indices, edge_id), by_source(t_indptr, t_indices, t_position);
  const Gatv2Input in(edges, x_src, x_dst, att, x_edge);
  const Heads shape(in.src);
  const int64_t heads = shape.heads, num_src = in.src.size(0);
  check(by_source.rows == num_src && by_source.edges == edges.edges,
        "the edges by source are not those of this graph");
  const ScalarType type = in.src.scalar_type(), dtype = accumulator_type(type);
  const AttentionGrad given(edges, in.src, out, lse, weights, out_grad, weights_grad);
  Tensor src_grad = pool_empty({num_src, heads, shape.channels}, type);
  Tensor dst_grad = pool_empty({edges.rows, heads, shape.channels}, type);
  Tensor att_grad = pool_empty({heads, shape.channels}, dtype);
  Tensor edge_grad = pool_empty({in.has_edge ? edges.edges : 0, heads, shape.channels}, type);
  Tensor stays = pool_empty({edges.edges, heads}, dtype);
  Tensor logits = pool_empty({edges.edges, heads}, dtype);
  visit(type, "x_src", [&](auto one) {
    using T = decltype(one);
    using A = AccumulatorOf<T>;
    const std::vector<A> mean = given.mean<T>(edges, shape);
    A *kept = data_of<A>(stays), *of_logits = data_of<A>(logits);
    run_by_destination(ByDestination<T>{edges, in.rows<T>(slope), rows_of<T>(given.out_grad), shape,
                                        given.weight<A>(mean, Dropout(seed, dropout)), kept,
                                        of_logits, data_of<T>(edge_grad)},
                       num_src, data_of<T>(dst_grad), data_of<A>(att_grad));
    run_by_source(BySource<T>{by_source, edges, in.rows<T>(slope), rows_of<T>(given.out_grad),
                              shape, kept, of_logits},
                  edges.rows, data_of<T>(src_grad));
  });
  return {src_grad, dst_grad, att_grad, edge_grad};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "gatv2_attention_grad(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor t_indptr, "
      "Tensor t_indices, Tensor t_position, Tensor x_src, Tensor x_dst, Tensor att, "
      "Tensor? x_edge, float negative_slope, float dropout, Tensor? seed, Tensor out, Tensor lse, "
      "Tensor? weights, Tensor out_grad, Tensor? weights_grad) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("gatv2_attention_grad", TORCH_BOX(&pyg_scale::gatv2_attention_grad));
}
