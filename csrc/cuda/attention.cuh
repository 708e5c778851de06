// Attention over the edges of each row with the online softmax: see pyg_scale/ops/attention.py and
// csrc/attention.h, which compute the same.
//
// A group of lanes has a unit (rows.cuh), a head, and some channels of the head. Logits need all
// channels, so every group adds them up by shuffles. Rows are read a second time for the sum; by
// then they are in the cache.
#pragma once

#include "rows.cuh"

namespace pyg_scale::cuda {

constexpr int kTogether = 4;                // edges whose logits are made together
constexpr uint64_t kAttentionDropout = 20;  // see pyg_scale/ops/keys.py

// The number of loads of a lane for which sums are kept.
template <int kCount>
constexpr int kSteps = kCount == 1 ? 4 : 1;

// The channels of a head for which a lane keeps sums; [step] is the first one of that load.
template <int kCount>
struct Channels {
  int64_t first, between, end;

  PYG_SCALE_DEVICE Channels(const Lanes& group, int64_t channels)
      : between(static_cast<int64_t>(group.count) * kCount), end(channels) {
    first = static_cast<int64_t>(blockIdx.y) * between * kSteps<kCount> + group.lane * kCount;
  }
  PYG_SCALE_DEVICE int64_t operator[](int step) const { return first + step * between; }
  PYG_SCALE_DEVICE bool has(int step) const { return (*this)[step] < end; }

  // Writes the sums of a unit and a head to its row or, for a piece of a long row, to its slot.
  template <typename T>
  PYG_SCALE_DEVICE void put(const AccumulatorOf<T> (&sum)[kSteps<kCount>][kCount], const Unit& unit,
                            int64_t heads, int64_t head, void* out, void* partial) const {
    const bool piece = unit.slot >= 0;
    const int64_t at = ((piece ? unit.slot : unit.row) * heads + head) * end;
#pragma unroll
    for (int s = 0; s < kSteps<kCount>; ++s) {
      if (!has(s)) continue;
      const int64_t to = at + (*this)[s];
      if (piece) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          static_cast<AccumulatorOf<T>*>(partial)[to + i] = sum[s][i];
      } else {
        store<kCount>(static_cast<T*>(out) + to, sum[s], AccumulatorOf<T>{1});
      }
    }
  }
};

// A row of a matrix, at a head's channels.
template <typename T>
PYG_SCALE_DEVICE const T* row_at(const Matrix& matrix, int64_t row, const AttentionInput& in,
                                 int64_t head) {
  if (!matrix.data) return nullptr;
  return static_cast<const T*>(matrix.data) + row * matrix.stride + head * in.channels;
}

template <typename A>
PYG_SCALE_DEVICE A leaky(A x, A slope) {
  return x > A{0} ? x : x * slope;
}

// What a weight is multiplied with.
struct Drops {
  uint64_t key = 0, below;
  double scale;
  bool on;

  explicit PYG_SCALE_DEVICE Drops(const Dropout& dropout)
      : below(dropout.below), scale(dropout.scale), on(dropout.seed != nullptr) {
    if (on) key = fold(fold(0, kAttentionDropout), static_cast<uint64_t>(*dropout.seed));
  }
  PYG_SCALE_DEVICE double factor(int64_t edge, int64_t heads, int64_t head) const {
    if (!on) return 1;
    return (draw(key, static_cast<uint64_t>(edge * heads + head)) >> 32) >= below ? scale : 0;
  }
};

// What one edge brings to a head: its rows at the head's channels.
template <typename T>
struct EdgeRows {
  const T *value, *key, *edge;

  PYG_SCALE_DEVICE EdgeRows() : value(nullptr), key(nullptr), edge(nullptr) {}
  PYG_SCALE_DEVICE EdgeRows(const AttentionInput& in, int64_t source, int64_t id, int64_t head)
      : value(row_at<T>(in.value, source, in, head)),
        key(row_at<T>(in.key, source, in, head)),
        edge(row_at<T>(in.edge, id, in, head)) {}
};

