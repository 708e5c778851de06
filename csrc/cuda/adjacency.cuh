// csr_group_padded, csr_transpose_few: edges grouped by either end, see pyg_scale/ops/adjacency.py.
//
// A counting sort of both ends at once. Atomics count, so places within a group depend on who comes
// first; then each edge counts the earlier ones of its group, which gives the order of a stable
// sort. Where a group is too large for that, a block sorts it by setting bits, as its numbers
// differ. Nobody on the host waits for the device. It is one kernel, as launching five takes longer
// than grouping the edges of a batch.
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

// Calls work(i) for numbers below `size`, those of the grid's threads side by side.
template <typename Work>
PYG_SCALE_DEVICE void over_grid(int64_t size, const Work& work) {
  const int64_t all = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = Lanes(1).group(); i < size; i += all) work(i);
}

// Counts the row of each of the first `lanes` lanes of a warp. If all are in one tile, as mostly
// are those of sorted edges, one of them counts for the tile.
PYG_SCALE_DEVICE void count_at(const End& end, int64_t row, int lanes) {
  if (!end.cursor) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t tile = row / kGroupTile;
  const int64_t first = __shfl_sync(kAllLanes, tile, 0);
  const bool all = __all_sync(kAllLanes, lane >= lanes || tile == first);
  if (lane >= lanes) return;
  atomicAdd(end.cursor + row, 1);
  if (!all || lane == 0) atomicAdd(end.tiles + tile * kTileApart, all ? lanes : 1);
}

PYG_SCALE_DEVICE void count_edges(const Grouping& args) {
  const int64_t all = (args.num_edges + kWarp - 1) / kWarp * kWarp;
  over_grid(all, [&](int64_t e) {  // whole warps
    const int64_t left = args.num_edges - e / kWarp * kWarp;
    const EdgeOf edge = e < args.num_edges ? edge_of(args, e) : EdgeOf{};
    const int lanes = left < kWarp ? static_cast<int>(left) : kWarp;
    count_at(args.destinations, edge.to, lanes);
    count_at(args.sources, edge.from, lanes);
  });
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
PYG_SCALE_DEVICE void scan_tile(const End& end, int64_t tile) {
  int32_t sum = 0;
  for (int64_t t = threadIdx.x; t < tile; t += kBlockThreads) sum += end.tiles[t * kTileApart];
  int32_t place = 0, all = 0;
  before_in_block(sum, place);  // of the tiles before this one
  for (int64_t i = 0; i < kGroupTile; i += kBlockThreads) {
    const int64_t row = tile * kGroupTile + i + threadIdx.x;
    const int32_t count = row < end.rows ? end.cursor[row] : 0;
    const int32_t begin = place + before_in_block(count, all);
    place += all;
    if (row <= end.rows) end.indptr[row] = begin;
    if (row < end.rows) end.cursor[row] = begin;
    if (count > kHub) end.hubs[atomicAdd(end.num_hubs, 1)] = static_cast<int32_t>(row);
  }
}

PYG_SCALE_DEVICE void scan_tiles(const Grouping& args) {
  const int64_t first = args.destinations.cursor ? args.destinations.num_tiles() : 0;
  const int64_t tiles = first + (args.sources.cursor ? args.sources.num_tiles() : 0);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (tile < first) {
      scan_tile(args.destinations, tile);
    } else {
      scan_tile(args.sources, tile - first);
    }
  }
}

// An edge takes a place of its groups. In that of a source it is known by destination and number.
PYG_SCALE_DEVICE void place_edge(const Grouping& args, int64_t e) {
  const EdgeOf edge = edge_of(args, e);
  if (args.destinations.cursor) {
    args.by_destination[atomicAdd(args.destinations.cursor + edge.to, 1)] = static_cast<int32_t>(e);
  }
  if (args.sources.cursor) {
    args.by_source[atomicAdd(args.sources.cursor + edge.from, 1)] =
        static_cast<uint64_t>(edge.to) << 32 | static_cast<uint64_t>(e);
  }
}

// A bit for each of kSize numbers side by side. A thread looks through kWords words of 32, which
// are in one bank of shared memory.
struct Window {
  static constexpr int kWords = 32;
  static constexpr int64_t kSize = int64_t{kBlockThreads} * kWords * 32;
  uint32_t bits[kWords][kBlockThreads];
};

// Hands the entries of a hub, which all differ, to put(place, entry) in ascending order. A block
// does it: it sets a bit for each entry within the window, and goes on to the next window.
template <typename T, typename Put>
PYG_SCALE_DEVICE void sort_hub(const T* entries, int64_t begin, int64_t end, int64_t num_edges,
                               Window& window, const Put& put) {
  constexpr int kWords = Window::kWords, kTogether = 8;
  auto& bits = window.bits;
  const int thread = static_cast<int>(threadIdx.x);
  int64_t place = begin;
  for (int64_t first = 0; first < num_edges; first += Window::kSize) {
    for (int i = 0; i < kWords; ++i) bits[i][thread] = 0;
    __syncthreads();
    for (int64_t i = begin + thread; i < end; i += kTogether * kBlockThreads) {
      int64_t found[kTogether];  // read before the first is used
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int64_t at = i + k * kBlockThreads;
        found[k] = at < end ? static_cast<int64_t>(entries[at]) - first : -1;
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (found[k] < 0 || found[k] >= Window::kSize) continue;
        const int64_t word = found[k] / 32;
        atomicOr(&bits[word % kWords][word / kWords], 1u << (found[k] % 32));
      }
    }
    __syncthreads();
    int32_t mine = 0, all = 0;
    for (int i = 0; i < kWords; ++i) mine += __popc(bits[i][thread]);
    int64_t at = place + before_in_block(mine, all);
    for (int i = 0; i < kWords; ++i) {
      for (uint32_t left = bits[i][thread]; left; left &= left - 1) {
        put(at++, first + (int64_t{thread} * kWords + i) * 32 + __ffs(static_cast<int>(left)) - 1);
      }
    }
    place += all;
  }
  stop_unless(place == end);
}

