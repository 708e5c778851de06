// gather_cached: rows from a cache on the device or from elsewhere, see
// pyg_scale/ops/gather_cached.py.
//
// A group of lanes looks a row up, all lanes at the same place, and copies it in words of kBytes.
// Rows that come over the bus are read from the beginning of a line of it on, so that each line is
// asked for once (as EMOGI does: Min et al., "EMOGI: Efficient Memory-access for Out-of-memory
// Graph- traversal in GPUs", VLDB 2020).
#pragma once

#include "device.cuh"
#include "loading.h"

namespace pyg_scale::cuda {

constexpr int kBusLine = 128;

template <int kBytes>
PYG_SCALE_DEVICE void gather_cached_kernel(const GatherCached& args, int lanes) {
  using Word = Pack<unsigned char, kBytes>;
  const Lanes group(lanes);
  const int64_t i = group.group();
  if (i >= args.count) return;
  const int64_t id = args.index[i];
  int64_t slot = id, row = -1 - id;
  if (args.slot_of) {
    stop_unless(id >= 0 && id < args.rest.count);
    slot = args.slot_of[id];
    row = id;
  }
  const bool cached = slot >= 0;
  row = cached ? slot : row;
  stop_unless(row < (cached ? args.cached.count : args.rest.count));
  const char* data = cached ? args.cached.data + row * args.cached.stride
                            : args.rest.data + row * args.rest.stride;
  const Word* __restrict__ from = reinterpret_cast<const Word*>(data);
  Word* __restrict__ to = reinterpret_cast<Word*>(args.out + i * args.row_bytes);
  const int64_t words = args.row_bytes / kBytes;
  int64_t before = 0;  // words from the beginning of the line to that of the row
  if (args.over_the_bus && !cached) {
    before = static_cast<int64_t>(reinterpret_cast<uint64_t>(data) % kBusLine) / kBytes;
  }
#pragma unroll 4
  for (int64_t word = group.lane - before; word < words; word += lanes) {
#if defined(PYG_SCALE_FAULT_WHOLE_LINES)
    to[word] = from[word];
#else
    if (word >= 0) to[word] = from[word];
#endif
  }
}

}  // namespace pyg_scale::cuda
