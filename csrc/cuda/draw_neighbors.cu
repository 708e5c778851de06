// The kernel of draw_neighbors.

#include "draw_neighbors.cuh"
#include "kernels.cuh"

namespace pyg_scale::cuda {

PYG_SCALE_KERNEL(draw_neighbors, DrawNeighbors, draw_neighbors_kernel)

}  // namespace pyg_scale::cuda
