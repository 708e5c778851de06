// The kernels of csr_extreme and csr_extreme_grad.

#include "extreme.cuh"
#include "kernels.cuh"

namespace pyg_scale::cuda {

#define PYG_SCALE_LIST(T)                                             \
  PYG_SCALE_OF_LOADS(extreme, T, Extreme, extreme_kernel, T)          \
  PYG_SCALE_KERNEL(extreme_fold_##T, Extreme, extreme_fold_kernel<T>) \
  PYG_SCALE_OF_LOADS(extreme_grad, T, ExtremeGrad, extreme_grad_kernel, T)

PYG_SCALE_FOR_TYPES(PYG_SCALE_LIST)

}  // namespace pyg_scale::cuda
