// candidates: the in-edges among which nodes choose, see pyg_scale/ops/candidates.py.
//
// A warp for each node along an edge type, and one launch for all edge types of a hop. Its lanes
// look at 32 places at a time, so that limits of time are found in few rounds of loads.
#pragma once

#include "draws.cuh"

namespace pyg_scale::cuda {

// The number of candidates that a node gets by weight: those of weight 0 only if it gets all.
PYG_SCALE_DEVICE int64_t count_weighted(const Lanes& warp, const ChoosingType& of,
                                        const InEdges& all, const InEdges& c, bool replace) {
  const int64_t* prefix = of.weight_prefix;
  if (replace) {
    const int64_t before = c.begin > all.begin ? prefix[c.begin - 1] : 0;
    return prefix[c.end - 1] > before ? of.num_neighbors : 0;
  }
  int64_t found = 0;
  for (int64_t from = c.begin; from < c.end && found < of.num_neighbors; from += kWarp) {
    const int64_t p = from + warp.lane;
    bool counts = p < c.end;
#if !defined(PYG_SCALE_FAULT_COUNTS_ZEROS)
    if (counts) counts = prefix[p] > (p > all.begin ? prefix[p - 1] : 0);
#endif
    found += __popc(__ballot_sync(kAllLanes, counts));
  }
  return found < of.num_neighbors ? found : of.num_neighbors;
}

PYG_SCALE_DEVICE void candidates_kernel(const ChooseCandidates& args, int) {
  const Lanes warp(kWarp);
  const int64_t unit = warp.group();
  if (unit >= args.first[args.count]) return;
  int type = 0;
  while (unit >= args.first[type + 1]) ++type;
  const ChoosingType& of = args.of[type];
  const int64_t i = unit - args.first[type], k = of.num_neighbors;
  const InEdges all = in_edges(of.indptr, of.num_rows, of.num_positions, of.node[i]);
  InEdges c = all;
  if (of.latest) {
    const auto later = [&](int64_t limit) {
      return [&of, limit](int64_t p) {
        if (of.time) return of.time[p] > limit;
        const int64_t neighbor = of.indices[p];
        stop_unless(neighbor >= 0 && neighbor < of.num_nodes);
        return of.neighbor_time[neighbor] > limit;
      };
    };
#if defined(PYG_SCALE_FAULT_TIES_ARE_LATER)
    c.end = first_where(warp, c.begin, c.end, later(of.latest[i] - 1));
#else
    c.end = first_where(warp, c.begin, c.end, later(of.latest[i]));
#endif
    if (of.after) c.begin = first_where(warp, c.begin, c.end, later(of.after[i]));
    if (args.last && k >= 0 && c.end - k > c.begin) c.begin = c.end - k;
  }
  const int64_t d = c.size();
  int64_t count = d;
  if (d > 0 && k >= 0 && (args.replace || k < d)) {
    count = of.weight_prefix ? count_weighted(warp, of, all, c, args.replace) : k;
  }
  if (warp.lane) return;
  args.begin[of.begin + i] = c.begin;
  args.end[of.begin + i] = c.end;
  args.counts[of.begin + i] = count;
}

}  // namespace pyg_scale::cuda
