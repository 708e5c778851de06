// The kernel of candidates.

#include "candidates.cuh"
#include "kernels.cuh"

namespace pyg_scale::cuda {

PYG_SCALE_KERNEL(candidates, ChooseCandidates, candidates_kernel)

}  // namespace pyg_scale::cuda
