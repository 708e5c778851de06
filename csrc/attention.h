// What the attention ops share: dropout, the online softmax over the edges of a destination, and
// the term of its gradient that is the same for all of them. See pyg_scale/ops/attention.py.
#pragma once

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "csr_edges.h"
#include "keys.h"

namespace pyg_scale {

constexpr int64_t kBlock = 32;              // edges whose logits are made together; whole vectors
constexpr uint64_t kAttentionDropout = 20;  // see pyg_scale/ops/keys.py

// Dropout of weights. The factor of a weight is 0 if it is dropped.
struct Dropout {
  Dropout(const MaybeTensor& seed, double p) {
    if (!seed) return;
    check(p >= 0 && p <= 1, "dropout must be a probability");
    const Tensor number = dense(*seed, ScalarType::Long, 1, "seed");
    on = true;
    key =
        fold(fold(0, kAttentionDropout), static_cast<uint64_t>(*number.const_data_ptr<int64_t>()));
    below = static_cast<uint64_t>(p * 4294967296.0);
    scale = p < 1 ? 1 / (1 - p) : 0;
  }

  PYG_SCALE_INLINE double factor(int64_t edge, int64_t heads, int64_t head) const {
    if (!on) return 1;
    const auto index = static_cast<uint64_t>(edge * heads + head);
    return (draw(key, index) >> 32) >= below ? scale : 0;
  }

  bool on = false;
  uint64_t key = 0, below = 0;
  double scale = 1;
};

// The shape of rows of heads, [*, heads, channels].
struct Heads {
  explicit Heads(const Tensor& x) : heads(x.size(1)), channels(x.size(2)) {
    constexpr int64_t kMost = int64_t{1} << 24;  // a tensor without rows can claim more
    check(heads <= kMost && channels <= kMost, "there are more than 2**24 heads or channels");
  }
  int64_t size() const { return heads * channels; }
  int64_t heads, channels;
};

inline void check_heads(const Tensor& x, const Tensor& like, int64_t count, const char* name) {
  check(x.dim() == 3 && x.size(0) == count && x.size(1) == like.size(1) &&
            x.size(2) == like.size(2) && x.scalar_type() == like.scalar_type(),
        std::string(name) + " must be of shape [" + std::to_string(count) + ", heads, channels], " +
            "of the type of the other features");
}

// The state of a row of the result until it is finished. For each head it has the largest logit so
// far, the sum of exp(logit - largest), and the sum of rows with those weights.
template <typename A>
struct Softmax {
  A *largest, *total, *sum;
  static int64_t numbers(const Heads& shape) { return 2 * shape.heads + shape.size(); }
  Softmax(A* memory, const Heads& shape)
      : largest(memory), total(memory + shape.heads), sum(memory + 2 * shape.heads) {}
};

// The forward pass. `Logits` has begin(row, scratch), numbers of scratch, look_ahead(e),
// of(e, to, stride), finish(logits of a head, whole vectors of them) and
// add_value(e, weights, stride, sum).
template <typename T, typename Logits>
struct AttentionForward {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges;
  const Logits& logits;
  Heads shape;
  Dropout dropout;
  T* out;
  A* lse;
  A* weights;  // [edges, heads] by id, or null

  PYG_SCALE_INLINE void some(int64_t row, int64_t begin, int64_t end, int64_t limit, A* scratch,
                             const Softmax<A>& state) const {
    const int64_t heads = shape.heads, channels = shape.channels;
    A* block = scratch;  // [heads, kBlock]
    const A none = -std::numeric_limits<A>::infinity();
    std::fill_n(state.largest, heads, none);
    std::fill_n(state.total, heads, A{0});
    std::fill_n(state.sum, shape.size(), A{0});
    auto of_row = logits.begin(row, scratch + heads * kBlock);
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t count = std::min(kBlock, end - first);
      const int64_t padded = (count + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
      for (int64_t k = 0; k < count; ++k) {
        logits.look_ahead(first + k, limit);
        logits.of(of_row, first + k, block + k, kBlock);
      }
      for (int64_t h = 0; h < heads; ++h) {
        A* of_head = block + h * kBlock;
        logits.finish(of_head, padded);
        for (int64_t k = count; k < padded; ++k) of_head[k] = none;
        const A largest = largest_of(of_head, padded, state.largest[h]);
        if (weights) {
          for (int64_t k = 0; k < count; ++k) {
            weights[edges.id(first + k) * heads + h] = of_head[k];
          }
        }
        const A base = largest == none ? A{0} : largest;
        if (largest != state.largest[h] && first != begin) {
          A shrink = state.largest[h] - base;
          exp_row(&shrink, 1);
          state.total[h] *= shrink;
          A* sum = state.sum + h * channels;
          for (int64_t c = 0; c < channels; ++c) sum[c] *= shrink;
        }
        state.largest[h] = largest;
        state.total[h] += exp_and_add(of_head, padded, base);
        if (dropout.on) {
          for (int64_t k = 0; k < count; ++k) {
            of_head[k] *= static_cast<A>(dropout.factor(edges.id(first + k), heads, h));
          }
        }
      }
      for (int64_t k = 0; k < count; ++k) {
        logits.add_value(first + k, block + k, kBlock, state.sum);
      }
    }
  }

