// Rows of features in short vectors: loads that widen, sums, products, exp.
//
// Vectors have a fixed number of lanes and lanes are added up in a fixed order, so results do not
// depend on the machine's vectors. Functions are always inlined: `dispatch` compiles their callers
// a second time for machines with AVX2 and chooses when called.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "instructions.h"

#define PYG_SCALE_INLINE [[gnu::always_inline]] inline

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are never passed between functions
#endif

namespace pyg_scale {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// What numbers of a type are added up in.
template <typename T>
using AccumulatorOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int kVectorBytes = 32;
template <typename A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

template <typename T, int kCount>
struct VectorOf {
  typedef T type __attribute__((vector_size(kCount * sizeof(T))));
};
template <typename A>
using Vector = typename VectorOf<A, kLanes<A>>::type;

PYG_SCALE_INLINE float widen(float x) { return x; }
PYG_SCALE_INLINE double widen(double x) { return x; }
PYG_SCALE_INLINE float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}
PYG_SCALE_INLINE float widen(Half x) {
  const uint32_t half = x.x, magnitude = (half & 0x7fff) << 13, scale_bits = 0x77800000;
  float out, scale;  // 2^112 moves the exponent, of subnormal numbers too
  std::memcpy(&out, &magnitude, sizeof(out));
  std::memcpy(&scale, &scale_bits, sizeof(scale));
  out *= scale;
  uint32_t bits;
  std::memcpy(&bits, &out, sizeof(bits));
  bits |= (half & 0x8000) << 16;
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

// One vector of numbers from anywhere in memory.
template <typename T>
PYG_SCALE_INLINE Vector<AccumulatorOf<T>> load(const T* from) {
  using A = AccumulatorOf<T>;
  Vector<A> out;
  if constexpr (std::is_same_v<T, A>) {
    std::memcpy(&out, from, sizeof(out));
  } else {
    using Short = typename VectorOf<uint16_t, kLanes<A>>::type;
    using Word = typename VectorOf<uint32_t, kLanes<A>>::type;
    Short raw;
    std::memcpy(&raw, from, sizeof(raw));
    const Word word = __builtin_convertvector(raw, Word);
    if constexpr (std::is_same_v<T, BFloat16>) {
      out = (Vector<A>)(word << 16);
    } else {
      const Word scale_bits = Word{} + 0x77800000u;
      const Vector<A> scaled = (Vector<A>)((word & 0x7fff) << 13) * (Vector<A>)scale_bits;
      const Word special = (Word)((word & 0x7c00) == 0x7c00) & 0x7f800000u;
      out = (Vector<A>)((Word)scaled | ((word & 0x8000) << 16) | special);
    }
  }
  return out;
}

template <typename A>
PYG_SCALE_INLINE void keep(A* to, const Vector<A>& value) {
  std::memcpy(to, &value, sizeof(value));
}

template <typename A>
PYG_SCALE_INLINE Vector<A> all(A value) {
  return Vector<A>{} + value;
}

// The sum of the lanes, in a fixed order.
template <typename A>
PYG_SCALE_INLINE A add_lanes(const Vector<A>& v) {
  if constexpr (kLanes<A> == 8) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  } else {
    return (v[0] + v[2]) + (v[1] + v[3]);
  }
}

// The largest of `start` and of `size` numbers, rounded up to whole vectors. NaN are skipped.
template <typename A>
PYG_SCALE_INLINE A largest_of(const A* x, int64_t size, A start) {
  Vector<A> best = all<A>(start);
  for (int64_t i = 0; i < size; i += kLanes<A>) {
    const Vector<A> v = load(x + i);
    best = v > best ? v : best;
  }
  for (int i = 0; i < kLanes<A>; ++i) start = best[i] > start ? best[i] : start;
  return start;
}

template <typename A>
PYG_SCALE_INLINE Vector<A> leaky(const Vector<A>& v, A slope) {
  return v > Vector<A>{} ? v : v * slope;
}

// to += w * x
template <typename A, typename T>
PYG_SCALE_INLINE void add_scaled(A* to, const T* x, A w, int64_t size) {
  int64_t c = 0;
  for (; c + kLanes<A> <= size; c += kLanes<A>) keep<A>(to + c, load(to + c) + load(x + c) * w);
  for (; c < size; ++c) to[c] += widen(x[c]) * w;
}

template <typename A, typename T>
PYG_SCALE_INLINE void add(A* to, const T* x, int64_t size) {
  int64_t c = 0;
  for (; c + kLanes<A> <= size; c += kLanes<A>) keep<A>(to + c, load(to + c) + load(x + c));
  for (; c < size; ++c) to[c] += widen(x[c]);
}

