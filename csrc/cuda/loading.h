// What the host hands to the kernels that make batches: as abi.h says.
#pragma once

#include "abi.h"

namespace pyg_scale::cuda {

// Rows of bytes.
struct ByteRows {
  const char* data;
  int64_t count, stride;  // bytes from row to row
};

// gather_cached: see pyg_scale/ops/gather_cached.py.
struct GatherCached {
  ByteRows cached, rest;
  Column index;
  const int32_t* slot_of;  // [rest.count], or null
  int64_t count, row_bytes;
  bool over_the_bus;  // the rest is memory of the host
  char* out;          // [count, row_bytes]
};

// Numbers at equal distances, such as every second one: neighbour and edge id may be side by side.
struct Spaced {
  Column numbers;
  int64_t step;

  PYG_SCALE_BOTH int64_t operator[](int64_t i) const { return numbers[i * step]; }
};

// The nodes that get in-edges along one edge type.
struct DrawnType {
  const int64_t* indptr;  // [num_rows + 1]
  Spaced indices, edge_id;
  int64_t num_positions;        // of indices
  int64_t num_rows, num_nodes;  // neighbours are less than num_nodes
  const int64_t* node;          // [count]
  const int64_t* seed;          // [count], which keys depend on, too; or null
  const int64_t* offset;        // [count + 1], where the edges of each node begin
  // [count], the positions among which each node chooses; or null: all of its in-edges.
  const int64_t *first_candidate, *end_of_candidates;
  const int64_t* weight_prefix;  // [num_positions], or null
  int64_t count, num_edges, num_neighbors;
  int64_t begin;  // where the edges of the type begin among those of all types
  uint64_t key;
};

// draw_neighbors: see pyg_scale/ops/draw_neighbors.py. A kernel's arguments have at most 4 KiB.
struct DrawNeighbors {
  static constexpr int kTypes = 16;
  DrawnType of[kTypes];
  int64_t first[kTypes + 1];  // the first warp of each type, and the number of warps
  int64_t *row, *neighbor, *edge;
  int32_t count;  // of types
  bool replace;
};
static_assert(sizeof(DrawNeighbors) <= 4000);

// The nodes that choose among their in-edges along one edge type.
struct ChoosingType {
  const int64_t* indptr;  // [num_rows + 1]
  Spaced indices;
  const int64_t* time;           // [num_positions], or null
  const int64_t* neighbor_time;  // [num_nodes], or null
  const int64_t* weight_prefix;  // [num_positions], or null
  int64_t num_positions;         // of indices
  int64_t num_rows, num_nodes;   // neighbours that have times are less than num_nodes
  const int64_t* node;           // [count]
  const int64_t* latest;         // [count], or null
  const int64_t* after;          // [count], or null
  int64_t count, num_neighbors;
  int64_t begin;  // where the nodes of the type begin among those of all types
};

// candidates: see pyg_scale/ops/candidates.py.
struct ChooseCandidates {
  static constexpr int kTypes = 16;
  ChoosingType of[kTypes];
  int64_t first[kTypes + 1];      // the first warp of each type, and the number of warps
  int64_t *begin, *end, *counts;  // of the nodes of all types
  int32_t count;                  // of types
  bool replace, last;
};
static_assert(sizeof(ChooseCandidates) <= 4000);

// first_places: see pyg_scale/ops/first_places.py.
struct FirstPlaces {
  const int64_t* key;  // [count]
  int64_t count;
  int64_t slots;    // a power of two, at least twice as many as there are different numbers
  uint64_t* held;   // [slots], the number that has the slot
  uint32_t* least;  // [slots], its first place
  int64_t* out;     // [count]
};

}  // namespace pyg_scale::cuda

#if !defined(__CUDACC__)  // of the host
extern "C" {
int pyg_scale_cuda_draw_neighbors(const pyg_scale::cuda::DrawNeighbors* args,
                                  pyg_scale::cuda::Stream stream);
int pyg_scale_cuda_candidates(const pyg_scale::cuda::ChooseCandidates* args,
                              pyg_scale::cuda::Stream stream);
int pyg_scale_cuda_first_places(const pyg_scale::cuda::FirstPlaces* args,
                                pyg_scale::cuda::Stream stream);
int pyg_scale_cuda_gather_cached(const pyg_scale::cuda::GatherCached* args,
                                 pyg_scale::cuda::Stream stream);
// Memory of the host that a device reads. map_host locks and maps it. unmap_host gives it back,
// which may not be done while a stream records a graph. mapped finds its address on the device, and
// fails if it has none.
int pyg_scale_cuda_map_host(int32_t device, void* data, int64_t bytes);
int pyg_scale_cuda_unmap_host(int32_t device, void* data, bool* done);
int pyg_scale_cuda_mapped(int32_t device, const void* data, const void** there);
}
#endif
