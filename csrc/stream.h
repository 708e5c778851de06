// Whole cache lines, written past the caches.
//
// A batch is larger than the caches. Written past them, its lines are not fetched before they are
// overwritten, and nothing that is used again has to make room.
#pragma once

#include <cstdint>
#include <cstring>

#include "instructions.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define PYG_SCALE_WIDE_STORES 1
#include <immintrin.h>
#endif

namespace pyg_scale {

constexpr int64_t kLine = 64;  // bytes

inline int64_t offset_in_line(const char* at) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) % kLine);
}

// Whether the processor stores a line at a time.
inline bool has_wide_stores() {
#ifdef PYG_SCALE_WIDE_STORES
  return has_avx512();
#else
  return false;
#endif
}

#ifdef PYG_SCALE_WIDE_STORES
[[gnu::target("avx512f")]] inline void stream_wide(char* to, const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  }
}

// Copies a number of lines that is known, in two stores each, without a branch. `to` is hidden from
// the compiler: over many rows it would have a pointer for each of the stores, which no processor
// has registers for, and 512 bytes take a tenth longer.
template <int64_t kLines>
[[gnu::target("avx2"), gnu::always_inline]] inline void stream_few(char* to, const char* from) {
  asm("" : "+r"(to));
#pragma GCC unroll 8
  for (int64_t at = 0; at < kLines * kLine; at += kLine) {
    const auto* source = reinterpret_cast<const __m256i*>(from + at);
    auto* target = reinterpret_cast<__m256i*>(to + at);
    const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(target, a);
    _mm256_stream_si256(target + 1, b);
  }
}

// The same of any number. Blocks of lines are what makes it faster: a loop over the lines of a row
// takes up to a fifth longer (measured on Milan).
[[gnu::target("avx2"), gnu::always_inline]] inline void stream_halves(char* to, const char* from,
                                                                      int64_t bytes) {
  int64_t at = 0;
  for (; at + 8 * kLine <= bytes; at += 8 * kLine) stream_few<8>(to + at, from + at);
  for (; at + 4 * kLine <= bytes; at += 4 * kLine) stream_few<4>(to + at, from + at);
  for (; at < bytes; at += kLine) stream_few<1>(to + at, from + at);
}

[[gnu::target("avx2")]] inline void stream_in_halves(char* to, const char* from, int64_t bytes) {
  stream_halves(to, from, bytes);
}
#endif

// Copies whole lines to where one begins. Call `streams_end` after the last one. The stores of a
// line follow each other at once: with loads between them, nothing is gained (measured on Milan).
inline void stream_lines(char* to, const char* from, int64_t bytes) {
#ifdef PYG_SCALE_WIDE_STORES
  if (has_wide_stores()) return stream_wide(to, from, bytes);
  if (has_avx2()) return stream_in_halves(to, from, bytes);
#endif
#ifdef __SSE2__
  for (int64_t at = 0; at < bytes; at += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
#else
  std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

// Call it before another thread is told of what was written.
inline void streams_end() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace pyg_scale