  // Writes the finished row; `state` covers all of its edges.
  PYG_SCALE_INLINE void finish(int64_t row, const Softmax<A>& state) const {
    const int64_t heads = shape.heads, channels = shape.channels;
    const int64_t begin = edges.indptr[row], end = edges.indptr[row + 1];
    for (int64_t h = 0; h < heads; ++h) {
      const A factor = begin == end ? A{0} : A{1} / state.total[h];
      A* sum = state.sum + h * channels;
      store_row(out + row * shape.size() + h * channels, sum, factor, channels);
      const A base =
          state.largest[h] == -std::numeric_limits<A>::infinity() ? A{0} : state.largest[h];
      lse[row * heads + h] = base + std::log(state.total[h]);
      if (!weights) continue;
      for (int64_t e = begin; e < end; ++e) {
        A& weight = weights[edges.id(e) * heads + h];
        weight = std::exp(weight - base) * factor;
        if (dropout.on) weight *= static_cast<A>(dropout.factor(edges.id(e), heads, h));
      }
    }
  }

  // Merges `right` into `left`.
  PYG_SCALE_INLINE void merge(const Softmax<A>& left, const Softmax<A>& right) const {
    const A none = -std::numeric_limits<A>::infinity();
    for (int64_t h = 0; h < shape.heads; ++h) {
      const A largest = right.largest[h] > left.largest[h] ? right.largest[h] : left.largest[h];
      const A base = largest == none ? A{0} : largest;
      const A mine = std::exp(left.largest[h] - base), other = std::exp(right.largest[h] - base);
      left.largest[h] = largest;
      left.total[h] = left.total[h] * mine + right.total[h] * other;
      for (int64_t c = h * shape.channels; c < (h + 1) * shape.channels; ++c) {
        left.sum[c] = left.sum[c] * mine + right.sum[c] * other;
      }
    }
  }

  int64_t scratch_numbers() const { return shape.heads * kBlock + logits.numbers(); }
};

template <typename T, typename Logits>
struct AttentionRows {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const AttentionForward<T, Logits>* op, const RowTasks* tasks,
                                   int64_t first, int64_t last, A* memory) const {
    const Softmax<A> state(memory, op->shape);
    A* scratch = memory + Softmax<A>::numbers(op->shape);
    const int64_t *indptr = op->edges.indptr, limit = indptr[last];
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      op->some(row, indptr[row], indptr[row + 1], limit, scratch, state);
      op->finish(row, state);
    }
  }
};

template <typename T, typename Logits>
struct AttentionPiece {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const AttentionForward<T, Logits>* op, const Piece* piece,
                                   A* memory, A* scratch) const {
    const Softmax<A> state(memory, op->shape);
    op->some(piece->row, piece->begin, piece->end, piece->end, scratch, state);
  }
};

// Runs the forward pass over all rows.
template <typename T, typename Logits>
void attend(const AttentionForward<T, Logits>& op, int64_t num_src) {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges = op.edges;
  const RowTasks tasks(edges.indptr, edges.rows, edges.edges, 4 * op.shape.size());
  const auto numbers = Softmax<A>::numbers(op.shape), more = op.scratch_numbers();
  std::vector<A> partial(tasks.pieces.size() * static_cast<size_t>(numbers));
  const auto rows = [&](int64_t, int64_t first, int64_t last) {
    edges.check_range(edges.indptr[first], edges.indptr[last], num_src);
    std::vector<A> memory(static_cast<size_t>(numbers + more));
    dispatch(AttentionRows<T, Logits>{}, &op, &tasks, first, last, memory.data());
  };
  const auto piece = [&](int64_t i, const Piece& which) {
    edges.check_range(which.begin, which.end, num_src);
    std::vector<A> scratch(static_cast<size_t>(more));
    dispatch(AttentionPiece<T, Logits>{}, &op, &which, partial.data() + i * numbers,
             scratch.data());
  };
  const auto merge = [&](const LongRow& row) {
    const Softmax<A> total(partial.data() + row.first * numbers, op.shape);
    for (int64_t i = row.first + 1; i < row.last; ++i) {
      op.merge(total, Softmax<A>(partial.data() + i * numbers, op.shape));
    }
    op.finish(row.row, total);
  };
  run_tasks(tasks, rows, piece, merge);
}

