// How the kernels of a file are listed: PYG_SCALE_KERNEL(name, Args, function<...>) makes a kernel
// `name` that hands what Args hold, and the lanes of a group, to a function of device code. One
// list serves nvcc (*.fatbin in the library), NVRTC (at first use, of one type) and the emulator.
#pragma once

#include "device.cuh"

// The blocks that a multiprocessor has registers for, at least; a file may define other numbers.
#if !defined(PYG_SCALE_BLOCKS)
#define PYG_SCALE_BLOCKS 1
#endif

#if defined(__CUDACC__)
#define PYG_SCALE_KERNEL(name, Args, ...)                                       \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, PYG_SCALE_BLOCKS) \
      name(Args args, int lanes) {                                              \
    __VA_ARGS__(args, lanes);                                                   \
  }
#else
#define PYG_SCALE_KERNEL(name, Args, ...)                                                 \
  const ::emulator::Kernel emulated_##name(#name, [](void** given) {                      \
    __VA_ARGS__(*static_cast<const Args*>(given[0]), *static_cast<const int*>(given[1])); \
  });
#endif

// F(T) for every type of features, or for the one that is compiled alone.
#define PYG_SCALE_APPLY(F, T) F(T)
#if defined(PYG_SCALE_TYPE)
#define PYG_SCALE_FOR_TYPES(F) PYG_SCALE_APPLY(F, PYG_SCALE_TYPE)
#else
#define PYG_SCALE_FOR_TYPES(F) F(float) F(double) F(Bfloat16) F(Half)
#endif

// Kernels of a function whose last template argument is how many numbers a load brings. Their names
// end with its bytes: from one number of the type to kLoadBytes.
#define PYG_SCALE_OF_WIDTHS(name, T, Args, function, ...) \
  PYG_SCALE_WIDTHS_##T(PYG_SCALE_OF_BYTES, name, T, Args, function, __VA_ARGS__)
// Beside them kernels `name`_several, whose lanes have several loads of a row each.
#define PYG_SCALE_OF_LOADS(name, T, Args, function, ...)           \
  PYG_SCALE_OF_WIDTHS(name, T, Args, function, __VA_ARGS__, false) \
  PYG_SCALE_OF_WIDTHS(name##_several, T, Args, function, __VA_ARGS__, true)
#define PYG_SCALE_OF_BYTES(bytes, name, T, Args, function, ...) \
  PYG_SCALE_KERNEL(name##_##T##_##bytes, Args, function<__VA_ARGS__, bytes / sizeof(T)>)
#define PYG_SCALE_WIDTHS_double(F, ...) F(8, __VA_ARGS__) F(16, __VA_ARGS__)
#define PYG_SCALE_WIDTHS_float(F, ...) F(4, __VA_ARGS__) PYG_SCALE_WIDTHS_double(F, __VA_ARGS__)
#define PYG_SCALE_WIDTHS_Half(F, ...) F(2, __VA_ARGS__) PYG_SCALE_WIDTHS_float(F, __VA_ARGS__)
#define PYG_SCALE_WIDTHS_Bfloat16(F, ...) PYG_SCALE_WIDTHS_Half(F, __VA_ARGS__)
