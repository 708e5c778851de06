// What the kernels that choose in-edges share: the in-edges of a node, and a search by a warp.
#pragma once

#include "device.cuh"
#include "loading.h"

namespace pyg_scale::cuda {

// Some of the in-edges of a node: positions [begin, end).
struct InEdges {
  int64_t begin, end;
  PYG_SCALE_DEVICE int64_t size() const { return end - begin; }
};

PYG_SCALE_DEVICE void check_within(const InEdges& edges, int64_t num_positions) {
  stop_unless(0 <= edges.begin && edges.begin <= edges.end && edges.end <= num_positions);
}

PYG_SCALE_DEVICE InEdges in_edges(const int64_t* indptr, int64_t num_rows, int64_t num_positions,
                                  int64_t node) {
  stop_unless(node >= 0 && node < num_rows);
  const InEdges found{indptr[node], indptr[node + 1]};
  check_within(found, num_positions);
  return found;
}

// The first position in [low, high) from which on a condition holds, or high. All lanes of the warp
// have the same bounds; each asks about the last place of its piece.
template <typename Condition>
PYG_SCALE_DEVICE int64_t first_where(const Lanes& warp, int64_t low, int64_t high,
                                     const Condition& holds) {
  while (low < high) {
    const int64_t step = (high - low + kWarp - 1) / kWarp;
    const int64_t at = low + (warp.lane + 1) * step - 1;
    const uint32_t votes = __ballot_sync(kAllLanes, holds(at < high ? at : high - 1));
    if (!votes) return high;
    const int piece = __ffs(static_cast<int>(votes)) - 1;
    const int64_t last = low + (piece + 1) * step - 1;
#if defined(PYG_SCALE_FAULT_WHOLE_PIECES)
    return last < high ? last : high - 1;
#endif
    high = last < high ? last : high - 1;
    low += piece * step;
  }
  return high;
}

}  // namespace pyg_scale::cuda
