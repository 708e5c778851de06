// Launches the kernel of csr_weight_grad.

#include "launch.cuh"
#include "weight_grad.cuh"

namespace pyg_scale::cuda {
namespace {

template <typename T, int kCount>
cudaError_t run(const WeightGrad& args, void* stream) {
  const int lanes = lanes_for((args.size / args.heads + kCount - 1) / kCount);
  const int64_t blocks = blocks_for(args.graph.num_units() * args.heads, lanes);
  return launch(weight_grad_kernel<T, kCount>, blocks, 1, stream, args, lanes);
}

}  // namespace
}  // namespace pyg_scale::cuda

extern "C" int pyg_scale_cuda_weight_grad(const pyg_scale::cuda::WeightGrad* args, int32_t type,
                                          void* stream) {
  using namespace pyg_scale::cuda;
  if (args->graph.num_edges == 0) return cudaSuccess;
  return visit(type, [&](auto one) {
    using T = decltype(one);
    const bool wide = args->size / args->heads % kWide<T> == 0 && is_wide<T>(args->x) &&
                      is_wide<T>(args->grad);
    return wide ? run<T, kWide<T>>(*args, stream) : run<T, 1>(*args, stream);
  });
}
