// draw_neighbors: in-edges of nodes by keyed draws, the same bits as csrc/pick.h (docs/draws.md).
//
// A warp draws for a node along an edge type, and one launch serves all edge types of a hop. All
// draws of a node are made at once; then its lanes look together, pick after pick, whether what
// was drawn is taken (Floyd's method).
#pragma once

#include "device.cuh"
#include "loading.h"

namespace pyg_scale::cuda {

// The in-edges of a node: positions [begin, end).
struct InEdges {
  int64_t begin, end;
  PYG_SCALE_DEVICE int64_t size() const { return end - begin; }
};

PYG_SCALE_DEVICE InEdges in_edges(const DrawnType& of, int64_t node) {
  stop_unless(node >= 0 && node < of.num_rows);
  const InEdges found{of.indptr[node], of.indptr[node + 1]};
  stop_unless(0 <= found.begin && found.begin <= found.end && found.end <= of.num_positions);
  return found;
}

// The position that pick `pick` of k draws without replacement from d in-edges, if it is free.
PYG_SCALE_DEVICE int64_t drawn(uint64_t key, int64_t pick, int64_t d, int64_t k) {
#if defined(PYG_SCALE_FAULT_SHORT_FLOYD)
  const int64_t size = d - k + pick;
#else
  const int64_t size = d - k + pick + 1;
#endif
  return static_cast<int64_t>(
      bounded(key, static_cast<uint64_t>(pick), static_cast<uint64_t>(size)));
}

// Writes the picks of a node, counted from its first in-edge: pick i is written, and read again, by
// lane i % 32.
PYG_SCALE_DEVICE void floyd(const Lanes& warp, uint64_t key, int64_t d, int64_t k, int64_t* picks) {
  for (int64_t begin = 0; begin < k; begin += kWarp) {
    const int64_t pick = begin + warp.lane;
    int64_t mine = pick < k ? drawn(key, pick, d, k) : -1;
    const int count = static_cast<int>(k - begin < kWarp ? k - begin : kWarp);
    for (int i = 0; i < count; ++i) {
      const int64_t wanted = __shfl_sync(kAllLanes, mine, i);
      bool taken = warp.lane < i && mine == wanted;
#if !defined(PYG_SCALE_FAULT_NO_EARLIER_ROUNDS)
      for (int64_t before = warp.lane; before < begin; before += kWarp) {
        taken |= picks[before] == wanted;
      }
#endif
#if defined(PYG_SCALE_FAULT_NO_SCAN)
      taken = false;
#endif
      if (__any_sync(kAllLanes, taken) && warp.lane == i) mine = d - k + pick;
    }
    if (pick < k) picks[pick] = mine;
  }
}

PYG_SCALE_DEVICE void draw_neighbors_kernel(const DrawNeighbors& args, int) {
  const Lanes warp(kWarp);
  const int64_t unit = warp.group();
  if (unit >= args.first[args.count]) return;
  int type = 0;
  while (unit >= args.first[type + 1]) ++type;
  const DrawnType& of = args.of[type];
  const int64_t i = unit - args.first[type];
  const int64_t node = of.node[i], wanted = of.num_neighbors;
  const InEdges all = in_edges(of, node);
  const int64_t d = all.size();
  if (d == 0) return;
  const bool takes_all = wanted < 0 || (!args.replace && wanted >= d);
  const int64_t k = takes_all ? d : wanted;
  stop_unless(of.offset[i] >= 0 && of.offset[i] + k <= of.num_edges);
  const int64_t place = of.begin + of.offset[i];
  uint64_t key = fold(of.key, static_cast<uint64_t>(node));
#if !defined(PYG_SCALE_FAULT_SAME_FOR_ALL_SEEDS)
  if (of.seed) key = fold(key, static_cast<uint64_t>(of.seed[i]));
#endif
  int64_t* edge = args.edge + place;
  const bool scans = !takes_all && !args.replace;
  if (scans) floyd(warp, key, d, k, edge);
  for (int64_t pick = warp.lane; pick < k; pick += kWarp) {
    int64_t position = all.begin;
    if (takes_all) {
      position += pick;
    } else if (scans) {
      position += edge[pick];
    } else {
      position +=
          static_cast<int64_t>(bounded(key, static_cast<uint64_t>(pick), static_cast<uint64_t>(d)));
    }
    const int64_t neighbor = of.indices[position];
    stop_unless(neighbor >= 0 && neighbor < of.num_nodes);
    args.row[place + pick] = i;
    args.neighbor[place + pick] = neighbor;
    edge[pick] = of.edge_id[position];
  }
}

}  // namespace pyg_scale::cuda
