// Gradients of attention: see csrc/attention_gat.cpp, attention_gatv2_grad.cpp and
// attention_dot.cpp, which compute the same. Groups of lanes, units and channels as in
// attention.cuh.
#pragma once

#include "attention.cuh"

namespace pyg_scale::cuda {

// The mean of the gradients of a row's weights: the product of the result with its gradient
// (FlashAttention). If weights were asked for, their product with their gradient is added.
template <typename T>
PYG_SCALE_DEVICE void attention_mean_kernel(const AttentionBackward& args, int lanes) {
  using A = AccumulatorOf<T>;
  const AttentionInput& in = args.in;
  const Lanes group(lanes);
  const int64_t item = group.group(), row = item / in.heads, head = item % in.heads;
  if (row >= args.graph.num_rows) return;
  const T* out = row_at<T>(args.out, row, in, head);
  const T* grad = row_at<T>(args.out_grad, row, in, head);
  A sum = 0;
  for (int64_t c = group.lane; c < in.channels; c += lanes) sum += widen(out[c]) * widen(grad[c]);
  if (args.weights_grad) {
    Unit unit;
    read_row(args.graph, row, unit);
    for (int64_t e = unit.row_begin + group.lane; e < unit.row_end; e += lanes) {
      const int64_t at = edge_id(args.graph, e) * in.heads + head;
      sum += static_cast<const A*>(args.weights)[at] * static_cast<const A*>(args.weights_grad)[at];
    }
  }
  sum = group.sum(sum);
  if (group.lane == 0) static_cast<A*>(args.mean)[item] = sum;
}

// The product of channels [c, c + kCount) of a gradient with what an edge brought.
template <int kCount, typename T>
PYG_SCALE_DEVICE AccumulatorOf<T> product_of(const T* grad, const T* value, const T* edge,
                                             int64_t c) {
  using A = AccumulatorOf<T>;
  const auto left = load<kCount>(grad + c), right = load<kCount>(value + c);
  Pack<T, kCount> term;
  if (edge) term = load<kCount>(edge + c);
  A sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const A here = widen(right.values[i]);
    sum += widen(left.values[i]) * (edge ? here + widen(term.values[i]) : here);
  }
  return sum;
}

// The weight after dropout, and the gradient of the logit. `weight` is exp(logit - lse), `product`
// is the gradient of the result times the edge's value.
template <typename A>
struct LogitGrad {
  A stays, logit;

  PYG_SCALE_DEVICE LogitGrad(const AttentionBackward& args, const Drops& drops, A weight, A product,
                             int64_t row, int64_t id, int64_t head) {
    const int64_t heads = args.in.heads;
    const A factor = static_cast<A>(drops.factor(id, heads, head));
    if (args.weights_grad) product += static_cast<const A*>(args.weights_grad)[id * heads + head];
    stays = weight * factor;
    logit = weight * (factor * product - static_cast<const A*>(args.mean)[row * heads + head]);
  }
};

// gat, over the out-edges of a source: the gradients of its features and of its part of the logits.
template <typename T, int kCount>
PYG_SCALE_DEVICE void gat_grad_kernel(const AttentionBackward& args, int lanes) {
  using A = AccumulatorOf<T>;
  const AttentionInput& in = args.in;
  const Graph& graph = args.transposed;
  const Lanes group(lanes);
  const int64_t item = group.group(), head = item % in.heads;
  const Channels<kCount> mine(group, in.channels);
  Unit unit;
  if (item / in.heads >= graph.num_units() || !unit_of(graph, item / in.heads, unit)) return;
  const bool writes = group.lane == 0 && blockIdx.y == 0;
  const T* features = row_at<T>(in.value, unit.row, in, head);
  const A slope = static_cast<A>(in.number);
  const A* lse = static_cast<const A*>(args.lse);
  const Drops drops(in.dropout);
  A source_sum = 0, sum[kSteps<kCount>][kCount] = {};
  for (int64_t first = unit.begin; first < unit.end; first += kTogether) {
    const T* grads[kTogether] = {};
    int64_t target[kTogether], position[kTogether], id[kTogether] = {};
    sources(graph, first, unit.end, target);
    edge_ids(graph, first, unit.end, position);
    A products[kTogether] = {};
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (first + k >= unit.end) continue;
      id[k] = edge_id(args.graph, position[k]);
      grads[k] = row_at<T>(args.out_grad, target[k], in, head);
      for (int64_t c = group.lane * kCount; c < in.channels; c += lanes * kCount) {
        products[k] += product_of<kCount, T>(grads[k], features, nullptr, c);
      }
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const A product = group.sum(products[k]);
      if (first + k >= unit.end) continue;
      const A both = gat_sum<A>(in, unit.row, target[k], id[k], head);
      const A factor = both > A{0} ? A{1} : slope;
      const A weight = exponential(both * factor - lse[target[k] * in.heads + head]);
      const LogitGrad<A> found(args, drops, weight, product, target[k], id[k], head);
      const A change = found.logit * factor;
      if (writes) static_cast<A*>(args.logits_grad)[id[k] * in.heads + head] = change;
      source_sum += change;
#pragma unroll
      for (int s = 0; s < kSteps<kCount>; ++s) {
        if (!mine.has(s)) continue;
        const auto grad = load<kCount>(grads[k] + mine[s]);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[s][i] += widen(grad.values[i]) * found.stays;
      }
    }
  }
  const bool piece = unit.slot >= 0;
  const int64_t at = (piece ? unit.slot : unit.row) * in.heads + head;
  if (writes) static_cast<A*>(piece ? args.partial_source : args.source_grad)[at] = source_sum;
  mine.template put<T>(sum, unit, in.heads, head, args.value_grad, args.partial_value);
}