// Calls work(begin, end) for the hubs of this block.
template <typename Work>
PYG_SCALE_DEVICE void over_hubs(const End& end, const Work& work) {
  for (int64_t i = blockIdx.x; i < *end.num_hubs; i += gridDim.x) {
    const int64_t hub = end.hubs[i];
    work(end.indptr[hub], end.indptr[hub + 1]);
  }
}

// The edges into each hub by their numbers.
PYG_SCALE_DEVICE void sort_hubs(const Grouping& args, Window& window) {
  over_hubs(args.destinations, [&](int64_t begin, int64_t end) {
    sort_hub(args.by_destination, begin, end, args.num_edges, window,
             [&](int64_t at, int64_t e) { args.edge_id[at] = static_cast<int32_t>(e); });
  });
}

// The place of an entry in the order of its group.
template <typename T>
PYG_SCALE_DEVICE int64_t place_of(int64_t begin, int64_t end, const T* entries, T own) {
  int64_t place = begin;
#pragma unroll 4
  for (int64_t i = begin; i < end; ++i) place += entries[i] < own;
  return place;
}

// The place of an entry of a sorted group.
PYG_SCALE_DEVICE int64_t place_in_order(int64_t begin, int64_t end, const int32_t* sorted,
                                        int32_t own) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (sorted[middle] < own) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

PYG_SCALE_DEVICE void put_by_source(const Grouping& args, int64_t at, int64_t row,
                                    int64_t position) {
  if (args.wide) {
    static_cast<int64_t*>(args.rows)[at] = row;
  } else {
    static_cast<int32_t*>(args.rows)[at] = static_cast<int32_t>(row);
  }
  args.position[at] = static_cast<int32_t>(position);
}

// The edge of place i by source, if edges are grouped so: threads of a warp then mostly read the
// same group. Of an edge out of a hub, by_source gets the position by destination: these are what
// sort_hubs_by_source sorts.
PYG_SCALE_DEVICE void order_edge(const Grouping& args, int64_t i) {
  int64_t e = i, position = i;
  uint64_t own = 0;
  if (args.sources.cursor) {
    own = args.by_source[i];
    e = static_cast<int64_t>(own & 0xffffffffu);
  }
  const EdgeOf edge = edge_of(args, e);
  if (args.destinations.cursor) {
    const int64_t *row = args.destinations.indptr + edge.to, begin = row[0], end = row[1];
    const auto number = static_cast<int32_t>(e);
    if (end - begin > kHub) {
      position = place_in_order(begin, end, args.edge_id, number);
    } else {
      position = place_of(begin, end, args.by_destination, number);
      args.edge_id[position] = number;
    }
    args.indices[position] = static_cast<int32_t>(edge.from);
  } else {
    position = e;
  }
  if (!args.sources.cursor) return;
  const int64_t *row = args.sources.indptr + edge.from, begin = row[0], end = row[1];
  if (end - begin > kHub) {
    args.by_source[i] = static_cast<uint64_t>(position);
    args.row_at[position] = static_cast<int32_t>(edge.to);
  } else {
    put_by_source(args, place_of(begin, end, args.by_source, own), edge.to, position);
  }
}

// The edges out of each hub by their positions by destination.
PYG_SCALE_DEVICE void sort_hubs_by_source(const Grouping& args, Window& window) {
  over_hubs(args.sources, [&](int64_t begin, int64_t end) {
    sort_hub(args.by_source, begin, end, args.num_edges, window, [&](int64_t at, int64_t position) {
      put_by_source(args, at, args.row_at[position], position);
    });
  });
}

PYG_SCALE_DEVICE void group_kernel(const Grouping& args, int) {
  __shared__ Window window;
  int32_t awaited = 0;
  const auto wait = [&] { wait_for_grid(args.arrived, awaited); };
  count_edges(args);
  wait();
  scan_tiles(args);
  wait();
  over_grid(args.num_edges, [&](int64_t e) { place_edge(args, e); });
  wait();
  if (args.destinations.cursor && *args.destinations.num_hubs) {
    sort_hubs(args, window);
    wait();
  }
  over_grid(args.num_edges, [&](int64_t i) { order_edge(args, i); });
  if (args.sources.cursor && *args.sources.num_hubs) {
    wait();
    sort_hubs_by_source(args, window);
  }
}

}  // namespace pyg_scale::cuda
