// What device code is written in: numbers, loads, collectives of a group of lanes.
//
// No file of device code includes a header of torch's. So nvcc compiles it beside any torch, and
// NVRTC without any header. A C++ compiler compiles it for the emulator, which supplies CUDA's own
// names (csrc/emulator/emulator.h).
#pragma once

#include "abi.h"

#if !defined(__CUDACC__)
#include "../emulator/emulator.h"
#endif

#define PYG_SCALE_DEVICE __device__ __forceinline__

namespace pyg_scale::cuda {

// Ends the kernel with an error: an index that leads out of its tensor is never followed.
PYG_SCALE_DEVICE void stop_unless(bool holds) {
#if defined(PYG_SCALE_FAULT_NO_CHECKS)
  (void)holds;
#else
  if (!holds) __trap();
#endif
}

// Numbers ####################################################################################

struct Bfloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

PYG_SCALE_DEVICE uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

PYG_SCALE_DEVICE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

PYG_SCALE_DEVICE float widen(float x) { return x; }
PYG_SCALE_DEVICE double widen(double x) { return x; }
PYG_SCALE_DEVICE float widen(Bfloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
PYG_SCALE_DEVICE float widen(Half x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
  return out;
#else
  // 2^112 moves the exponent, of subnormal numbers too.
  const float scaled = float_of((x.bits & 0x7fffu) << 13) * float_of(0x77800000u);
  const uint32_t special = (x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
  return float_of(bits_of(scaled) | (x.bits & 0x8000u) << 16 | special);
#endif
}

template <typename T>
struct Number {  // float and double
  using Accumulator = T;
  static PYG_SCALE_DEVICE T narrow(T x) { return x; }
};

template <>
struct Number<Bfloat16> {
  using Accumulator = float;
  static PYG_SCALE_DEVICE Bfloat16 narrow(float x) {  // to the nearest, ties to even
    const uint32_t bits = bits_of(x);
    if (x != x) return {static_cast<uint16_t>(0x7fc0u | (bits >> 16 & 0x8000u))};
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
  }
};

template <>
struct Number<Half> {
  using Accumulator = float;
  static PYG_SCALE_DEVICE Half narrow(float x) {
#if defined(__CUDA_ARCH__)
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return {bits};
#else
    const uint32_t all = bits_of(x), sign = all >> 16 & 0x8000u, size = all & 0x7fffffffu;
    if (size > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (size >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to infinity
    if (size < 0x38800000u) {  // below the smallest normal one: counted in units of 2^-24
      const float units = float_of(size) * 16777216.0f + 8388608.0f;  // rounds to whole numbers
      return {static_cast<uint16_t>(sign | (bits_of(units) - 0x4b000000u))};
    }
    const uint32_t rounded = size + 0xfffu + (size >> 13 & 1u);
    return {static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
#endif
  }
};

template <typename T>
using AccumulatorOf = typename Number<T>::Accumulator;

PYG_SCALE_DEVICE float exponential(float x) { return ::expf(x); }
PYG_SCALE_DEVICE double exponential(double x) { return ::exp(x); }
PYG_SCALE_DEVICE float logarithm(float x) { return ::logf(x); }
PYG_SCALE_DEVICE double logarithm(double x) { return ::log(x); }

template <typename A>
PYG_SCALE_DEVICE A minus_infinity() {
  return static_cast<A>(-float_of(0x7f800000u));
}

// Loads ######################################################################################

// A few numbers side by side, aligned as a whole.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

template <int kCount, typename T>
PYG_SCALE_DEVICE Pack<T, kCount> load(const T* from) {
#if !defined(__CUDACC__)
  ++emulator::counts.loads;
  emulator::counts.bytes += static_cast<int64_t>(sizeof(Pack<T, kCount>));
#endif
  return *reinterpret_cast<const Pack<T, kCount>*>(from);
}

// to[0 ... kCount) = from, in the type of the features.
template <int kCount, typename T>
PYG_SCALE_DEVICE void store(T* to, const AccumulatorOf<T>* from, AccumulatorOf<T> factor) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.values[i] = Number<T>::narrow(from[i] * factor);
  *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
}

// Lanes ######################################################################################

constexpr uint32_t kAllLanes = 0xffffffffu;

// A group of 1, 2, 4, ... 32 neighbouring lanes of a warp that work on the same thing. Collectives
// name all lanes of the warp, as with a mask that is not constant the compiler first asks the
// hardware who is there: so all of a warp go through the same loops (see most_of_warp).
struct Lanes {
  int count, lane;

  explicit PYG_SCALE_DEVICE Lanes(int size)
      : count(size), lane(static_cast<int>(threadIdx.x) % size) {}

  // The number of this group among all of the grid's first dimension.
  PYG_SCALE_DEVICE int64_t group() const {
    return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / count;
  }

  // Turns each value into its sum over the group, the same bits in all of its lanes.
  template <typename A, int kValues>
  PYG_SCALE_DEVICE void sum(A (&values)[kValues]) const {
    for (int step = count / 2; step > 0; step /= 2) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) values[k] += __shfl_xor_sync(kAllLanes, values[k], step);
    }
  }
};

// The largest value that a lane of the warp has: the bound of a loop with collectives.
PYG_SCALE_DEVICE int64_t most_of_warp(int64_t value) {
#if !defined(PYG_SCALE_FAULT_OWN_BOUNDS)
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const int64_t other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
#endif
  return value;
}

// Waits until every block of the grid is here, and sees what they wrote. All of them run, as the
// kernel is launched with launch_together. `arrived` is 0 at first, `awaited` too in each thread.
PYG_SCALE_DEVICE void wait_for_grid(int32_t* arrived, int32_t& awaited) {
#if defined(__CUDACC__)
  awaited += static_cast<int32_t>(gridDim.x);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1);
    while (*static_cast<volatile int32_t*>(arrived) < awaited) {
    }
    __threadfence();
  }
  __syncthreads();
#else
  (void)arrived, (void)awaited;
  emulator::wait_for_grid();
#endif
}

// Draws ######################################################################################

// As in csrc/keys.h, where they are described.
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

PYG_SCALE_DEVICE uint64_t mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
  return word ^ (word >> 31);
}
PYG_SCALE_DEVICE uint64_t fold(uint64_t key, uint64_t value) {
  return mix(key ^ (value * kGolden));
}
PYG_SCALE_DEVICE uint64_t draw(uint64_t key, uint64_t index) {
  return mix(key + (index + 1) * kGolden);
}
PYG_SCALE_DEVICE uint64_t bounded(uint64_t key, uint64_t index, uint64_t size) {
  uint64_t word = draw(key, index);
  uint64_t low = word * size;
  if (low < size) {
    const uint64_t threshold = (0 - size) % size;  // 2^64 mod size
    while (low < threshold) {
      word = mix(word + kGolden);
      low = word * size;
    }
  }
  return __umul64hi(word, size);
}

}  // namespace pyg_scale::cuda
