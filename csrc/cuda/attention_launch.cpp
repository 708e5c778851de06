// Launches the kernels of attention, forward and backward.

#include "launch.h"

namespace pyg_scale::cuda {
namespace {

// Launches a kernel whose groups share the channels of a head.
template <typename Args>
void over_channels(Launches& launches, const std::string& kernel, int64_t groups,
                   const Args& args) {
  const int64_t count = launches.count(), loads = ceil_div(args.in.channels, count);
  const int lanes = lanes_for(loads);
  const int64_t held = loads_held(static_cast<int>(count), kChannelsHeld);
  const bool several = loads > kWarp;
  launches.over_widths(several ? kernel + "_several" : kernel,
                       grid_of(groups, lanes, several ? ceil_div(loads, lanes * held) : 1), args);
}

const char* name_of(Attention kind, const char* const (&names)[3]) {
  return names[static_cast<int32_t>(kind)];
}

// The gradient of the attention vector from what the workers added up, in two steps.
void add_segments(Launches& launches, const AttentionBackward& args, Type type) {
  const int64_t size = args.in.heads * args.in.channels, workers = args.workers;
  if (size == 0) return;
  char* folded =
      static_cast<char*>(args.partial_att) + workers * size * bytes_of(accumulator_of(type));
  const int64_t each = ceil_div(workers, kAttSegments);
  const int64_t segments = each ? ceil_div(workers, each) : 0;
  launches.add("sum_segments", grid_of(segments * size, 1),
               SumSegments{args.partial_att, workers, size, each, folded});
  launches.add("sum_segments", grid_of(size, 1),
               SumSegments{folded, segments, size, kAttSegments, args.att_grad});
}

}  // namespace
}  // namespace pyg_scale::cuda

using namespace pyg_scale::cuda;

extern "C" int pyg_scale_cuda_attention(const AttentionForward* args, int32_t kind, int32_t type,
                                        Stream stream) {
  const Graph& graph = args->graph;
  const AttentionInput& in = args->in;
  if (graph.num_rows == 0 || in.heads == 0) return 0;
  const Type of = static_cast<Type>(type);
  Launches launches("attention", of, stream,
                    widest(in.channels, of, {in.value, in.key, in.query, in.edge}));
  over_channels(
      launches,
      name_of(static_cast<Attention>(kind), {"attention_gat", "attention_gatv2", "attention_dot"}),
      graph.num_units() * in.heads, *args);
  launches.add("attention_fold",
               over_loads(graph.num_chunks() * in.heads, in.channels ? in.channels : 1), *args);
  if (args->weights) {
    launches.add("attention_weights", grid_of(graph.num_edges * in.heads, 1), *args);
  }
  return launches.result();
}

extern "C" int pyg_scale_cuda_attention_grad(const AttentionBackward* given, int32_t kind_number,
                                             int32_t type, Stream stream) {
  AttentionBackward args = *given;
  const Graph &graph = args.graph, &transposed = args.transposed;
  const AttentionInput& in = args.in;
  if (in.heads == 0) return 0;
  const Attention kind = static_cast<Attention>(kind_number);
  const Type of = static_cast<Type>(type);
  const int64_t size = in.heads * in.channels;
  args.workers = kind == Attention::kGatv2 ? num_workers(graph, size) : graph.num_units();
  const int64_t count =
      widest(in.channels, of, {in.value, in.key, in.query, in.edge, args.out_grad});
  Launches launches("attention_grad", of, stream, count);
  launches.add("attention_mean", grid_of(graph.num_rows * in.heads, lanes_for(in.channels)), args);
  const int64_t sources = transposed.num_units() * in.heads;
  if (kind == Attention::kGat) {
    over_channels(launches, "gat_grad", sources, args);
    launches.fold(accumulator_of(of), transposed, in.heads, args.source_grad, args.partial_source);
    launches.fold(of, transposed, size, args.value_grad, args.partial_value);
    return launches.result();
  }
  over_channels(launches, kind == Attention::kGatv2 ? "gatv2_grad" : "dot_grad",
                args.workers * in.heads, args);
  launches.fold(of, graph, size, args.query_grad, args.partial);
  if (kind == Attention::kGatv2) {
    add_segments(launches, args, of);
    over_channels(launches, "source_grad", sources, args);
    launches.fold(of, transposed, size, args.value_grad, args.partial_value);
  }
  return launches.result();
}