// The part of a logit that channels [c, c + kCount) contribute.
template <Attention kKind, int kCount, typename T>
PYG_SCALE_DEVICE AccumulatorOf<T> logit_of(const EdgeRows<T>& rows, const T* query,
                                           const AccumulatorOf<T>* att, AccumulatorOf<T> number,
                                           int64_t c) {
  using A = AccumulatorOf<T>;
  const auto of_row = load<kCount>(query + c);
  const auto of_source = load<kCount>((kKind == Attention::kDot ? rows.key : rows.value) + c);
  Pack<T, kCount> of_edge;
  if (rows.edge) of_edge = load<kCount>(rows.edge + c);
  A sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const A term = rows.edge ? widen(of_edge.values[i]) : A{0};
    const A here = widen(of_source.values[i]) + term;
    if constexpr (kKind == Attention::kDot) {
      sum += widen(of_row.values[i]) * here;
    } else {
      sum += leaky(here + widen(of_row.values[i]), number) * att[c + i];
    }
  }
  return sum;
}

// The logit of an edge for gatv2 and dot, from the lanes' parts; all lanes of the group get it.
template <Attention kKind, typename A>
PYG_SCALE_DEVICE A finished(const Lanes& group, A part, A number) {
  const A sum = group.sum(part);
  return kKind == Attention::kDot ? sum * number : sum;
}

template <typename A>
PYG_SCALE_DEVICE A gat_sum(const AttentionInput& in, int64_t source, int64_t row, int64_t id,
                           int64_t head) {
  const A both = static_cast<const A*>(in.a_src)[source * in.heads + head] +
                 static_cast<const A*>(in.a_dst)[row * in.heads + head];
  return in.a_edge ? both + static_cast<const A*>(in.a_edge)[id * in.heads + head] : both;
}

// Forward ###################################################################################

template <typename T, Attention kKind, int kCount>
PYG_SCALE_DEVICE void attention_kernel(const AttentionForward& args, int lanes) {
  using A = AccumulatorOf<T>;
  const AttentionInput& in = args.in;
  const Graph& graph = args.graph;
  const Lanes group(lanes);
  const int64_t item = group.group(), head = item % in.heads;
  const Channels<kCount> mine(group, in.channels);
  Unit unit;
  // All lanes of a group go on or return together, as sums need every one of them.
  if (item / in.heads >= graph.num_units() || !unit_of(graph, item / in.heads, unit)) return;
  const bool writes = group.lane == 0 && blockIdx.y == 0;  // for results that a head has one of
  const T* query = row_at<T>(in.query, unit.row, in, head);
  const A* att = in.att ? static_cast<const A*>(in.att) + head * in.channels : nullptr;
  const A number = static_cast<A>(in.number), none = minus_infinity<A>();
  const Drops drops(in.dropout);
  A* weights = static_cast<A*>(args.weights);
  A largest = none, total = 0, sum[kSteps<kCount>][kCount] = {};
  for (int64_t first = unit.begin; first < unit.end; first += kTogether) {
    EdgeRows<T> rows[kTogether];
    int64_t from[kTogether], id[kTogether];
    sources(graph, first, unit.end, from);
    edge_ids(graph, first, unit.end, id);
    A logits[kTogether] = {};
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (first + k >= unit.end) continue;
      rows[k] = EdgeRows<T>(in, from[k], id[k], head);
      if constexpr (kKind == Attention::kGat) {
        logits[k] = leaky(gat_sum<A>(in, from[k], unit.row, id[k], head), number);
      } else {
        for (int64_t c = group.lane * kCount; c < in.channels; c += lanes * kCount) {
          logits[k] += logit_of<kKind, kCount>(rows[k], query, att, number, c);
        }
      }
    }
    A now = largest;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if constexpr (kKind != Attention::kGat) {
        logits[k] = finished<kKind>(group, logits[k], number);
      }
      if (first + k >= unit.end) continue;
      if (weights && writes) weights[id[k] * in.heads + head] = logits[k];
      now = logits[k] > now ? logits[k] : now;
    }
    const A base = now == none ? A{0} : now;
    if (now != largest) {
#if defined(PYG_SCALE_FAULT_NO_RESCALE)
      const A shrink{1};
#else
      const A shrink = exponential(largest - base);
#endif
      total *= shrink;
#pragma unroll
      for (int s = 0; s < kSteps<kCount>; ++s) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[s][i] *= shrink;
      }
      largest = now;
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (first + k >= unit.end) continue;
      A weight = exponential(logits[k] - base);
      total += weight;
      weight *= static_cast<A>(drops.factor(id[k], in.heads, head));
