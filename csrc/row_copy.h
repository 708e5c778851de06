// A row on its way into a batch, past the caches.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace pyg_scale {

// Copies a row past the caches where it fills whole lines: a batch is larger than they are, and
// what its lines held before need not be fetched.
inline void put_row(char* to, const char* from, int64_t bytes) {
#ifdef __SSE2__
  if (bytes >= 64 && bytes % 64 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    for (int64_t at = 0; at < bytes; at += 64) {
      const auto* source = reinterpret_cast<const __m128i*>(from + at);
      auto* target = reinterpret_cast<__m128i*>(to + at);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    return;
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Call it after the last row, before another thread is told that rows are there.
inline void rows_are_put() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace pyg_scale