// gatv2 and dot, over the in-edges of a destination: the gradients of the destination and of edge
// features, what the pass by source needs, and for gatv2 the gradient of the attention vector. For
// the latter, a group has every num_workers-th unit and adds up in the order of units.
template <typename T, Attention kKind, int kCount>
PYG_SCALE_DEVICE void destination_grad_kernel(const AttentionBackward& args, int lanes) {
  using A = AccumulatorOf<T>;
  constexpr bool kDot = kKind == Attention::kDot;
  const AttentionInput& in = args.in;
  const Graph& graph = args.graph;
  const Lanes group(lanes);
  const int64_t item = group.group(), worker = item / in.heads, head = item % in.heads;
  const Channels<kCount> mine(group, in.channels);
  if (worker >= args.workers) return;
  const bool writes = group.lane == 0 && blockIdx.y == 0;
  const A* att = in.att ? static_cast<const A*>(in.att) + head * in.channels : nullptr;
  const A number = static_cast<A>(in.number);
  const Drops drops(in.dropout);
  A att_sum[kSteps<kCount>][kCount] = {};
  for (int64_t index = worker; index < graph.num_units(); index += args.workers) {
    Unit unit;
    if (!unit_of(graph, index, unit)) continue;
    const int64_t of_row = unit.row * in.heads + head;
    const T* query = row_at<T>(in.query, unit.row, in, head);
    const T* grad = row_at<T>(args.out_grad, unit.row, in, head);
    const A lse = static_cast<const A*>(args.lse)[of_row];
    A sum[kSteps<kCount>][kCount] = {};
    for (int64_t first = unit.begin; first < unit.end; first += kTogether) {
      EdgeRows<T> rows[kTogether];
      int64_t from[kTogether], id[kTogether];
      sources(graph, first, unit.end, from);
      edge_ids(graph, first, unit.end, id);
      A logits[kTogether] = {}, products[kTogether] = {};
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (first + k >= unit.end) continue;
        rows[k] = EdgeRows<T>(in, from[k], id[k], head);
        const T* added = kDot ? rows[k].edge : nullptr;
        for (int64_t c = group.lane * kCount; c < in.channels; c += lanes * kCount) {
          logits[k] += logit_of<kKind, kCount>(rows[k], query, att, number, c);
          products[k] += product_of<kCount, T>(grad, rows[k].value, added, c);
        }
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const A logit = finished<kKind>(group, logits[k], number);
        const A product = group.sum(products[k]);
        if (first + k >= unit.end) continue;
        const LogitGrad<A> found(args, drops, exponential(logit - lse), product, unit.row, id[k],
                                 head);
        const A change = kDot ? found.logit * number : found.logit;
        const int64_t at = (first + k) * in.heads + head;
        if (writes) {
          static_cast<A*>(args.stays)[at] = found.stays;
          static_cast<A*>(args.logits_grad)[at] = change;
        }
#pragma unroll
        for (int s = 0; s < kSteps<kCount>; ++s) {
          if (!mine.has(s)) continue;
          const int64_t c = mine[s];
          const auto of_source = load<kCount>((kDot ? rows[k].key : rows[k].value) + c);
          const auto to = load<kCount>(query + c), of_grad = load<kCount>(grad + c);
          Pack<T, kCount> term;
          if (rows[k].edge) term = load<kCount>(rows[k].edge + c);
          A of_edge[kCount];
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const A here =
                widen(of_source.values[i]) + (rows[k].edge ? widen(term.values[i]) : A{0});
            if constexpr (kDot) {
              sum[s][i] += here * change;
              of_edge[i] = widen(to.values[i]) * change + widen(of_grad.values[i]) * found.stays;
            } else {
              const A both = here + widen(to.values[i]);
              const A slopes = both > A{0} ? change : change * number;
              of_edge[i] = slopes * att[c + i];
              sum[s][i] += of_edge[i];
              att_sum[s][i] += both * slopes;
            }
          }
          if (args.edge_grad) {
            T* edge = static_cast<T*>(args.edge_grad) + (id[k] * in.heads + head) * in.channels;
            store<kCount>(edge + c, of_edge, A{1});
          }
        }
      }
    }
    mine.template put<T>(sum, unit, in.heads, head, args.query_grad, args.partial);
  }
  if constexpr (!kDot) {
    A* to = static_cast<A*>(args.partial_att) + (worker * in.heads + head) * in.channels;
#pragma unroll
    for (int s = 0; s < kSteps<kCount>; ++s) {
      if (!mine.has(s)) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[mine[s] + i] = att_sum[s][i];
    }
  }
}

