// The CUDA driver: found when the first kernel is launched, never linked, so that a library with
// this code loads everywhere.
//
// Kernels come in modules, one for a file of kernels: what nvcc compiled is in the library, what
// NVRTC compiles is asked for once (see pyg_scale/ops/cuda_modules.py) for each type of features.
// Functions return 0, or a code that pyg_scale_cuda_error explains.
#pragma once

#include <cstddef>
#include <string>

#include "abi.h"

#define PYG_SCALE_VISIBLE __attribute__((visibility("default")))

namespace pyg_scale::cuda {

// The file of a kernel, such as "sum", and the one type that it is compiled for; "": all types.
struct Source {
  const char* file;
  const char* type;
};

// Launches kernel(args, lanes) with blocks of kBlockThreads. An empty grid is not launched.
int launch(const Stream& stream, const Source& source, const std::string& kernel, int64_t blocks,
           int64_t tiles, const void* args, int lanes);

// Launches kernel(args) in one grid of at most `most` blocks, which all run at the same time: they
// may wait for each other (wait_for_grid). The blocks take no more than half of the device, so that
// other streams' kernels, such as NCCL's, need not end first.
int launch_together(const Stream& stream, const Source& source, const std::string& kernel,
                    int64_t most, const void* args);

// Fills memory of the device with zeros, in the order of the stream.
int clear(const Stream& stream, int32_t* data, int64_t count);

// Memory of the host that every device may read. While a stream records a graph, the driver may
// refuse to unmap it. That is no error, but `done` is false.
int map_host(int32_t device, void* data, size_t bytes);
int unmap_host(int32_t device, void* data, bool* done);
int mapped(int32_t device, const void* data, const void** there);

// A module that the library holds, as the driver loads it.
struct Image {
  const char* file;
  const void* data;
};

}  // namespace pyg_scale::cuda

extern "C" {
// All images, ended by one without a file. Made by pyg-scale build.
extern const pyg_scale::cuda::Image pyg_scale_cuda_images[];

// Finds the module of a source for a compute capability, 90 for 9.0. Returns 0 for the module that
// the library holds, 1 if the answer is a module, or 2 if it is the reason why there is none.
using pyg_scale_cuda_compile = int (*)(const char* file, const char* type, int capability,
                                       void* answer);
PYG_SCALE_VISIBLE void pyg_scale_cuda_compile_with(pyg_scale_cuda_compile compile);
PYG_SCALE_VISIBLE void pyg_scale_cuda_answer(void* answer, const void* bytes, size_t size);

// Where functions of the driver are found instead of in libcuda.so.1.
void pyg_scale_cuda_find_with(void* (*find)(const char* name));
}
