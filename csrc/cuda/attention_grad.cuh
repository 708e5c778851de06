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
  const bool any = row < args.graph.num_rows;
  A sum[1] = {};
  if (any) {
    const T* out = row_at<T>(args.out, row, in, head);
    const T* grad = row_at<T>(args.out_grad, row, in, head);
    for (int64_t c = group.lane; c < in.channels; c += lanes) {
      sum[0] += widen(out[c]) * widen(grad[c]);
    }
    if (args.weights_grad) {
      Unit unit;
      read_row(args.graph, row, unit);
      for (int64_t e = unit.row_begin + group.lane; e < unit.row_end; e += lanes) {
        const int64_t at = edge_id(args.graph, e) * in.heads + head;
        sum[0] +=
            static_cast<const A*>(args.weights)[at] * static_cast<const A*>(args.weights_grad)[at];
      }
    }
  }
  group.sum(sum);
  if (any && group.lane == 0) static_cast<A*>(args.mean)[item] = sum[0];
}

// The product of a gradient's channels with what an edge brought.
template <Attention kKind, typename T, int kCount>
PYG_SCALE_DEVICE AccumulatorOf<T> product_of(const Pack<T, kCount>& grad,
                                             const Brought<kKind, T, kCount>& brought) {
  AccumulatorOf<T> sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += widen(grad.values[i]) * brought.value(i);
  return sum;
}

// The weight after dropout, and the gradient of the logit. `weight` is exp(logit - lse), `product`
// is the gradient of the result times the edge's value.
template <typename A>
struct LogitGrad {
  A stays, logit;

  PYG_SCALE_DEVICE LogitGrad(const AttentionBackward& args, const Drops<A>& drops, A weight,
                             A product, A mean, int64_t id, int64_t head) {
    const int64_t heads = args.in.heads;
    const A factor = drops.factor(id, heads, head);
    if (args.weights_grad) product += static_cast<const A*>(args.weights_grad)[id * heads + head];
    stays = weight * factor;
    logit = weight * (factor * product - mean);
  }
};

// gat, over the out-edges of a source: the gradients of its features and of its part of the logits.
template <typename T, bool kSeveral, int kCount>
PYG_SCALE_DEVICE void gat_grad_kernel(const AttentionBackward& args, int lanes) {
  using A = AccumulatorOf<T>;
  constexpr int kHeld = kLoads<kSeveral, kCount>;
  const AttentionInput& in = args.in;
  const Graph& graph = args.transposed;
  const Lanes group(lanes);
  const int64_t item = group.group(), head = item % in.heads;
  const Channels<kSeveral, kCount> mine(group, in.channels);
  const Work work(graph, item / in.heads);
  const Unit& unit = work.unit;
  const bool writes = group.lane == 0 && blockIdx.y == 0;
  const T* features = row_at<T>(in.value, unit.row, in, head);
  const A slope = static_cast<A>(in.number);
  const A *lse = static_cast<const A*>(args.lse), *mean = static_cast<const A*>(args.mean);
  const Drops<A> drops(in.dropout);
  Pack<T, kCount> own{};
  if (!kSeveral && work.any && mine.has(0)) own = load<kCount>(features + mine[0]);
  A source_sum = 0, sum[kHeld][kCount] = {};
  for (int64_t done = 0; done < work.longest; done += kTogether) {
    const int64_t first = unit.begin + done;
    const bool more = first < unit.end;
    int64_t target[kTogether], position[kTogether], id[kTogether] = {};
    sources(graph, first, unit.end, target);
    edge_ids(graph, first, unit.end, position);
    Pack<T, kCount> grads[kTogether];
    const auto read_grads = [&](int64_t c) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        grads[k] = load<kCount>(row_at<T>(args.out_grad, target[k], in, head) + c);
      }
    };
    A products[kTogether] = {}, both[kTogether] = {}, lses[kTogether] = {}, means[kTogether] = {};
    const auto multiply = [&] {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          products[k] += widen(grads[k].values[i]) * widen(own.values[i]);
        }
      }
    };
    if (more) {
      read(args.graph.edge_id, args.graph.num_edges, position, id);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {  // beside the gradients, not after their sums
        const int64_t at = target[k] * in.heads + head;
        both[k] = gat_sum<A>(in, unit.row, target[k], id[k], head);
        lses[k] = lse[at];
        means[k] = mean[at];
      }
      if constexpr (!kSeveral) {
        if (mine.has(0)) {
          read_grads(mine[0]);
          multiply();
        }
      } else {
        for (int64_t c = group.lane * kCount; c < in.channels; c += lanes * kCount) {
          read_grads(c);
          own = load<kCount>(features + c);
          multiply();
        }
      }
    }
    group.sum(products);
    if (!more) continue;
    A stays[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const A factor = both[k] > A{0} ? A{1} : slope;
      const A weight = exponential(both[k] * factor - lses[k]);
      const LogitGrad<A> found(args, drops, weight, products[k], means[k], id[k], head);
      stays[k] = found.stays;
      if (first + k >= unit.end) continue;
      const A change = found.logit * factor;
      if (writes) static_cast<A*>(args.logits_grad)[id[k] * in.heads + head] = change;
      source_sum += change;
    }
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      if (!mine.has(s)) break;
      if constexpr (kSeveral) read_grads(mine[s]);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (first + k >= unit.end) continue;
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[s][i] += widen(grads[k].values[i]) * stays[k];
      }
    }
  }
  if (!work.any) return;
  const bool piece = unit.slot >= 0;
  const int64_t at = (piece ? unit.slot : unit.row) * in.heads + head;
  if (writes) static_cast<A*>(piece ? args.partial_source : args.source_grad)[at] = source_sum;
  mine.template put<T>(sum, unit, in.heads, head, args.value_grad, args.partial_value);
}

