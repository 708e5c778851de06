// What the host asks of the device besides kernels.

#include "launch.cuh"

extern "C" const char* pyg_scale_cuda_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

// The CUDA runtime in this library has a device of its own for each thread: torch's is not seen.
extern "C" int pyg_scale_cuda_set_device(int device) { return cudaSetDevice(device); }
