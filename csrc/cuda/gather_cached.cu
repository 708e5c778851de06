// The kernels of gather_cached.

#include "gather_cached.cuh"
#include "kernels.cuh"

namespace pyg_scale::cuda {

PYG_SCALE_KERNEL(gather_cached_1, GatherCached, gather_cached_kernel<1>)
PYG_SCALE_KERNEL(gather_cached_2, GatherCached, gather_cached_kernel<2>)
PYG_SCALE_KERNEL(gather_cached_4, GatherCached, gather_cached_kernel<4>)
PYG_SCALE_KERNEL(gather_cached_8, GatherCached, gather_cached_kernel<8>)
PYG_SCALE_KERNEL(gather_cached_16, GatherCached, gather_cached_kernel<16>)

}  // namespace pyg_scale::cuda
