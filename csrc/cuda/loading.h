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

}  // namespace pyg_scale::cuda

extern "C" {
int pyg_scale_cuda_gather_cached(const pyg_scale::cuda::GatherCached* args, void* stream);
// Memory of the host that the device reads: locks and maps it, gives it back, and finds where the
// device has it (not at all: an error).
int pyg_scale_cuda_map_host(void* data, int64_t bytes);
int pyg_scale_cuda_unmap_host(void* data);
int pyg_scale_cuda_mapped(const void* data, const void** there);
}
