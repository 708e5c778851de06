// The rows of a graph as units of work that no hub makes long.
//
// A row of more than `chunk` edges is long: it is cut at the positions that are multiples of
// `chunk`. At most two long rows touch a chunk: one that its first edge belongs to, and one that
// begins in it and ends later. So each chunk has two slots for the results of pieces. The places of
// slots follow from the pointers alone: there is no list, no waiting for the device, and no
// atomics. A second kernel folds the slots of a row in their order.
#pragma once

#include "device.cuh"

namespace pyg_scale::cuda {

struct Unit {
  int64_t row, begin, end;  // edges
  int64_t row_begin, row_end;
  int64_t slot;  // of the piece; -1 for a whole row
};

// The row that an edge belongs to.
PYG_SCALE_DEVICE int64_t row_of(const Graph& graph, int64_t edge) {
  int64_t low = 0, high = graph.num_rows;  // indptr[low] <= edge < indptr[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (graph.indptr[middle] <= edge) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

PYG_SCALE_DEVICE void read_row(const Graph& graph, int64_t row, Unit& unit) {
  unit.row = row;
  unit.row_begin = graph.indptr[row];
  unit.row_end = graph.indptr[row + 1];
  stop_unless(0 <= unit.row_begin && unit.row_begin <= unit.row_end &&
              unit.row_end <= graph.num_edges);
}

// Finds unit number `index` of num_units(). Pieces come first, as they are the longest. Returns
// false if the unit is empty: no long row is there, or the row is done in pieces.
PYG_SCALE_DEVICE bool unit_of(const Graph& graph, int64_t index, Unit& unit) {
  const int64_t slots = graph.num_slots();
  if (index >= slots) {
    read_row(graph, index - slots, unit);
    unit.begin = unit.row_begin;
    unit.end = unit.row_end;
    unit.slot = -1;
    return slots == 0 || unit.end - unit.begin <= graph.chunk;
  }
  const int64_t first = index / 2 * graph.chunk;
  const int64_t last =
      first + graph.chunk < graph.num_edges ? first + graph.chunk : graph.num_edges;
  const bool begins_here = index % 2;
  read_row(graph, row_of(graph, begins_here ? last - 1 : first), unit);
  unit.slot = index;
  unit.begin = begins_here ? unit.row_begin : first;
  unit.end = unit.row_end < last ? unit.row_end : last;
#if defined(PYG_SCALE_FAULT_SHORT_SEGMENT)
  if (unit.end == last) --unit.end;
#endif
  return unit.row_end - unit.row_begin > graph.chunk && (!begins_here || unit.row_begin > first);
}

// The slots of the long row that begins in a chunk; false if there is none.
struct Slots {
  Unit row;
  int64_t first, second, last;  // `first`, then second, second + 2, ..., last
};

PYG_SCALE_DEVICE bool slots_of(const Graph& graph, int64_t chunk, Slots& slots) {
  const int64_t begin = chunk * graph.chunk, end = begin + graph.chunk;
  if (end > graph.num_edges) return false;  // a long row goes beyond the chunk that it begins in
  read_row(graph, row_of(graph, end - 1), slots.row);
  const int64_t at = slots.row.row_begin;
  if (slots.row.row_end - at <= graph.chunk || at < begin) return false;
  slots.first = 2 * chunk + (at > begin);
  slots.second = 2 * chunk + 2;
  slots.last = (slots.row.row_end - 1) / graph.chunk * 2;
  return true;
}

// Unit number `index`, or one without edges if there is none. Every lane of a warp gets one, so
// that all of them come to the same collectives.
struct Work {
  Unit unit{};
  bool any;
  int64_t longest;  // the edges of the longest unit of the warp

  PYG_SCALE_DEVICE Work(const Graph& graph, int64_t index, bool has = true) {
    any = has && index < graph.num_units() && unit_of(graph, index, unit);
    if (!any) unit.end = unit.begin;
    longest = most_of_warp(unit.end - unit.begin);
  }
};

// The work of a lane if the lanes of its group share the numbers of a row: kLoads times kCount
// columns of a unit. [load] is the first column of a load.
template <int kCount, int kLoads>
struct Share {
  Unit unit;
  int64_t first, between, size;
  bool any;  // else there is nothing for this lane

  PYG_SCALE_DEVICE Share(const Graph& graph, int64_t size, int lanes)
      : between(static_cast<int64_t>(lanes) * kCount), size(size) {
    const Lanes group(lanes);
    const int64_t index = group.group();
    first = static_cast<int64_t>(blockIdx.y) * between * kLoads + group.lane * kCount;
    any = index < graph.num_units() && has(0) && unit_of(graph, index, unit);
  }
  PYG_SCALE_DEVICE int64_t operator[](int load) const { return first + load * between; }
  PYG_SCALE_DEVICE bool has(int load) const {
#if defined(PYG_SCALE_FAULT_NO_GUARD)
    return true;
#else
    return (*this)[load] < size;
#endif
  }

  // Writes sums to the row or, for a piece of a long row, to its slot.
  template <typename T>
  PYG_SCALE_DEVICE void put(const AccumulatorOf<T> (&sum)[kLoads][kCount], AccumulatorOf<T> factor,
                            void* out, void* partial) const {
#pragma unroll
    for (int s = 0; s < kLoads; ++s) {
      if (!has(s)) continue;
      if (unit.slot < 0) {
        store<kCount>(static_cast<T*>(out) + unit.row * size + (*this)[s], sum[s], factor);
        continue;
      }
      auto* to = static_cast<AccumulatorOf<T>*>(partial) + unit.slot * size + (*this)[s];
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = sum[s][i];
    }
  }
};

// Returns an index that was read. Stops the kernel unless it is in [0, size).
PYG_SCALE_DEVICE int64_t checked(int64_t index, int64_t size) {
  stop_unless(static_cast<uint64_t>(index) < static_cast<uint64_t>(size));
  return index;
}

PYG_SCALE_DEVICE int64_t edge_id(const Graph& graph, int64_t edge) {
  return checked(graph.edge_id[edge], graph.num_edges);
}

// Numbers of a column, to[k] = column[at(k)] where wanted(k), else 0; checked to be in [0, size).
// Whether they are int64 is asked once for all, and all are read before the first is checked: with
// a branch or a check between two loads, one waits for the other.
template <int kCount, typename At, typename Wanted>
PYG_SCALE_DEVICE void read(const Column& column, int64_t size, const At& at, const Wanted& wanted,
                           int64_t (&to)[kCount]) {
  if (!column.data) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = wanted(k) ? at(k) : 0;
  } else if (column.wide) {
    const int64_t* data = static_cast<const int64_t*>(column.data);
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = wanted(k) ? data[at(k)] : 0;
  } else {
    const int32_t* data = static_cast<const int32_t*>(column.data);
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = wanted(k) ? data[at(k)] : 0;
  }
#if !defined(__CUDACC__)
  for (int k = 0; k < kCount; ++k) emulator::counts.indices += wanted(k);
#endif
  bool inside = true;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const bool there = static_cast<uint64_t>(to[k]) < static_cast<uint64_t>(size);
    inside = inside && (there || !wanted(k));
  }
  stop_unless(inside);
}

// The numbers at given places.
template <int kCount>
PYG_SCALE_DEVICE void read(const Column& column, int64_t size, const int64_t (&places)[kCount],
                           int64_t (&to)[kCount]) {
  read(column, size, [&](int k) { return places[k]; }, [](int) { return true; }, to);
}

// The sources of the edges first, first + 1, ... below `end`.
template <int kCount>
PYG_SCALE_DEVICE void sources(const Graph& graph, int64_t first, int64_t end,
                              int64_t (&to)[kCount]) {
  read(
      graph.indices, graph.num_columns, [&](int k) { return first + k; },
      [&](int k) { return first + k < end; }, to);
}

// The ids of those edges.
template <int kCount>
PYG_SCALE_DEVICE void edge_ids(const Graph& graph, int64_t first, int64_t end,
                               int64_t (&to)[kCount]) {
  read(
      graph.edge_id, graph.num_edges, [&](int k) { return first + k; },
      [&](int k) { return first + k < end; }, to);
}

}  // namespace pyg_scale::cuda
