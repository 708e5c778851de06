// The CUDA driver's interface on top of the emulator: what csrc/cuda/driver.cpp finds instead of
// libcuda.so.1.
#pragma once

#include "../cuda/abi.h"

namespace emulator {

// The one stream that kernels may be launched on. Its device is not 0, which one gets by mistake.
inline const pyg_scale::cuda::Stream kStream{reinterpret_cast<void*>(0x5717), 1};

}  // namespace emulator
