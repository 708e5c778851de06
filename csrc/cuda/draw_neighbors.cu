// Launches the kernels of draw_neighbors.

#include "draw_neighbors.cuh"
#include "launch.cuh"

extern "C" int pyg_scale_cuda_draw_neighbors(const pyg_scale::cuda::DrawNeighbors* args,
                                             void* stream) {
  using namespace pyg_scale::cuda;
  if (args->num_edges == 0) return cudaSuccess;
  const cudaError_t drawn =
      launch(draw_positions_kernel, blocks_for(args->count, 1), 1, stream, *args);
  if (drawn != cudaSuccess) return drawn;
  return launch(read_neighbors_kernel, blocks_for(args->num_edges, 1), 1, stream, *args);
}
