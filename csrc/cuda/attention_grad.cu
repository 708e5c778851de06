// Launches the backward kernels of attention.

#include "attention_grad.cuh"
#include "launch.cuh"
#include "sum.cuh"

namespace pyg_scale::cuda {
namespace {

// Launches in turn; after a failure none.
class Launches {
 public:
  explicit Launches(void* stream) : stream_(stream) {}

  template <typename... Parameters, typename... Args>
  void add(void (*kernel)(Parameters...), int64_t blocks, int64_t tiles, const Args&... args) {
    if (result_ == cudaSuccess) result_ = launch(kernel, blocks, tiles, stream_, args...);
  }
  // Adds up what long rows of a graph came to.
  template <typename T>
  void fold(const Graph& graph, int64_t size, void* out, void* partial) {
    if (size == 0) return;
    const Sum args{graph, {}, nullptr, 1, size, false, out, partial};
    const Tiling tiling = tile(size);
    add(sum_fold_kernel<T>, blocks_for(graph.num_chunks(), tiling.lanes), tiling.tiles, args,
        tiling.lanes);
  }
  cudaError_t result() const { return result_; }

 private:
  void* stream_;
  cudaError_t result_ = cudaSuccess;
};

template <typename T, Attention kKind, int kCount>
cudaError_t run(const AttentionBackward& args, void* stream) {
  using A = AccumulatorOf<T>;
  const AttentionInput& in = args.in;
  const int64_t size = in.heads * in.channels;
  const int lanes = lanes_for((in.channels + kCount - 1) / kCount);
  const int64_t of_tile = static_cast<int64_t>(lanes) * kCount * kSteps<kCount>;
  const int64_t tiles = in.channels ? (in.channels + of_tile - 1) / of_tile : 1;
  Launches launches(stream);
  const int mean_lanes = lanes_for(in.channels);
  launches.add(attention_mean_kernel<T>, blocks_for(args.graph.num_rows * in.heads, mean_lanes), 1,
               args, mean_lanes);
  const int64_t of_sources = blocks_for(args.transposed.num_units() * in.heads, lanes);
  if constexpr (kKind == Attention::kGat) {
    launches.add(gat_grad_kernel<T, kCount>, of_sources, tiles, args, lanes);
    launches.fold<A>(args.transposed, in.heads, args.source_grad, args.partial_source);
    launches.fold<T>(args.transposed, size, args.value_grad, args.partial_value);
    return launches.result();
  }
  const bool adds_att = kKind == Attention::kGatv2;
  const int64_t workers = adds_att ? num_workers(args.graph) : args.graph.num_units();
  launches.add(destination_grad_kernel<T, kKind, kCount>, blocks_for(workers * in.heads, lanes),
               tiles, args, workers, lanes);
  launches.fold<T>(args.graph, size, args.query_grad, args.partial);
  if constexpr (kKind == Attention::kGatv2) {
    if (size) {
      const A* of_workers = static_cast<const A*>(args.partial_att);
      A* folded = static_cast<A*>(args.partial_att) + workers * size;
      const int64_t each = (workers + kAttSegments - 1) / kAttSegments;
      const int64_t segments = each ? (workers + each - 1) / each : 0;
      launches.add(sum_rows_kernel<A>, blocks_for(segments * size, 1), 1, of_workers, workers, size,
                   each, folded);
      launches.add(sum_rows_kernel<A>, blocks_for(size, 1), 1, static_cast<const A*>(folded),
                   segments, size, kAttSegments, static_cast<A*>(args.att_grad));
    }
    launches.add(source_grad_kernel<T, kCount>, of_sources, tiles, args, lanes);
    launches.fold<T>(args.transposed, size, args.value_grad, args.partial_value);
  }
  return launches.result();
}

template <typename T, Attention kKind>
cudaError_t choose(const AttentionBackward& args, void* stream) {
  const AttentionInput& in = args.in;
  const bool wide = in.channels % kWide<T> == 0 && is_wide<T>(in.value) && is_wide<T>(in.key) &&
                    is_wide<T>(in.query) && is_wide<T>(in.edge) && is_wide<T>(args.out_grad);
  return wide ? run<T, kKind, kWide<T>>(args, stream) : run<T, kKind, 1>(args, stream);
}

}  // namespace
}  // namespace pyg_scale::cuda

extern "C" int pyg_scale_cuda_attention_grad(const pyg_scale::cuda::AttentionBackward* args,
                                             int32_t kind, int32_t type, void* stream) {
  using namespace pyg_scale::cuda;
  if (args->in.heads == 0) return cudaSuccess;
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
