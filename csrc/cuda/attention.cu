// Launches the forward kernels of attention.

#include "attention.cuh"
#include "launch.cuh"

namespace pyg_scale::cuda {
namespace {

template <typename T, Attention kKind, int kCount>
cudaError_t run(const AttentionForward& args, void* stream) {
  using A = AccumulatorOf<T>;
  const AttentionInput& in = args.in;
  const int lanes = lanes_for((in.channels + kCount - 1) / kCount);
  const int64_t of_tile = static_cast<int64_t>(lanes) * kCount * kSteps<kCount>;
  const int64_t tiles = in.channels ? (in.channels + of_tile - 1) / of_tile : 1;
  cudaError_t done =
      launch(attention_kernel<T, kKind, kCount>,
             blocks_for(args.graph.num_units() * in.heads, lanes), tiles, stream, args, lanes);
  if (done != cudaSuccess) return done;
  const Tiling single = tile(in.channels ? in.channels : 1);
  done = launch(attention_fold_kernel<T>,
                blocks_for(args.graph.num_chunks() * in.heads, single.lanes), single.tiles, stream,
                args, single.lanes);
  if (done != cudaSuccess || !args.weights) return done;
  return launch(attention_weights_kernel<A>, blocks_for(args.graph.num_edges * in.heads, 1), 1,
                stream, args);
}

template <typename T, Attention kKind>
cudaError_t choose(const AttentionForward& args, void* stream) {
  const AttentionInput& in = args.in;
  const bool wide = in.channels % kWide<T> == 0 && is_wide<T>(in.value) && is_wide<T>(in.key) &&
                    is_wide<T>(in.query) && is_wide<T>(in.edge);
  return wide ? run<T, kKind, kWide<T>>(args, stream) : run<T, kKind, 1>(args, stream);
}

}  // namespace
}  // namespace pyg_scale::cuda

extern "C" int pyg_scale_cuda_attention(const pyg_scale::cuda::AttentionForward* args, int32_t kind,
                                        int32_t type, void* stream) {
  using namespace pyg_scale::cuda;
  if (args->graph.num_rows == 0 || args->in.heads == 0) return cudaSuccess;
  return visit(type, [&](auto one) {
    using T = decltype(one);
    switch (static_cast<Attention>(kind)) {
      case Attention::kGat: return choose<T, Attention::kGat>(*args, stream);
      case Attention::kGatv2: return choose<T, Attention::kGatv2>(*args, stream);
      case Attention::kDot: return choose<T, Attention::kDot>(*args, stream);
    }
    return cudaErrorInvalidValue;
  });
}
