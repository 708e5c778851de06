// Launches the kernels of csr_sum.

#include "launch.cuh"
#include "sum.cuh"

namespace pyg_scale::cuda {
namespace {

template <typename T, int kCount>
cudaError_t run(const Sum& args, void* stream) {
  const Tiling tiling = tile((args.size + kCount - 1) / kCount);
  const int64_t blocks = blocks_for(args.graph.num_units(), tiling.lanes);
  const auto kernel = args.weight ? sum_kernel<T, kCount, true> : sum_kernel<T, kCount, false>;
  const cudaError_t done = launch(kernel, blocks, tiling.tiles, stream, args, tiling.lanes);
  if (done != cudaSuccess) return done;
  const Tiling single = tile(args.size);
  return launch(sum_fold_kernel<T>, blocks_for(args.graph.num_chunks(), single.lanes),
                single.tiles, stream, args, single.lanes);
}

}  // namespace
}  // namespace pyg_scale::cuda

extern "C" int pyg_scale_cuda_sum(const pyg_scale::cuda::Sum* args, int32_t type, void* stream) {
  using namespace pyg_scale::cuda;
  if (args->size == 0 || args->graph.num_rows == 0) return cudaSuccess;
  return visit(type, [&](auto one) {
    using T = decltype(one);
    // Numbers of one load have one weight.
    const bool wide = args->size / args->heads % kWide<T> == 0 && is_wide<T>(args->x);
    return wide ? run<T, kWide<T>>(*args, stream) : run<T, 1>(*args, stream);
  });
}
