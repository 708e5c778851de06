// Launches the kernels that make batches, and lets devices read memory of the host.

#include "launch.h"
#include "loading.h"

namespace pyg_scale::cuda {
namespace {

// Whether rows can be copied in words of so many bytes.
bool fits(const GatherCached& args, int64_t bytes) {
  const auto aligned = [&](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
  };
  const auto rows = [&](const ByteRows& of) {
    return !of.count || (aligned(of.data) && of.stride % bytes == 0);
  };
  return args.row_bytes % bytes == 0 && aligned(args.out) && rows(args.cached) && rows(args.rest);
}

template <typename Args>
int run(const Stream& stream, const char* file, const std::string& kernel, const Grid& grid,
        const Args& args) {
  return launch(stream, {file, ""}, kernel, grid.blocks, grid.tiles, &args, grid.lanes);
}

}  // namespace
}  // namespace pyg_scale::cuda

using namespace pyg_scale::cuda;

extern "C" int pyg_scale_cuda_draw_neighbors(const DrawNeighbors* args, Stream stream) {
  const int64_t warps = args->first[args->count];
  return warps ? run(stream, "draw_neighbors", "draw_neighbors", grid_of(warps, kWarp), *args) : 0;
}

extern "C" int pyg_scale_cuda_candidates(const ChooseCandidates* args, Stream stream) {
  const int64_t warps = args->first[args->count];
  return warps ? run(stream, "candidates", "candidates", grid_of(warps, kWarp), *args) : 0;
}

extern "C" int pyg_scale_cuda_first_places(const FirstPlaces* args, Stream stream) {
  if (args->count == 0) return 0;
  int result = 0;
  const auto next = [&](const char* kernel, int64_t threads) {
    if (!result) result = run(stream, "first_places", kernel, grid_of(threads, 1), *args);
  };
  next("first_places_clear", args->slots);
  next("first_places_find", args->count);
  next("first_places_read", args->count);
  return result;
}

extern "C" int pyg_scale_cuda_gather_cached(const GatherCached* args, Stream stream) {
  if (args->count == 0 || args->row_bytes == 0) return 0;
  int64_t bytes = kLoadBytes;
  while (!fits(*args, bytes)) bytes /= 2;
  const Grid grid = grid_of(args->count, lanes_for(args->row_bytes / bytes));
  return run(stream, "gather_cached", "gather_cached_" + std::to_string(bytes), grid, *args);
}

extern "C" int pyg_scale_cuda_map_host(int32_t device, void* data, int64_t bytes) {
  return map_host(device, data, static_cast<size_t>(bytes));
}

extern "C" int pyg_scale_cuda_unmap_host(int32_t device, void* data, bool* done) {
  return unmap_host(device, data, done);
}

extern "C" int pyg_scale_cuda_mapped(int32_t device, const void* data, const void** there) {
  return mapped(device, data, there);
}
