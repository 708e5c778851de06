// Launching: grids, errors, and the choice of a kernel's types.
#pragma once

#include "abi.h"
#include "device.cuh"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

namespace pyg_scale::cuda {

// Launches kernel(args...) with blocks of kBlockThreads; a grid of nothing is no launch.
template <typename... Parameters, typename... Args>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int64_t tiles, void* stream,
                   const Args&... args) {
  if (blocks == 0 || tiles == 0) return cudaSuccess;
  if (blocks > 0x7fffffff || tiles > 0xffff) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles));
#if defined(__CUDACC__)
  kernel<<<grid, dim3(kBlockThreads), 0, static_cast<cudaStream_t>(stream)>>>(args...);
  return cudaGetLastError();
#else
  (void)stream;
  return emulator::run(grid, dim3(kBlockThreads), [&] { kernel(args...); });
#endif
}

// How many lanes share one head of `count` loads: the least power of two, 32 at most.
inline int lanes_for(int64_t count) {
  int lanes = 1;
  while (lanes < count && lanes < kWarp) lanes *= 2;
  return lanes;
}

// How `count` columns are shared by the lanes of a group.
struct Tiling {
  int lanes;      // of a group
  int64_t tiles;  // how many groups share a row
};

inline Tiling tile(int64_t count) {
  if (count <= kWarp) {
    return {lanes_for(count), 1};
  }
  Tiling best{0, 0};
  for (int lanes = kWarp; lanes >= 8; lanes /= 2) {  // the fewest idle lanes
    const int64_t tiles = (count + lanes - 1) / lanes;
    if (!best.lanes || tiles * lanes < best.tiles * best.lanes) best = {lanes, tiles};
  }
  return best;
}

// Blocks for `groups` groups of `lanes` lanes.
inline int64_t blocks_for(int64_t groups, int lanes) {
  const int64_t in_block = kBlockThreads / lanes;
  return (groups + in_block - 1) / in_block;
}

// Whether rows can be read in wide loads.
template <typename T>
bool is_wide(const Matrix& matrix) {
  const bool aligned = reinterpret_cast<uintptr_t>(matrix.data) % kLoadBytes == 0;
  return !matrix.data || (aligned && matrix.stride % kWide<T> == 0);
}

// Calls f with a number of the type.
template <typename F>
cudaError_t visit(int32_t type, const F& f) {
  switch (static_cast<Type>(type)) {
    case Type::kFloat: return f(float{});
#if !defined(PYG_SCALE_FLOAT_ALONE)
    case Type::kDouble: return f(double{});
    case Type::kBfloat16: return f(Bfloat16{});
    case Type::kHalf: return f(Half{});
#else
    default: break;
#endif
  }
  return cudaErrorInvalidValue;
}

// A number that a kernel is chosen by.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

}  // namespace pyg_scale::cuda