// Gradient ##################################################################################

// The gradient of the logits of a row is weight * (gradient of the weight - D). D, [rows, heads],
// is the mean of the gradients of the weights: the product of the result with its gradient
// (FlashAttention). If weights were asked for, their product with their gradient is added.
template <typename T>
std::vector<AccumulatorOf<T>> mean_gradient(const CsrEdges& edges, const Heads& shape,
                                            const Rows<T>& out, const Rows<T>& grad,
                                            const AccumulatorOf<T>* weights,
                                            const AccumulatorOf<T>* weights_grad) {
  using A = AccumulatorOf<T>;
  std::vector<A> mean(static_cast<size_t>(edges.rows * shape.heads));
  const RowTasks tasks(edges.indptr, edges.rows, edges.edges, shape.heads);
  take_turns(tasks.num_ranges(), true, [&](int64_t i) {
    for (int64_t row = tasks.bounds[i]; row < tasks.bounds[i + 1]; ++row) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        const int64_t first = h * shape.channels;
        A sum = dot(grad[row] + first, out[row] + first, shape.channels);
        if (weights_grad) {
          for (int64_t e = edges.indptr[row]; e < edges.indptr[row + 1]; ++e) {
            const int64_t at = edges.id(e) * shape.heads + h;
            sum += weights[at] * weights_grad[at];
          }
        }
        mean[static_cast<size_t>(row * shape.heads + h)] = sum;
      }
    }
  });
  return mean;
}

// What the gradient of an edge's logits depends on besides its features.
template <typename A>
struct WeightGradient {
  const A* lse;           // [rows, heads]
  const A* mean;          // [rows, heads]
  const A* weights_grad;  // [edges, heads] by id, or null
  Dropout dropout;

  // Returns the weight after dropout, and the gradient of the logit. `weight` is exp(logit - lse),
  // `product` is the gradient of the result times the edge's value.
  PYG_SCALE_INLINE std::pair<A, A> of(A weight, A product, int64_t row, int64_t id, int64_t heads,
                                      int64_t head) const {
    const A stays = dropout.on ? static_cast<A>(dropout.factor(id, heads, head)) : A{1};
    if (weights_grad) product += weights_grad[id * heads + head];
    return {weight * stays, weight * (stays * product - mean[row * heads + head])};
  }
};

// What every attention gradient is handed besides the features.
struct AttentionGrad {
  AttentionGrad(const CsrEdges& edges, const Tensor& x, const Tensor& result,
                const Tensor& denominator, const MaybeTensor& of_edges, const Tensor& grad,
                const MaybeTensor& of_edges_grad)
      : out(with_rows(result, "out")), out_grad(with_rows(grad, "grad")) {
    const ScalarType dtype = accumulator_type(x.scalar_type());
    const int64_t heads = x.size(1);
    check_heads(out, x, edges.rows, "out");
    check_heads(out_grad, x, edges.rows, "grad");
    lse = dense(denominator, dtype, edges.rows * heads, "lse");
    has_weights = of_edges_grad.has_value();
    if (has_weights) {
      check(of_edges.has_value(), "weights are missing");
      weights = dense(*of_edges, dtype, edges.edges * heads, "weights");
      weights_grad = dense(*of_edges_grad, dtype, edges.edges * heads, "grad of weights");
    }
    check_numbers(edges.edge_id, 0, edges.edges, edges.edges, "edge_id", "edges");
  }

  template <typename T>
  std::vector<AccumulatorOf<T>> mean(const CsrEdges& edges, const Heads& shape) const {
    using A = AccumulatorOf<T>;
    return mean_gradient<T>(edges, shape, rows_of<T>(out), rows_of<T>(out_grad),
                            has_weights ? const_data_of<A>(weights) : nullptr,
                            has_weights ? const_data_of<A>(weights_grad) : nullptr);
  }

  template <typename A>
  WeightGradient<A> weight(const std::vector<A>& mean, const Dropout& dropout) const {
    return {const_data_of<A>(lse), mean.data(),
            has_weights ? const_data_of<A>(weights_grad) : nullptr, dropout};
  }

  Tensor out, out_grad, lse, weights, weights_grad;
  bool has_weights;
};

}  // namespace pyg_scale
