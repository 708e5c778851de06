// The kernels of csr_sum.

#include "kernels.cuh"
#include "sum.cuh"

namespace pyg_scale::cuda {

#define PYG_SCALE_LIST(T)                                       \
  PYG_SCALE_OF_LOADS(sum, T, Sum, sum_kernel, T, false)         \
  PYG_SCALE_OF_LOADS(sum_weighted, T, Sum, sum_kernel, T, true) \
  PYG_SCALE_KERNEL(sum_fold_##T, Sum, sum_fold_kernel<T>)

PYG_SCALE_FOR_TYPES(PYG_SCALE_LIST)

}  // namespace pyg_scale::cuda
