// csr_extreme: the largest or smallest row entries by row of the graph and the edges they come
// from, and its gradient, see pyg_scale/ops/aggregate.py. Groups and units as in sum.cuh.
#pragma once

#include "sum.cuh"

namespace pyg_scale::cuda {

constexpr int kExtremeAhead = 4;

// The best of a column so far, and its distance from the row's first edge; -1: none yet. Of equal
// ones the first is kept, and so is the first NaN.
template <typename A>
struct Best {
  A value;
  int32_t arg;

  PYG_SCALE_DEVICE void take(A other, int32_t at) {
    const bool better = other > value || (other != other && value == value) || arg < 0;
    value = better ? other : value;
    arg = better ? at : arg;
  }
};

template <typename T, bool kSeveral, int kCount>
PYG_SCALE_DEVICE void extreme_kernel(const Extreme& args, int lanes) {
  using A = AccumulatorOf<T>;
  constexpr int kLoads = kSeveral ? loads_held(kCount, kExtremesHeld) : 1;
  const Graph& graph = args.graph;
  const Share<kCount, kLoads> mine(graph, args.size, lanes);
  if (!mine.any) return;
  const Unit& unit = mine.unit;
  stop_unless(unit.row_end - unit.row_begin <= 0x7fffffff);
  const T* x = static_cast<const T*>(args.x.data);
  const A* weight = static_cast<const A*>(args.weight);
  const HeadOf<kCount, kLoads> head(mine, weight ? args.heads : 1);
  const A sign = args.minimum ? A{-1} : A{1};
  Best<A> best[kLoads][kCount];
#pragma unroll
  for (int s = 0; s < kLoads; ++s) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) best[s][i] = {minus_infinity<A>(), -1};
  }
  for (int64_t e = unit.begin; e < unit.end; e += kExtremeAhead) {
    int64_t from[kExtremeAhead], id[kExtremeAhead];
    sources(graph, e, unit.end, from);
    if (weight) edge_ids(graph, e, unit.end, id);
#pragma unroll
    for (int s = 0; s < kLoads; ++s) {
      if (!mine.has(s)) break;
      Pack<T, kCount> rows[kExtremeAhead];
      A factors[kExtremeAhead];
#pragma unroll
      for (int k = 0; k < kExtremeAhead; ++k) {
        rows[k] = load<kCount>(x + from[k] * args.x.stride + mine[s]);
        factors[k] = weight ? weight[id[k] * args.heads + head.of[s]] * sign : sign;
      }
#pragma unroll
      for (int k = 0; k < kExtremeAhead; ++k) {
        if (e + k >= unit.end) continue;
        const int32_t at = static_cast<int32_t>(e + k - unit.row_begin);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          best[s][i].take(widen(rows[k].values[i]) * factors[k], at);
        }
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kLoads; ++s) {
    if (!mine.has(s)) break;
    if (unit.slot >= 0) {
      const int64_t at = unit.slot * args.size + mine[s];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        static_cast<A*>(args.partial)[at + i] = best[s][i].value;
        args.partial_arg[at + i] = best[s][i].arg;
      }
      continue;
    }
    const int64_t at = unit.row * args.size + mine[s];
    A values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = best[s][i].arg < 0 ? A{0} : best[s][i].value * sign;
      args.arg[at + i] = best[s][i].arg;
    }
    store<kCount>(static_cast<T*>(args.out) + at, values, A{1});
  }
}

template <typename T>
PYG_SCALE_DEVICE void extreme_fold_kernel(const Extreme& args, int lanes) {
  using A = AccumulatorOf<T>;
  const Lanes group(lanes);
  const int64_t chunk = group.group();
  const int64_t column = static_cast<int64_t>(blockIdx.y) * lanes + group.lane;
  Slots slots;
  if (chunk >= args.graph.num_chunks() || column >= args.size) return;
  if (!slots_of(args.graph, chunk, slots)) return;
  const A* partial = static_cast<const A*>(args.partial) + column;
  const int32_t* partial_arg = args.partial_arg + column;
  Best<A> best{partial[slots.first * args.size], partial_arg[slots.first * args.size]};
  for (int64_t slot = slots.second; slot <= slots.last; slot += 2) {
    best.take(partial[slot * args.size], partial_arg[slot * args.size]);
  }
  const int64_t at = slots.row.row * args.size + column;
  static_cast<T*>(args.out)[at] = Number<T>::narrow(args.minimum ? -best.value : best.value);
  args.arg[at] = best.arg;
}

// For a source, over its out-edges: the gradient of the entries that came over that edge.
template <typename T, bool kSeveral, int kCount>
PYG_SCALE_DEVICE void extreme_grad_kernel(const ExtremeGrad& args, int lanes) {
  using A = AccumulatorOf<T>;
  constexpr int kLoads = kSeveral ? loads_held(kCount, kSumsHeld) : 1;
  const Graph& graph = args.graph;
  const Share<kCount, kLoads> mine(graph, args.size, lanes);
  if (!mine.any) return;
  const Unit& unit = mine.unit;
  const T* grad = static_cast<const T*>(args.grad.data);
  const A* weight = static_cast<const A*>(args.weight);
  const HeadOf<kCount, kLoads> head(mine, weight ? args.heads : 1);
  A sum[kLoads][kCount] = {};
  for (int64_t first = unit.begin; first < unit.end; first += kExtremeAhead) {
    int64_t target[kExtremeAhead], position[kExtremeAhead], here[kExtremeAhead],
        id[kExtremeAhead] = {};
    sources(graph, first, unit.end, target);
    edge_ids(graph, first, unit.end, position);
#pragma unroll
    for (int k = 0; k < kExtremeAhead; ++k) {
      here[k] = position[k] - args.indptr[target[k]];
    }
    if (weight) read(args.edge_id, graph.num_edges, position, id);
#pragma unroll
    for (int s = 0; s < kLoads; ++s) {
      if (!mine.has(s)) break;
      Pack<T, kCount> rows[kExtremeAhead];
      Pack<int32_t, kCount> chosen[kExtremeAhead];
      A factors[kExtremeAhead];
#pragma unroll
      for (int k = 0; k < kExtremeAhead; ++k) {
        const int32_t* arg = args.arg + target[k] * args.size + mine[s];
#pragma unroll
        for (int i = 0; i < kCount; ++i) chosen[k].values[i] = arg[i];
        rows[k] = load<kCount>(grad + target[k] * args.grad.stride + mine[s]);
        factors[k] = weight ? weight[id[k] * args.heads + head.of[s]] : A{1};
      }
#pragma unroll
      for (int k = 0; k < kExtremeAhead; ++k) {
        if (first + k >= unit.end) continue;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const bool here_best = chosen[k].values[i] == here[k];
          sum[s][i] += here_best ? widen(rows[k].values[i]) * factors[k] : A{0};
        }
      }
    }
  }
  mine.template put<T>(sum, A{1}, args.out, args.partial);
}

}  // namespace pyg_scale::cuda