// gatv2 and dot, over the in-edges of a destination: the gradients of the destination and of edge
// features, what the pass by source needs, and for gatv2 the gradient of the attention vector. For
// the latter, a group has every num_workers-th unit and adds up in the order of units.
template <typename T, Attention kKind, bool kSeveral, int kCount>
PYG_SCALE_DEVICE void destination_grad_kernel(const AttentionBackward& args, int lanes) {
  using A = AccumulatorOf<T>;
  using Edge = Brought<kKind, T, kCount>;
  constexpr bool kDot = kKind == Attention::kDot;
  constexpr int kHeld = kLoads<kSeveral, kCount>;
  const AttentionInput& in = args.in;
  const Graph& graph = args.graph;
  const Lanes group(lanes);
  const int64_t item = group.group(), worker = item / in.heads, head = item % in.heads;
  const Channels<kSeveral, kCount> mine(group, in.channels);
  const bool works = worker < args.workers;
  const bool writes = group.lane == 0 && blockIdx.y == 0;
  const A* att = in.att ? static_cast<const A*>(in.att) + head * in.channels : nullptr;
  const A number = static_cast<A>(in.number);
  const Drops<A> drops(in.dropout);
  A att_sum[kHeld][kCount] = {};
  for (int64_t before = 0; before < graph.num_units(); before += args.workers) {
    const Work work(graph, before + worker, works);
    const Unit& unit = work.unit;
    const int64_t of_row = unit.row * in.heads + head;
    const T* query = row_at<T>(in.query, unit.row, in, head);
    const T* grad = row_at<T>(args.out_grad, unit.row, in, head);
    const A lse = work.any ? static_cast<const A*>(args.lse)[of_row] : A{0};
    const A mean = work.any ? static_cast<const A*>(args.mean)[of_row] : A{0};
    Asks<kKind, T, kCount> asks;
    Pack<T, kCount> of_grad{};
    const auto ask = [&](int64_t c) {
      asks = Asks<kKind, T, kCount>(query, att, c);
      of_grad = load<kCount>(grad + c);
    };
    if (!kSeveral && work.any && mine.has(0)) ask(mine[0]);
    A sum[kHeld][kCount] = {};
    for (int64_t done = 0; done < work.longest; done += kTogether) {
      const int64_t first = unit.begin + done;
      const bool more = first < unit.end;
      int64_t from[kTogether], id[kTogether];
      sources(graph, first, unit.end, from);
      edge_ids(graph, first, unit.end, id);
      Edge brought[kTogether];
      A logits[kTogether] = {}, products[kTogether] = {};
      const auto multiply = [&] {
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          logits[k] += asks.part(brought[k], number);
          products[k] += product_of(of_grad, brought[k]);
        }
      };
      if constexpr (!kSeveral) {
        if (more && mine.has(0)) {
          read(in, from, id, head, mine[0], brought);
          multiply();
        }
      } else {
        for (int64_t c = group.lane * kCount; more && c < in.channels; c += lanes * kCount) {
          read(in, from, id, head, c, brought);
          ask(c);
          multiply();
        }
      }
      group.sum(logits);
      group.sum(products);
      if (!more) continue;
      A stays[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const A logit = kDot ? logits[k] * number : logits[k];
        const LogitGrad<A> found(args, drops, exponential(logit - lse), products[k], mean, id[k],
                                 head);
        stays[k] = found.stays;
        logits[k] = kDot ? found.logit * number : found.logit;
        if (!writes || first + k >= unit.end) continue;
        const int64_t at = (first + k) * in.heads + head;
        static_cast<A*>(args.stays)[at] = stays[k];
        static_cast<A*>(args.logits_grad)[at] = logits[k];
      }
#pragma unroll
      for (int s = 0; s < kHeld; ++s) {
        if (!mine.has(s)) break;
        const int64_t c = mine[s];
        if constexpr (kSeveral) {
          read(in, from, id, head, c, brought);
          ask(c);
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (first + k >= unit.end) continue;
          const A change = logits[k];
          A of_edge[kCount];
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const A here = brought[k].key(i), to = widen(asks.query.values[i]);
            if constexpr (kDot) {
              sum[s][i] += here * change;
              of_edge[i] = to * change + widen(of_grad.values[i]) * stays[k];
            } else {
              const A both = here + to;
              const A slopes = both > A{0} ? change : change * number;
              of_edge[i] = slopes * asks.att[i];
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
    if (work.any) mine.template put<T>(sum, unit, in.heads, head, args.query_grad, args.partial);
  }
  if constexpr (!kDot) {
    if (!works) return;
    A* to = static_cast<A*>(args.partial_att) + (worker * in.heads + head) * in.channels;
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      if (!mine.has(s)) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[mine[s] + i] = att_sum[s][i];
    }
  }
}

// gatv2, over the out-edges of a source, with what the pass before found for each edge.
template <typename T, bool kSeveral, int kCount>
PYG_SCALE_DEVICE void source_grad_kernel(const AttentionBackward& args, int lanes) {
  using A = AccumulatorOf<T>;
  constexpr int kHeld = kLoads<kSeveral, kCount>;
  const AttentionInput& in = args.in;
  const Graph& graph = args.transposed;
  const Lanes group(lanes);
  const int64_t item = group.group(), head = item % in.heads;
  const Channels<kSeveral, kCount> mine(group, in.channels);
  Unit unit;
  if (item / in.heads >= graph.num_units() || !unit_of(graph, item / in.heads, unit)) return;
  const T* from = row_at<T>(in.value, unit.row, in, head);
  const A* att = static_cast<const A*>(in.att) + head * in.channels;
  const A slope = static_cast<A>(in.number);
  A sum[kHeld][kCount] = {};
  for (int64_t first = unit.begin; first < unit.end; first += kTogether) {
    int64_t target[kTogether], position[kTogether], id[kTogether] = {};
    A kept[kTogether], logits[kTogether];
    sources(graph, first, unit.end, target);
    edge_ids(graph, first, unit.end, position);
    if (in.edge.data) read(args.graph.edge_id, args.graph.num_edges, position, id);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int64_t at = position[k] * in.heads + head;
      kept[k] = static_cast<const A*>(args.stays)[at];
      logits[k] = static_cast<const A*>(args.logits_grad)[at];
    }
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      if (!mine.has(s)) break;
      const int64_t c = mine[s];
      const Asks<Attention::kGatv2, T, kCount> own(from, att, c);
      Pack<T, kCount> to[kTogether], of_grad[kTogether], term[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        to[k] = load<kCount>(row_at<T>(in.query, target[k], in, head) + c);
        of_grad[k] = load<kCount>(row_at<T>(args.out_grad, target[k], in, head) + c);
      }
      if (in.edge.data) {
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          term[k] = load<kCount>(row_at<T>(in.edge, id[k], in, head) + c);
        }
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (first + k >= unit.end) continue;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const A of_edge = in.edge.data ? widen(term[k].values[i]) : A{0};
          const A both = widen(own.query.values[i]) + of_edge + widen(to[k].values[i]);
          const A slopes = both > A{0} ? logits[k] : logits[k] * slope;
          sum[s][i] += widen(of_grad[k].values[i]) * kept[k] + slopes * own.att[i];
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
