// draw_neighbors: in-edges of nodes by keyed draws, the same bits as csrc/pick.h (docs/draws.md).
//
// A thread draws for a node, as each pick of Floyd's method looks at those before it; then a thread
// reads an edge.
#pragma once

#include "device.cuh"
#include "loading.h"

namespace pyg_scale::cuda {

// The in-edges of a node: positions [begin, end).
struct InEdges {
  int64_t begin, end;
  PYG_SCALE_DEVICE int64_t size() const { return end - begin; }
};

PYG_SCALE_DEVICE InEdges in_edges(const DrawNeighbors& args, int64_t node) {
  stop_unless(node >= 0 && node < args.num_rows);
  const InEdges found{args.indptr[node], args.indptr[node + 1]};
  stop_unless(0 <= found.begin && found.begin <= found.end && found.end <= args.num_positions);
  return found;
}

// Whether a node with d in-edges gets all of them, in their order.
PYG_SCALE_DEVICE bool takes_all(const DrawNeighbors& args, int64_t d) {
  return args.num_neighbors < 0 || (!args.replace && args.num_neighbors >= d);
}

// Positions of the edges of nodes that do not get all, written to `edge`.
PYG_SCALE_DEVICE void draw_positions_kernel(const DrawNeighbors& args, int) {
  const int64_t i = Lanes(1).group();
  if (i >= args.count) return;
  const int64_t node = args.node[i], k = args.num_neighbors;
  const InEdges all = in_edges(args, node);
  const int64_t d = all.size();
  if (d == 0 || takes_all(args, d)) return;
  stop_unless(args.offset[i] >= 0 && args.offset[i] + k <= args.num_edges);
  const uint64_t key = fold(args.key, static_cast<uint64_t>(node));
  int64_t* out = args.edge + args.offset[i];
  for (int64_t pick = 0; pick < k; ++pick) {
    if (args.replace) {
      out[pick] = all.begin + static_cast<int64_t>(bounded(key, static_cast<uint64_t>(pick),
                                                           static_cast<uint64_t>(d)));
      continue;
    }
    const int64_t j = d - k + pick;
#if defined(PYG_SCALE_FAULT_SHORT_FLOYD)
    const int64_t size = j;
#else
    const int64_t size = j + 1;
#endif
    const int64_t position =
        all.begin + static_cast<int64_t>(
                        bounded(key, static_cast<uint64_t>(pick), static_cast<uint64_t>(size)));
    bool taken = false;
#if !defined(PYG_SCALE_FAULT_NO_SCAN)
    for (int64_t before = 0; before < pick; ++before) taken |= out[before] == position;
#endif
    out[pick] = taken ? all.begin + j : position;
  }
}

// The neighbour and the id of each edge.
PYG_SCALE_DEVICE void read_neighbors_kernel(const DrawNeighbors& args, int) {
  const int64_t e = Lanes(1).group();
  if (e >= args.num_edges) return;
  const int64_t i = args.row[e];
  stop_unless(i >= 0 && i < args.count);
  const InEdges all = in_edges(args, args.node[i]);
  const int64_t position =
      takes_all(args, all.size()) ? all.begin + e - args.offset[i] : args.edge[e];
  stop_unless(position >= all.begin && position < all.end);
  const int64_t neighbor = args.indices[position];
  stop_unless(neighbor >= 0 && neighbor < args.num_nodes);
  args.neighbor[e] = neighbor;
  args.edge[e] = args.edge_id[position];
}

}  // namespace pyg_scale::cuda
