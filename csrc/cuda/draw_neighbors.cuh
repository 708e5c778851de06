// draw_neighbors: in-edges of nodes by keyed draws, the same bits as csrc/pick.h (docs/draws.md).
//
// A warp draws for a node along an edge type, and one launch serves all edge types of a hop.
// Without weights all draws of a node are made at once; then its lanes look together, pick after
// pick, whether what was drawn is taken (Floyd's method). With weights and without replacement a
// draw depends on those before it; its lanes look together what these have taken, and search
// together.
#pragma once

#include "draws.cuh"

namespace pyg_scale::cuda {

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

// Wraps around where damaged sums would overflow.
PYG_SCALE_DEVICE int64_t difference(int64_t from, int64_t what) {
  return static_cast<int64_t>(static_cast<uint64_t>(from) - static_cast<uint64_t>(what));
}

// The candidates of a node, and the running sums of the weights of its in-edges.
struct Weighted {
  const int64_t* prefix;
  InEdges c;
  int64_t before, total;  // the sums of the weights before the candidates, and of them

  PYG_SCALE_DEVICE Weighted(const int64_t* sums, const InEdges& all, const InEdges& candidates)
      : prefix(sums), c(candidates) {
    before = c.begin > all.begin ? prefix[c.begin - 1] : 0;
#if defined(PYG_SCALE_FAULT_NO_BASE)
    before = 0;
#endif
    total = difference(prefix[c.end - 1], before);
    stop_unless(before >= 0 && total >= 0);
  }
};

// The candidate that a draw by weight with replacement gives.
PYG_SCALE_DEVICE int64_t drawn_by_weight(uint64_t key, int64_t pick, const Weighted& of) {
  stop_unless(of.total > 0);
  const int64_t sum = of.before + static_cast<int64_t>(bounded(key, static_cast<uint64_t>(pick),
                                                               static_cast<uint64_t>(of.total)));
  int64_t low = of.c.begin, high = of.c.end - 1;  // whose sum is beyond all draws
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (of.prefix[middle] > sum) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Writes the picks of a node, each in proportion to the weights of what is left (successive
// sampling). A draw counts the weight that is left, in order of position: it lies beyond a pick if
// it reaches the weight that is left before that pick, `left_before`. `weight` is what the pick
// took. Pick i is written, and read again, by lane i % 32.
PYG_SCALE_DEVICE void successive(const Lanes& warp, uint64_t key, const Weighted& of, int64_t k,
                                 int64_t* picks, int64_t* left_before, int64_t* weight) {
  const InEdges& c = of.c;
  const int64_t *prefix = of.prefix, base = of.before;
  int64_t left = of.total;
  for (int64_t i = 0; i < k; ++i) {
    stop_unless(left > 0);
    const auto t =
        static_cast<int64_t>(bounded(key, static_cast<uint64_t>(i), static_cast<uint64_t>(left)));
    int64_t gone[1] = {0};
    for (int64_t j = warp.lane; j < i; j += kWarp) {
      if (left_before[j] <= t) gone[0] += weight[j];
    }
    warp.sum(gone);
    const int64_t sum = base + t + gone[0];
    const int64_t position =
        first_where(warp, c.begin, c.end, [&](int64_t p) { return prefix[p] > sum; });
    stop_unless(position < c.end);
    const int64_t before = position > c.begin ? difference(prefix[position - 1], base) : 0;
    const int64_t own = difference(difference(prefix[position], base), before);
    stop_unless(before >= 0 && own > 0 && own <= left);  // sums rise
#if !defined(PYG_SCALE_FAULT_ONCE_LEFT)
    for (int64_t j = warp.lane; j < i; j += kWarp) {
      if (picks[j] > position) left_before[j] -= own;
    }
#endif
    if (warp.lane == i % kWarp) {
      picks[i] = position;
      left_before[i] = before - gone[0];
      weight[i] = own;
    }
#if !defined(PYG_SCALE_FAULT_PICKS_STAY)
    left -= own;
#endif
  }
}

// Those of its in-edges among which a node chooses.
PYG_SCALE_DEVICE InEdges candidates_of(const DrawnType& of, int64_t i, const InEdges& all) {
  if (!of.first_candidate) return all;
  const InEdges found{of.first_candidate[i], of.end_of_candidates[i]};
  stop_unless(all.begin <= found.begin && found.begin <= found.end && found.end <= all.end);
  return found;
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
  const InEdges all = in_edges(of.indptr, of.num_rows, of.num_positions, node);
  const InEdges c = candidates_of(of, i, all);
  const int64_t d = c.size();
  if (d == 0) return;
  const bool takes_all = wanted < 0 || (!args.replace && wanted >= d);
  int64_t k = takes_all ? d : wanted;
  const bool by_weight = of.weight_prefix && !takes_all;
  if (by_weight) {  // candidates without weight are not drawn
    const int64_t drawn = of.offset[i + 1] - of.offset[i];
    stop_unless(drawn >= 0 && drawn <= k);
    k = drawn;
  }
  stop_unless(of.offset[i] >= 0 && of.offset[i] + k <= of.num_edges);
  const int64_t place = of.begin + of.offset[i];
  uint64_t key = fold(of.key, static_cast<uint64_t>(node));
#if !defined(PYG_SCALE_FAULT_SAME_FOR_ALL_SEEDS)
  if (of.seed) key = fold(key, static_cast<uint64_t>(of.seed[i]));
#endif
  int64_t *row = args.row + place, *neighbor = args.neighbor + place, *edge = args.edge + place;
  const bool scans = !takes_all && !args.replace;
  if (scans && by_weight) {  // what is written last is of use until then
    successive(warp, key, Weighted(of.weight_prefix, all, c), k, edge, neighbor, row);
  } else if (scans) {
    floyd(warp, key, d, k, edge);
  }
  for (int64_t pick = warp.lane; pick < k; pick += kWarp) {
    int64_t position = c.begin;
    if (takes_all) {
      position += pick;
    } else if (by_weight) {
      position =
          scans ? edge[pick] : drawn_by_weight(key, pick, Weighted(of.weight_prefix, all, c));
    } else if (scans) {
      position += edge[pick];
    } else {
      position +=
          static_cast<int64_t>(bounded(key, static_cast<uint64_t>(pick), static_cast<uint64_t>(d)));
    }
    const int64_t source = of.indices[position];
    stop_unless(source >= 0 && source < of.num_nodes);
    row[pick] = i;
    neighbor[pick] = source;
    edge[pick] = of.edge_id[position];
  }
}

}  // namespace pyg_scale::cuda
