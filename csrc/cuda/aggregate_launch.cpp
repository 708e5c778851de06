// Launches the kernels of csr_sum, csr_extreme, csr_extreme_grad and csr_weight_grad.

#include "launch.h"

namespace pyg_scale::cuda {
namespace {

// Numbers of one load have one weight, so they are of one head.
template <typename Args>
Launches of_rows(const char* file, const Args& args, const Matrix& rows, Type type,
                 const Stream& stream) {
  return Launches(file, type, stream, widest(args.size / args.heads, type, {rows}));
}

// Launches a kernel over the rows, each lane with one load of them or, if there are more loads than
// lanes, with up to as many as make `held` numbers.
template <typename Args>
void over_rows(Launches& launches, const std::string& kernel, const Args& args, int held) {
  const int64_t count = launches.count(), loads = ceil_div(args.size, count);
  const Grid grid =
      over_loads(args.graph.num_units(), loads, loads_held(static_cast<int>(count), held));
  launches.over_widths(loads > kWarp ? kernel + "_several" : kernel, grid, args);
}

template <typename Args>
Grid chunks(const Args& args) {
  return over_loads(args.graph.num_chunks(), args.size);
}

template <typename Args>
bool nothing(const Args& args) {
  return args.size == 0 || args.graph.num_rows == 0;
}

}  // namespace
}  // namespace pyg_scale::cuda

using namespace pyg_scale::cuda;

extern "C" int pyg_scale_cuda_sum(const Sum* args, int32_t type, Stream stream) {
  if (nothing(*args)) return 0;
  Launches launches = of_rows("sum", *args, args->x, static_cast<Type>(type), stream);
  over_rows(launches, args->weight ? "sum_weighted" : "sum", *args, kSumsHeld);
  launches.add("sum_fold", chunks(*args), *args);
  return launches.result();
}

extern "C" int pyg_scale_cuda_extreme(const Extreme* args, int32_t type, Stream stream) {
  if (nothing(*args)) return 0;
  Launches launches = of_rows("extreme", *args, args->x, static_cast<Type>(type), stream);
  over_rows(launches, "extreme", *args, kExtremesHeld);
  launches.add("extreme_fold", chunks(*args), *args);
  return launches.result();
}

extern "C" int pyg_scale_cuda_extreme_grad(const ExtremeGrad* args, int32_t type, Stream stream) {
  if (nothing(*args)) return 0;
  Launches launches = of_rows("extreme", *args, args->grad, static_cast<Type>(type), stream);
  over_rows(launches, "extreme_grad", *args, kSumsHeld);
  launches.fold(static_cast<Type>(type), args->graph, args->size, args->out, args->partial);
  return launches.result();
}

extern "C" int pyg_scale_cuda_weight_grad(const WeightGrad* args, int32_t type, Stream stream) {
  if (args->graph.num_edges == 0) return 0;
  const Type of = static_cast<Type>(type);
  const int64_t channels = args->size / args->heads;
  Launches launches("weight_grad", of, stream, widest(channels, of, {args->x, args->grad}));
  const int lanes = lanes_for(ceil_div(channels, launches.count()));
  launches.over_widths("weight_grad", grid_of(args->graph.num_units() * args->heads, lanes), *args);
  return launches.result();
}
