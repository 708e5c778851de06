// What the host hands to the kernels that group edges: as abi.h says.
#pragma once

#include "abi.h"

namespace pyg_scale::cuda {

constexpr int64_t kGroupTile = 8 * kBlockThreads;  // rows whose counts a block adds up
constexpr int64_t kTileApart = 8;  // numbers: atomics on one sector of the cache are slow
constexpr int64_t kHub = 256;      // a row with more edges is sorted by a block

// The nodes at one end of edges. Edges are not grouped by them without a cursor.
struct End {
  int64_t rows;
  int32_t* cursor;    // [rows], of counts, then of the next places
  int32_t* tiles;     // [num_tiles, kTileApart], of counts; the first of each is used
  int32_t* num_hubs;  // [1]
  int32_t* hubs;      // [num_edges / kHub], rows with more than kHub edges, in any order
  int64_t* indptr;    // [rows + 1]

  PYG_SCALE_BOTH int64_t num_tiles() const { return rows / kGroupTile + 1; }
};

// csr_group_padded and csr_transpose_few.
struct Grouping {
  Column from, to;         // [num_given]
  const int64_t* grouped;  // [destinations.rows + 1], of edges that are grouped: without `to`
  int64_t num_given;
  int64_t num_edges;  // with those that are added: loops of the first nodes
  bool loops;         // that are given lead to the last destination
  End destinations, sources;
  int32_t* arrived;  // [1], for wait_for_grid
  int32_t* counts;   // [num_counts], zeros: `arrived`, all cursors, tiles and num_hubs
  int64_t num_counts;
  int32_t* by_destination;  // [num_edges]
  // [num_edges], the destination above the number; of hubs then the position by destination
  uint64_t* by_source;
  int32_t* row_at;             // [num_edges], destinations by position, of edges out of hubs
  int32_t *indices, *edge_id;  // [num_edges] by destination
  void* rows;                  // [num_edges] by source, int64 if `wide`
  bool wide;
  int32_t* position;  // [num_edges] by source
};

}  // namespace pyg_scale::cuda

#if !defined(__CUDACC__)  // of the host
extern "C" int pyg_scale_cuda_group(const pyg_scale::cuda::Grouping* args,
                                    pyg_scale::cuda::Stream stream);
#endif
