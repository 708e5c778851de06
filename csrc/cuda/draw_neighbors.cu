// The kernels of draw_neighbors.

#include "draw_neighbors.cuh"
#include "kernels.cuh"

namespace pyg_scale::cuda {

PYG_SCALE_KERNEL(draw_positions, DrawNeighbors, draw_positions_kernel)
PYG_SCALE_KERNEL(read_neighbors, DrawNeighbors, read_neighbors_kernel)

}  // namespace pyg_scale::cuda