// gatv2, over the out-edges of a source, with what the pass before found for each edge.
template <typename T, int kCount>
PYG_SCALE_DEVICE void source_grad_kernel(const AttentionBackward& args, int lanes) {
  using A = AccumulatorOf<T>;
  const AttentionInput& in = args.in;
  const Graph& graph = args.transposed;
  const Lanes group(lanes);
  const int64_t item = group.group(), head = item % in.heads;
  const Channels<kCount> mine(group, in.channels);
  Unit unit;
  if (item / in.heads >= graph.num_units() || !unit_of(graph, item / in.heads, unit)) return;
  const T* from = row_at<T>(in.value, unit.row, in, head);
  const A* att = static_cast<const A*>(in.att) + head * in.channels;
  const A slope = static_cast<A>(in.number);
  A sum[kSteps<kCount>][kCount] = {};
  for (int64_t first = unit.begin; first < unit.end; first += kTogether) {
    int64_t target[kTogether], position[kTogether], id[kTogether] = {};
    A kept[kTogether], logits[kTogether];
    sources(graph, first, unit.end, target);
    edge_ids(graph, first, unit.end, position);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (first + k >= unit.end) continue;
      const int64_t at = position[k] * in.heads + head;
      kept[k] = static_cast<const A*>(args.stays)[at];
      logits[k] = static_cast<const A*>(args.logits_grad)[at];
      if (in.edge.data) id[k] = edge_id(args.graph, position[k]);
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (first + k >= unit.end) continue;
      const T* query = row_at<T>(in.query, target[k], in, head);
      const T* grad = row_at<T>(args.out_grad, target[k], in, head);
      const T* edge = row_at<T>(in.edge, id[k], in, head);
#pragma unroll
      for (int s = 0; s < kSteps<kCount>; ++s) {
        if (!mine.has(s)) continue;
        const int64_t c = mine[s];
        const auto own = load<kCount>(from + c), to = load<kCount>(query + c);
        const auto of_grad = load<kCount>(grad + c);
        Pack<T, kCount> term;
        if (edge) term = load<kCount>(edge + c);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const A both =
              widen(own.values[i]) + (edge ? widen(term.values[i]) : A{0}) + widen(to.values[i]);
          const A slopes = both > A{0} ? logits[k] : logits[k] * slope;
          sum[s][i] += widen(of_grad.values[i]) * kept[k] + slopes * att[c + i];
        }
      }
    }
  }
  mine.template put<T>(sum, unit, in.heads, head, args.value_grad, args.partial_value);
}

// Adds up the rows of each segment in order. Only segments that have rows are written, and always
// the first one.
template <typename T>
PYG_SCALE_DEVICE void sum_segments_kernel(const SumSegments& args, int) {
  using A = AccumulatorOf<T>;
  const int64_t item = Lanes(1).group();
  const int64_t segment = item / args.size, column = item % args.size;
  const int64_t first = segment * args.each;
  if (first >= args.rows && segment > 0) return;
  A sum = 0;
  for (int64_t row = first; row < args.rows && row < first + args.each; ++row) {
    sum += static_cast<const A*>(args.in)[row * args.size + column];
  }
  static_cast<A*>(args.out)[segment * args.size + column] = sum;
}

}  // namespace pyg_scale::cuda
