// The kernel of csr_group_padded and csr_transpose_few.

#include "adjacency.cuh"
#include "kernels.cuh"

namespace pyg_scale::cuda {

PYG_SCALE_KERNEL(group, Grouping, group_kernel)

}  // namespace pyg_scale::cuda
