// Attention over the edges of each row with the online softmax: see pyg_scale/ops/attention.py and
// csrc/attention.h, which compute the same.
//
// A group of lanes has a unit (rows.cuh), a head, and some channels of the head. Logits need all
// channels, so every group adds them up by shuffles. If a lane has one load of a head, it keeps
// what it read for the logit until the sum. Else rows are read a second time; by then they are in
// the cache.
#pragma once

#include "rows.cuh"

namespace pyg_scale::cuda {

constexpr int kTogether = 4;                // edges whose rows are under way together
constexpr uint64_t kAttentionDropout = 20;  // see pyg_scale/ops/keys.py

// The loads of a lane for which sums are kept: one if lanes have no more of a head.
template <bool kSeveral, int kCount>
constexpr int kLoads = kSeveral ? loads_held(kCount, kChannelsHeld) : 1;

// The channels of a head for which a lane keeps sums; [load] is the first one of a load.
template <bool kSeveral, int kCount>
struct Channels {
  int64_t first, between, end;

  PYG_SCALE_DEVICE Channels(const Lanes& group, int64_t channels)
      : between(static_cast<int64_t>(group.count) * kCount), end(channels) {
    const int64_t tile = kSeveral ? static_cast<int64_t>(blockIdx.y) : 0;
    first = tile * between * kLoads<kSeveral, kCount> + group.lane * kCount;
  }
  PYG_SCALE_DEVICE int64_t operator[](int load) const { return first + load * between; }
  PYG_SCALE_DEVICE bool has(int load) const { return (*this)[load] < end; }

  // Writes the sums of a unit and a head to its row or, for a piece of a long row, to its slot.
  template <typename T>
  PYG_SCALE_DEVICE void put(const AccumulatorOf<T> (&sum)[kLoads<kSeveral, kCount>][kCount],
                            const Unit& unit, int64_t heads, int64_t head, void* out,
                            void* partial) const {
    const bool piece = unit.slot >= 0;
    const int64_t at = ((piece ? unit.slot : unit.row) * heads + head) * end;
#pragma unroll
    for (int s = 0; s < kLoads<kSeveral, kCount>; ++s) {
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
template <typename A>
struct Drops {
  uint64_t key = 0, below;
  A scale;
  bool on;

  explicit PYG_SCALE_DEVICE Drops(const Dropout& dropout)
      : below(dropout.below), scale(static_cast<A>(dropout.scale)), on(dropout.seed != nullptr) {
    if (on) key = fold(fold(0, kAttentionDropout), static_cast<uint64_t>(*dropout.seed));
  }
  PYG_SCALE_DEVICE A factor(int64_t edge, int64_t heads, int64_t head) const {
    if (!on) return A{1};
    return (draw(key, static_cast<uint64_t>(edge * heads + head)) >> 32) >= below ? scale : A{0};
  }
};

// What one edge brings to channels [c, c + kCount) of a head.
template <Attention kKind, typename T, int kCount>
struct Brought {
  using A = AccumulatorOf<T>;
  static constexpr bool kDot = kKind == Attention::kDot;
  Pack<T, kCount> value_, key_, edge_;
  bool with_edge;

  PYG_SCALE_DEVICE A term(int i) const { return with_edge ? widen(edge_.values[i]) : A{0}; }
  // What logits are made of.
  PYG_SCALE_DEVICE A key(int i) const {
    return widen(kDot ? key_.values[i] : value_.values[i]) + term(i);
  }
  // What is added up.
  PYG_SCALE_DEVICE A value(int i) const {
    const A here = widen(value_.values[i]);
    return kDot && with_edge ? here + widen(edge_.values[i]) : here;
  }
};

// Reads what a few edges bring. All loads of a kind go together.
template <Attention kKind, typename T, int kCount>
PYG_SCALE_DEVICE void read(const AttentionInput& in, const int64_t (&from)[kTogether],
                           const int64_t (&id)[kTogether], int64_t head, int64_t c,
                           Brought<kKind, T, kCount> (&to)[kTogether]) {
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    to[k].value_ = load<kCount>(row_at<T>(in.value, from[k], in, head) + c);
    if constexpr (kKind == Attention::kDot) {
      to[k].key_ = load<kCount>(row_at<T>(in.key, from[k], in, head) + c);
    }
    to[k].with_edge = in.edge.data != nullptr;
  }
  if (!in.edge.data) return;
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    to[k].edge_ = load<kCount>(row_at<T>(in.edge, id[k], in, head) + c);
  }
}

// What a destination brings to channels [c, c + kCount) of a head: its row, and the head's vector.
template <Attention kKind, typename T, int kCount>
struct Asks {
  using A = AccumulatorOf<T>;
  Pack<T, kCount> query;
  A att[kCount];