#pragma unroll
      for (int s = 0; s < kSteps<kCount>; ++s) {
        if (!mine.has(s)) continue;
        const auto value = load<kCount>(rows[k].value + mine[s]);
        Pack<T, kCount> term;
        const bool with_edge = kKind == Attention::kDot && rows[k].edge;
        if (with_edge) term = load<kCount>(rows[k].edge + mine[s]);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const A here = widen(value.values[i]);
          sum[s][i] += weight * (with_edge ? here + widen(term.values[i]) : here);
        }
      }
    }
  }
  if (unit.slot >= 0) {
    A* to = static_cast<A*>(args.partial) + (unit.slot * in.heads + head) * (in.channels + 2);
    if (writes) {
      to[0] = largest;
      to[1] = total;
    }
#pragma unroll
    for (int s = 0; s < kSteps<kCount>; ++s) {
      if (!mine.has(s)) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[2 + mine[s] + i] = sum[s][i];
    }
    return;
  }
  const int64_t at = unit.row * in.heads + head;
  const A factor = unit.begin == unit.end ? A{0} : A{1} / total;
  T* to = static_cast<T*>(args.out) + at * in.channels;
#pragma unroll
  for (int s = 0; s < kSteps<kCount>; ++s) {
    if (mine.has(s)) store<kCount>(to + mine[s], sum[s], factor);
  }
  if (writes) {
    static_cast<A*>(args.lse)[at] = (largest == none ? A{0} : largest) + logarithm(total);
  }
}

// Merges the results of the pieces of long rows, in order. Without channels there still is an lse.
template <typename T>
PYG_SCALE_DEVICE void attention_fold_kernel(const AttentionForward& args, int lanes) {
  using A = AccumulatorOf<T>;
  const AttentionInput& in = args.in;
  const Lanes group(lanes);
  const int64_t item = group.group(), chunk = item / in.heads, head = item % in.heads;
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * lanes + group.lane;
  Slots slots;
  const bool has = channel < in.channels;
  if (chunk >= args.graph.num_chunks() || !(has || channel == 0)) return;
  if (!slots_of(args.graph, chunk, slots)) return;
  const A none = minus_infinity<A>();
  const auto of_slot = [&](int64_t slot) {
    return static_cast<const A*>(args.partial) + (slot * in.heads + head) * (in.channels + 2);
  };
  const A* left = of_slot(slots.first);
  A largest = left[0], total = left[1], sum = has ? left[2 + channel] : A{0};
  for (int64_t slot = slots.second; slot <= slots.last; slot += 2) {
    const A* right = of_slot(slot);
    const A now = right[0] > largest ? right[0] : largest;
    const A base = now == none ? A{0} : now;
    const A mine = exponential(largest - base), other = exponential(right[0] - base);
    total = total * mine + right[1] * other;
    if (has) sum = sum * mine + right[2 + channel] * other;
    largest = now;
  }
  const int64_t at = slots.row.row * in.heads + head;
  if (has) static_cast<T*>(args.out)[at * in.channels + channel] = Number<T>::narrow(sum / total);
  if (channel == 0) {
    static_cast<A*>(args.lse)[at] = (largest == none ? A{0} : largest) + logarithm(total);
  }
}

// Turns logits, which the forward pass left in the place of weights, into weights.
template <typename T>
PYG_SCALE_DEVICE void attention_weights_kernel(const AttentionForward& args, int) {
  using A = AccumulatorOf<T>;
  const AttentionInput& in = args.in;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t edge = item / in.heads, head = item % in.heads;
  if (edge >= args.graph.num_edges) return;
  const int64_t id = edge_id(args.graph, edge), row = row_of(args.graph, edge);
  const Drops drops(in.dropout);
  A& weight = static_cast<A*>(args.weights)[id * in.heads + head];
  weight = exponential(weight - static_cast<const A*>(args.lse)[row * in.heads + head]) *
           static_cast<A>(drops.factor(id, in.heads, head));
}

}  // namespace pyg_scale::cuda
