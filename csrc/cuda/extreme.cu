// Launches the kernels of csr_extreme and csr_extreme_grad.

#include "extreme.cuh"
#include "launch.cuh"
#include "sum.cuh"

namespace pyg_scale::cuda {
namespace {

template <typename T, int kCount>
cudaError_t run(const Extreme& args, void* stream) {
  const Tiling tiling = tile((args.size + kCount - 1) / kCount), single = tile(args.size);
  const int64_t blocks = blocks_for(args.graph.num_units(), tiling.lanes);
  const cudaError_t done =
      launch(extreme_kernel<T, kCount>, blocks, tiling.tiles, stream, args, tiling.lanes);
  if (done != cudaSuccess) return done;
  return launch(extreme_fold_kernel<T>, blocks_for(args.graph.num_chunks(), single.lanes),
                single.tiles, stream, args, single.lanes);
}

template <typename T, int kCount>
cudaError_t run(const ExtremeGrad& args, void* stream) {
  const Tiling tiling = tile((args.size + kCount - 1) / kCount), single = tile(args.size);
  const int64_t blocks = blocks_for(args.graph.num_units(), tiling.lanes);
  const cudaError_t done =
      launch(extreme_grad_kernel<T, kCount>, blocks, tiling.tiles, stream, args, tiling.lanes);
  if (done != cudaSuccess) return done;
  const Sum fold{args.graph, {}, nullptr, 1, args.size, false, args.out, args.partial};
  return launch(sum_fold_kernel<T>, blocks_for(args.graph.num_chunks(), single.lanes),
                single.tiles, stream, fold, single.lanes);
}

template <typename Args>
cudaError_t choose(const Args& args, const Matrix& rows, int32_t type, void* stream) {
  if (args.size == 0 || args.graph.num_rows == 0) return cudaSuccess;
  return visit(type, [&](auto one) {
    using T = decltype(one);
    const bool wide = args.size / args.heads % kWide<T> == 0 && is_wide<T>(rows);
    return wide ? run<T, kWide<T>>(args, stream) : run<T, 1>(args, stream);
  });
}

}  // namespace
}  // namespace pyg_scale::cuda

extern "C" int pyg_scale_cuda_extreme(const pyg_scale::cuda::Extreme* args, int32_t type,
                                      void* stream) {
  return pyg_scale::cuda::choose(*args, args->x, type, stream);
}

extern "C" int pyg_scale_cuda_extreme_grad(const pyg_scale::cuda::ExtremeGrad* args, int32_t type,
                                           void* stream) {
  return pyg_scale::cuda::choose(*args, args->grad, type, stream);
}
