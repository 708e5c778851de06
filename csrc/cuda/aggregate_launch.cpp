// Launches the kernels of csr_sum, csr_extreme, csr_extreme_grad and csr_weight_grad.

#include "launch.h"

namespace pyg_scale::cuda {
namespace {

// Numbers of one load have one weight, so they are of one head.
template <typename Args>
Launches of_rows(const char* file, const Args& args, const Matrix& rows, Type type,
                 const Stream& stream) {
  const bool wide = args.size / args.heads % wide_count(type) == 0 && is_wide(rows, type);
  return Launches(file, type, stream, wide);
}

template <typename Args>
Grid units(const Launches& launches, const Args& args) {
  return over_loads(args.graph.num_units(), ceil_div(args.size, launches.count()));
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
  launches.over_widths(args->weight ? "sum_weighted" : "sum", units(launches, *args), *args);
  launches.add("sum_fold", chunks(*args), *args);
  return launches.result();
}

extern "C" int pyg_scale_cuda_extreme(const Extreme* args, int32_t type, Stream stream) {
  if (nothing(*args)) return 0;
  Launches launches = of_rows("extreme", *args, args->x, static_cast<Type>(type), stream);
  launches.over_widths("extreme", units(launches, *args), *args);
  launches.add("extreme_fold", chunks(*args), *args);
  return launches.result();
}

extern "C" int pyg_scale_cuda_extreme_grad(const ExtremeGrad* args, int32_t type, Stream stream) {
  if (nothing(*args)) return 0;
  Launches launches = of_rows("extreme", *args, args->grad, static_cast<Type>(type), stream);
  launches.over_widths("extreme_grad", units(launches, *args), *args);
  launches.fold(static_cast<Type>(type), args->graph, args->size, args->out, args->partial);
  return launches.result();
}

extern "C" int pyg_scale_cuda_weight_grad(const WeightGrad* args, int32_t type, Stream stream) {
  if (args->graph.num_edges == 0) return 0;
  const Type of = static_cast<Type>(type);
  const int64_t channels = args->size / args->heads;
  const bool wide =
      channels % wide_count(of) == 0 && is_wide(args->x, of) && is_wide(args->grad, of);
  Launches launches("weight_grad", of, stream, wide);
  const int lanes = lanes_for(ceil_div(channels, launches.count()));
  launches.over_widths("weight_grad", grid_of(args->graph.num_units() * args->heads, lanes), *args);
  return launches.result();
}
