// The kernels of csr_weight_grad.

#include "kernels.cuh"
#include "weight_grad.cuh"

namespace pyg_scale::cuda {

#define PYG_SCALE_LIST(T) PYG_SCALE_OF_WIDTHS(weight_grad, T, WeightGrad, weight_grad_kernel, T)

PYG_SCALE_FOR_TYPES(PYG_SCALE_LIST)

}  // namespace pyg_scale::cuda
