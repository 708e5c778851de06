// csr_sum: rows of features added up by row of the graph, see pyg_scale/ops/aggregate.py.
//
// A group of lanes has a unit (rows.cuh), each lane some loads of kCount columns: sums stay in
// registers, in the order of edges. Lanes of a group read the same index, one transaction for all
// of them, once for all loads of the lane.
#pragma once

#include "rows.cuh"

namespace pyg_scale::cuda {

constexpr int kAhead = 4;  // rows under way at a time

// The head of each load's columns: numbers of one load have one weight, so they are of one head.
template <int kCount, int kLoads>
struct HeadOf {
  int64_t of[kLoads];

  PYG_SCALE_DEVICE HeadOf(const Share<kCount, kLoads>& mine, int64_t heads) {
#pragma unroll
    for (int s = 0; s < kLoads; ++s) of[s] = mine[s] / (mine.size / heads);
  }
};

template <typename T, bool kWeighted, bool kSeveral, int kCount>
PYG_SCALE_DEVICE void sum_kernel(const Sum& args, int lanes) {
  using A = AccumulatorOf<T>;
  constexpr int kLoads = kSeveral ? loads_held(kCount, kSumsHeld) : 1;
  const Graph& graph = args.graph;
  const Share<kCount, kLoads> mine(graph, args.size, lanes);
  if (!mine.any) return;
  const Unit& unit = mine.unit;
  const T* x = static_cast<const T*>(args.x.data);
  const A* weight = static_cast<const A*>(args.weight);
  const HeadOf<kCount, kLoads> head(mine, kWeighted ? args.heads : 1);
  A sum[kLoads][kCount] = {};
  for (int64_t e = unit.begin; e < unit.end; e += kAhead) {
    int64_t from[kAhead], id[kAhead];
    sources(graph, e, unit.end, from);
    if (kWeighted) edge_ids(graph, e, unit.end, id);
    // Edges beyond the end have row 0, which nobody uses: loads without a condition go together.
#pragma unroll
    for (int s = 0; s < kLoads; ++s) {
      if (!mine.has(s)) break;
      Pack<T, kCount> rows[kAhead];
      A factors[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        rows[k] = load<kCount>(x + from[k] * args.x.stride + mine[s]);
        factors[k] = kWeighted ? weight[id[k] * args.heads + head.of[s]] : A{1};
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (e + k >= unit.end) continue;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const A value = widen(rows[k].values[i]);
          sum[s][i] += kWeighted ? value * factors[k] : value;
        }
      }
    }
  }
  const int64_t degree = unit.end - unit.begin;
  const A factor = args.mean && degree ? A{1} / static_cast<A>(degree) : A{1};
  mine.template put<T>(sum, factor, args.out, args.partial);
}

// Long rows: a thread adds up a column of a row's pieces, in their order.
template <typename T>
PYG_SCALE_DEVICE void sum_fold_kernel(const Sum& args, int lanes) {
  using A = AccumulatorOf<T>;
  const Lanes group(lanes);
  const int64_t chunk = group.group();
  const int64_t column = static_cast<int64_t>(blockIdx.y) * lanes + group.lane;
  Slots slots;
  if (chunk >= args.graph.num_chunks() || column >= args.size) return;
  if (!slots_of(args.graph, chunk, slots)) return;
  const A* partial = static_cast<const A*>(args.partial) + column;
  A sum = partial[slots.first * args.size];
  for (int64_t slot = slots.second; slot <= slots.last; slot += 2) {
    sum += partial[slot * args.size];
  }
  const int64_t degree = slots.row.row_end - slots.row.row_begin;
  const A factor = args.mean ? A{1} / static_cast<A>(degree) : A{1};
  static_cast<T*>(args.out)[slots.row.row * args.size + column] = Number<T>::narrow(sum * factor);
}

}  // namespace pyg_scale::cuda
