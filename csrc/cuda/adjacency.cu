// The kernels of csr_group_padded and csr_transpose_few.

#include "adjacency.cuh"
#include "kernels.cuh"

namespace pyg_scale::cuda {

PYG_SCALE_KERNEL(group_zero, Grouping, group_zero_kernel)
PYG_SCALE_KERNEL(group_count, Grouping, group_count_kernel)
PYG_SCALE_KERNEL(group_scan, Grouping, group_scan_kernel)
PYG_SCALE_KERNEL(group_place, Grouping, group_place_kernel)
PYG_SCALE_KERNEL(group_order, Grouping, group_order_kernel)

}  // namespace pyg_scale::cuda
