// csr_group_padded, csr_transpose_few: edges grouped by either end, see pyg_scale/ops/adjacency.py.
//
// A counting sort of both ends at once. Atomics count, so places within a group depend on who comes
// first; then each edge counts the earlier ones of its group, which gives the order of a stable
// sort. Nobody waits for the device, and the number of kernels does not depend on the edges.
#pragma once

#include "adjacency.h"
#include "device.cuh"

namespace pyg_scale::cuda {

// An edge: its number, and its ends.
struct EdgeOf {
  int64_t id, from, to;
};

// The destination of a position of edges that are grouped.
PYG_SCALE_DEVICE int64_t row_at(const int64_t* indptr, int64_t rows, int64_t position) {
  int64_t low = 0, high = rows;  // indptr[low] <= position < indptr[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (indptr[middle] <= position ? low : high) = middle;
  }
  stop_unless(low < rows && indptr[low] <= position && position < indptr[low + 1]);
  return low;
}

PYG_SCALE_DEVICE EdgeOf edge_of(const Grouping& args, int64_t e) {
  EdgeOf edge{e, e - args.num_given, e - args.num_given};  // a loop that is added
  if (e < args.num_given) {
    edge.from = args.from[e];
    if (args.grouped) {
      edge.to = row_at(args.grouped, args.destinations.rows, e);
    } else {
      edge.to = args.to[e];
      if (args.loops) {
        stop_unless(edge.to < args.destinations.rows - 1);
        if (edge.from == edge.to) edge.to = args.destinations.rows - 1;
      }
    }
  }
  stop_unless(edge.from >= 0 && edge.from < args.sources.rows);
  stop_unless(edge.to >= 0 && edge.to < args.destinations.rows);
  return edge;
}

PYG_SCALE_DEVICE void group_zero_kernel(const Grouping& args, int) {
  const int64_t i = Lanes(1).group();
  if (i < args.num_counts) args.counts[i] = 0;
}

PYG_SCALE_DEVICE void count_at(const End& end, int64_t row) {
  if (!end.cursor) return;
  atomicAdd(end.cursor + row, 1);
  atomicAdd(end.tiles + row / kGroupTile, 1);
}

PYG_SCALE_DEVICE void group_count_kernel(const Grouping& args, int) {
  const int64_t e = Lanes(1).group();
  if (e >= args.num_edges) return;
  const EdgeOf edge = edge_of(args, e);
  count_at(args.destinations, edge.to);
  count_at(args.sources, edge.from);
}

// The sum of the values of all earlier threads of the block; `all` is that of all threads.
PYG_SCALE_DEVICE int32_t before_in_block(int32_t value, int32_t& all) {
  __shared__ int32_t of_warp[kBlockThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int32_t sum = value;
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(step));
    if (lane >= step) sum += other;
  }
  __syncthreads();  // earlier sums were read
  if (lane == kWarp - 1) of_warp[warp] = sum;
  __syncthreads();
  int32_t earlier = 0;
  all = 0;
  for (int i = 0; i < kBlockThreads / kWarp; ++i) {
    if (i < warp) earlier += of_warp[i];
    all += of_warp[i];
  }
  return earlier + sum - value;
}

// A block turns the counts of kGroupTile rows into the places where the edges of each row begin.
PYG_SCALE_DEVICE void group_scan_kernel(const Grouping& args, int) {
  const int64_t of_first = args.destinations.cursor ? args.destinations.num_tiles() : 0;
  const int64_t block = blockIdx.x;
  const bool first = block < of_first;
  const End& end = first ? args.destinations : args.sources;
  const int64_t tile = first ? block : block - of_first;
  int32_t sum = 0;
  for (int64_t t = threadIdx.x; t < tile; t += kBlockThreads) sum += end.tiles[t];
  int32_t place = 0, all = 0;
  before_in_block(sum, place);  // of the tiles before this one
  for (int64_t i = 0; i < kGroupTile; i += kBlockThreads) {
    const int64_t row = tile * kGroupTile + i + threadIdx.x;
    const int32_t count = row < end.rows ? end.cursor[row] : 0;
    const int32_t begin = place + before_in_block(count, all);
    place += all;
    if (row <= end.rows) end.indptr[row] = begin;
    if (row < end.rows) end.cursor[row] = begin;
  }
}

// Each edge takes a place of its groups. In that of a source it is known by destination and number.
PYG_SCALE_DEVICE void group_place_kernel(const Grouping& args, int) {
  const int64_t e = Lanes(1).group();
  if (e >= args.num_edges) return;
  const EdgeOf edge = edge_of(args, e);
  if (args.destinations.cursor) {
    args.by_destination[atomicAdd(args.destinations.cursor + edge.to, 1)] = static_cast<int32_t>(e);
  }
  if (args.sources.cursor) {
    args.by_source[atomicAdd(args.sources.cursor + edge.from, 1)] =
        static_cast<uint64_t>(edge.to) << 32 | static_cast<uint64_t>(e);
  }
}

// The place of an entry in the order of its group.
template <typename T>
PYG_SCALE_DEVICE int64_t place_of(const int64_t* indptr, int64_t row, const T* entries, T own) {
  int64_t place = indptr[row];
  const int64_t end = indptr[row + 1];
  for (int64_t i = indptr[row]; i < end; ++i) place += entries[i] < own;
  return place;
}

// A thread for each place of the groups by source, if there are any: threads of a warp then mostly
// read the same group.
PYG_SCALE_DEVICE void group_order_kernel(const Grouping& args, int) {
  const int64_t i = Lanes(1).group();
  if (i >= args.num_edges) return;
  int64_t e = i, position = i;
  uint64_t own = 0;
  if (args.sources.cursor) {
    own = args.by_source[i];
    e = static_cast<int64_t>(own & 0xffffffffu);
  }
  const EdgeOf edge = edge_of(args, e);
  if (args.destinations.cursor) {
    position =
        place_of(args.destinations.indptr, edge.to, args.by_destination, static_cast<int32_t>(e));
    args.indices[position] = static_cast<int32_t>(edge.from);
    args.edge_id[position] = static_cast<int32_t>(e);
  } else {
    position = e;
  }
  if (!args.sources.cursor) return;
  const int64_t at = place_of(args.sources.indptr, edge.from, args.by_source, own);
  if (args.wide) {
    static_cast<int64_t*>(args.rows)[at] = edge.to;
  } else {
    static_cast<int32_t*>(args.rows)[at] = static_cast<int32_t>(edge.to);
  }
  args.position[at] = static_cast<int32_t>(position);
}

}  // namespace pyg_scale::cuda