template <typename T, typename U>
PYG_SCALE_INLINE AccumulatorOf<T> dot(const T* x, const U* y, int64_t size) {
  using A = AccumulatorOf<T>;
  Vector<A> sum{};
  int64_t c = 0;
  for (; c + kLanes<A> <= size; c += kLanes<A>) sum += load(x + c) * load(y + c);
  A out = add_lanes<A>(sum);
  for (; c < size; ++c) out += widen(x[c]) * widen(y[c]);
  return out;
}

// A row in the type of its accumulator: itself, or in `scratch`.
template <typename T>
PYG_SCALE_INLINE const AccumulatorOf<T>* widened(const T* row, int64_t size,
                                                 AccumulatorOf<T>* scratch) {
  if constexpr (std::is_same_v<T, AccumulatorOf<T>>) {
    return row;
  } else {
    for (int64_t c = 0; c < size; ++c) scratch[c] = widen(row[c]);
    return scratch;
  }
}

template <typename T>
PYG_SCALE_INLINE void store_row(T* to, const AccumulatorOf<T>* from, AccumulatorOf<T> factor,
                                int64_t size) {
  for (int64_t c = 0; c < size; ++c) to[c] = static_cast<T>(from[c] * factor);
}

// x[i] = exp(x[i]) for numbers that are not above 88: polynomial on [-ln 2 / 2, ln 2 / 2] after
// Cody and Waite; below -87 it is 0. One unit in the last place or two.
PYG_SCALE_INLINE void exp_row(float* x, int64_t size) {
  using V = Vector<float>;
  using I = typename VectorOf<int32_t, 8>::type;
  const auto exp = [](const V& given) __attribute__((always_inline)) -> V {
    const V high = V{} + 88.0f, low = V{} - 87.0f;
    const V v = given > high ? high : (given < low ? low : given);
    const V magic = V{} + 12582912.0f;  // 1.5 * 2^23 rounds to whole numbers
    const V shifted = v * 1.44269504088896341f + magic;
    const V n = shifted - magic;
    const V r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = V{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const I scale = (((I)shifted - (I)magic) + 127) << 23;
    const V out = p * (V)scale;
    return given < low ? V{} : out;
  };
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) keep<float>(x + i, exp(load(x + i)));
  if (i < size) {
    float tail[8] = {};
    for (int64_t k = i; k < size; ++k) tail[k - i] = x[k];
    keep<float>(tail, exp(load(static_cast<const float*>(tail))));
    for (int64_t k = i; k < size; ++k) x[k] = tail[k - i];
  }
}

PYG_SCALE_INLINE void exp_row(double* x, int64_t size) {
  for (int64_t i = 0; i < size; ++i) x[i] = std::exp(x[i]);
}

// x = exp(x - base), and its sum, for `size` numbers, rounded up to whole vectors.
template <typename A>
PYG_SCALE_INLINE A exp_and_add(A* x, int64_t size, A base) {
  for (int64_t i = 0; i < size; i += kLanes<A>) keep<A>(x + i, load(x + i) - base);
  exp_row(x, size);
  Vector<A> sum{};
  for (int64_t i = 0; i < size; i += kLanes<A>) sum += load(x + i);
  return add_lanes<A>(sum);
}

template <int kLocality>
PYG_SCALE_INLINE void prefetch_lines(const char* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, kLocality);
  __builtin_prefetch(at + bytes - 1, 0, kLocality);  // rows begin anywhere in a line
}

// A row that comes from far goes to the second-level cache, which waits for more lines at a time.
PYG_SCALE_INLINE void prefetch_row(const void* row, int64_t bytes, bool far = false) {
  const auto* at = static_cast<const char*>(row);
  far ? prefetch_lines<2>(at, bytes) : prefetch_lines<3>(at, bytes);
}

// Machines ##################################################################################

#if defined(__x86_64__) && defined(__GNUC__)
template <typename Body, typename... Args>
[[gnu::target("avx2,f16c,bmi,bmi2")]] void run_on_avx2(const Body& body, Args... args) {
  body(args...);
}
#endif

template <typename Body, typename... Args>
[[gnu::noinline]] void run_anywhere(const Body& body, Args... args) {
  body(args...);
}

// Calls body(args...), whose operator() is always inlined, as compiled for this machine.
template <typename Body, typename... Args>
void dispatch(const Body& body, Args... args) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (has_avx2()) return run_on_avx2(body, args...);
#endif
  run_anywhere(body, args...);
}

}  // namespace pyg_scale