  PYG_SCALE_DEVICE Asks() : query{}, att{} {}
  PYG_SCALE_DEVICE Asks(const T* row, const A* vector, int64_t c) : query(load<kCount>(row + c)) {
    if constexpr (kKind == Attention::kGatv2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) att[i] = vector[c + i];
    }
  }
  // The part of a logit that these channels contribute.
  PYG_SCALE_DEVICE A part(const Brought<kKind, T, kCount>& brought, A number) const {
    A sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const A here = brought.key(i);
      if constexpr (kKind == Attention::kDot) {
        sum += widen(query.values[i]) * here;
      } else {
        sum += leaky(here + widen(query.values[i]), number) * att[i];
      }
    }
    return sum;
  }
};

// The parts of gat's logits that depend on nodes and edges.
template <typename A>
PYG_SCALE_DEVICE A gat_sum(const AttentionInput& in, int64_t source, int64_t row, int64_t id,
                           int64_t head) {
  const A both = static_cast<const A*>(in.a_src)[source * in.heads + head] +
                 static_cast<const A*>(in.a_dst)[row * in.heads + head];
  return in.a_edge ? both + static_cast<const A*>(in.a_edge)[id * in.heads + head] : both;
}

// Forward ###################################################################################

template <typename T, Attention kKind, bool kSeveral, int kCount>
PYG_SCALE_DEVICE void attention_kernel(const AttentionForward& args, int lanes) {
  using A = AccumulatorOf<T>;
  constexpr bool kGat = kKind == Attention::kGat;
  constexpr int kHeld = kLoads<kSeveral, kCount>;
  const AttentionInput& in = args.in;
  const Graph& graph = args.graph;
  const Lanes group(lanes);
  const int64_t item = group.group(), head = item % in.heads;
  const Channels<kSeveral, kCount> mine(group, in.channels);
  const Work work(graph, item / in.heads);
  const Unit& unit = work.unit;
  const bool writes = group.lane == 0 && blockIdx.y == 0;  // for results that a head has one of
  const T* query = row_at<T>(in.query, unit.row, in, head);
  const A* att = in.att ? static_cast<const A*>(in.att) + head * in.channels : nullptr;
  const A number = static_cast<A>(in.number), none = minus_infinity<A>();
  const Drops<A> drops(in.dropout);
  A* weights = static_cast<A*>(args.weights);
  Asks<kKind, T, kCount> asks;
  if constexpr (!kSeveral && !kGat) {
    if (mine.has(0) && work.any) asks = Asks<kKind, T, kCount>(query, att, mine[0]);
  }
  A largest = none, total = 0, sum[kHeld][kCount] = {};
  for (int64_t done = 0; done < work.longest; done += kTogether) {
    const int64_t first = unit.begin + done;
    // Edges beyond the end have row 0, which nobody uses: loads without a condition go together.
    const bool more = first < unit.end;
    int64_t from[kTogether], id[kTogether];
    sources(graph, first, unit.end, from);
    edge_ids(graph, first, unit.end, id);
    Brought<kKind, T, kCount> brought[kTogether];
    A logits[kTogether] = {};
    if constexpr (!kSeveral) {
      if (more && mine.has(0)) read(in, from, id, head, mine[0], brought);
    }
    if constexpr (kGat) {
      if (more) {
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          logits[k] = leaky(gat_sum<A>(in, from[k], unit.row, id[k], head), number);
        }
      }
    } else {
      if constexpr (!kSeveral) {
        if (more && mine.has(0)) {
#pragma unroll
          for (int k = 0; k < kTogether; ++k) logits[k] = asks.part(brought[k], number);
        }
      } else {
        for (int64_t c = group.lane * kCount; more && c < in.channels; c += lanes * kCount) {
          read(in, from, id, head, c, brought);
          asks = Asks<kKind, T, kCount>(query, att, c);
#pragma unroll
          for (int k = 0; k < kTogether; ++k) logits[k] += asks.part(brought[k], number);
        }
      }
      group.sum(logits);
    }
    if (!more) continue;  // there is no collective below
    A now = largest;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if constexpr (kKind == Attention::kDot) logits[k] *= number;
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
      for (int s = 0; s < kHeld; ++s) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[s][i] *= shrink;
      }
      largest = now;
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const bool there = first + k < unit.end;
      const A weight = there ? exponential(logits[k] - base) : A{0};
      total += weight;
      logits[k] = weight * drops.factor(id[k], in.heads, head);
    }
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      if (!mine.has(s)) break;
      if constexpr (kSeveral) read(in, from, id, head, mine[s], brought);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (first + k >= unit.end) continue;  // row 0 need not be finite
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[s][i] += logits[k] * brought[k].value(i);
      }
    }
  }
  if (!work.any) return;
  if (unit.slot >= 0) {
    A* to = static_cast<A*>(args.partial) + (unit.slot * in.heads + head) * (in.channels + 2);
    if (writes) {
      to[0] = largest;
      to[1] = total;
    }
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
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
  for (int s = 0; s < kHeld; ++s) {
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
  const Drops<A> drops(in.dropout);
  A& weight = static_cast<A*>(args.weights)[id * in.heads + head];
  weight = exponential(weight - static_cast<const A*>(args.lse)[row * in.heads + head]) *
           drops.factor(id, in.heads, head);
}

}  // namespace pyg_scale::cuda
