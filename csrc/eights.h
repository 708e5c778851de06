// Eight numbers of 32 bits at a time, with AVX2: those of which a bit is set.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

namespace pyg_scale {

// Of eight bits those that are set, by the eight bits: their numbers, a byte each, ascending.
struct BitNumbers {
  uint64_t of[256];

  constexpr BitNumbers() : of{} {
    for (int bits = 0; bits < 256; ++bits) {
      int shift = 0;
      for (int bit = 0; bit < 8; ++bit) {
        if (!(bits >> bit & 1)) continue;
        of[bits] |= static_cast<uint64_t>(bit) << shift;
        shift += 8;
      }
    }
  }
};
inline constexpr BitNumbers kBitNumbers;

// Eight numbers, next to each other or a column of pairs. Reads nothing beyond the last one.
template <int kStride>
[[gnu::target("avx2"), gnu::always_inline]] inline __m256i load_eight(const int32_t* from) {
  static_assert(kStride == 1 || kStride == 2);
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if constexpr (kStride == 1) return first;
  const __m256i last = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 7));
  const __m256 mixed = _mm256_shuffle_ps(_mm256_castsi256_ps(first), _mm256_castsi256_ps(last),
                                         _MM_SHUFFLE(3, 1, 2, 0));
  return _mm256_permute4x64_epi64(_mm256_castps_si256(mixed), _MM_SHUFFLE(3, 1, 2, 0));
}

// Eight pairs of numbers, as columns.
struct EightPairs {
  __m256i first, second;
};

[[gnu::target("avx2"), gnu::always_inline]] inline EightPairs load_eight_pairs(
    const int32_t* from) {
  const auto* at = reinterpret_cast<const __m256i*>(from);
  const __m256 low = _mm256_castsi256_ps(_mm256_loadu_si256(at));
  const __m256 high = _mm256_castsi256_ps(_mm256_loadu_si256(at + 1));
  constexpr int kFirst = _MM_SHUFFLE(2, 0, 2, 0), kSecond = _MM_SHUFFLE(3, 1, 3, 1);
  const __m256i first = _mm256_castps_si256(_mm256_shuffle_ps(low, high, kFirst));
  const __m256i second = _mm256_castps_si256(_mm256_shuffle_ps(low, high, kSecond));
  constexpr int kOrder = _MM_SHUFFLE(3, 1, 2, 0);
  return {_mm256_permute4x64_epi64(first, kOrder), _mm256_permute4x64_epi64(second, kOrder)};
}

// Which of eight numbers have their bit set: number i is bit i % 32 of word i / 32. The words are
// loaded one by one, as a gather takes longer on some processors.
[[gnu::target("avx2"), gnu::always_inline]] inline uint32_t bits_of_eight(const uint32_t* bits,
                                                                          __m256i number) {
  constexpr uint64_t kLow = UINT32_MAX;
  const auto word = [bits](uint64_t i) { return static_cast<int>(bits[i]); };
  const __m256i at = _mm256_srli_epi32(number, 5);
  const auto a = static_cast<uint64_t>(_mm256_extract_epi64(at, 0));
  const auto b = static_cast<uint64_t>(_mm256_extract_epi64(at, 1));
  const auto c = static_cast<uint64_t>(_mm256_extract_epi64(at, 2));
  const auto d = static_cast<uint64_t>(_mm256_extract_epi64(at, 3));
  const __m256i held =
      _mm256_setr_epi32(word(a & kLow), word(a >> 32), word(b & kLow), word(b >> 32),
                        word(c & kLow), word(c >> 32), word(d & kLow), word(d >> 32));
  const __m256i left = _mm256_andnot_si256(number, _mm256_set1_epi32(31));
  const __m256i first = _mm256_sllv_epi32(held, left);
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(first)));
}

// Writes those of eight numbers whose bit of `those` is set, and anything up to the eighth.
[[gnu::target("avx2"), gnu::always_inline]] inline void store_those(int32_t* out, __m256i number,
                                                                    uint32_t those) {
  const auto numbers = static_cast<long long>(kBitNumbers.of[those]);
  const __m256i which = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(numbers));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permutevar8x32_epi32(number, which));
}

// The same with their places, of which the first one's is given.
[[gnu::target("avx2"), gnu::always_inline]] inline void store_those(int64_t* out, int64_t first,
                                                                    uint32_t those) {
  const __m128i numbers = _mm_cvtsi64_si128(static_cast<long long>(kBitNumbers.of[those]));
  const __m256i from = _mm256_set1_epi64x(first);
  const __m256i low = _mm256_cvtepu8_epi64(numbers);
  const __m256i high = _mm256_cvtepu8_epi64(_mm_srli_epi64(numbers, 32));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_add_epi64(from, low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 4), _mm256_add_epi64(from, high));
}

// Calls take(i, these, out) for eight of `n` numbers at a time, which writes those of `these` that
// it takes and returns which; `n` is 8 or more. Sets a bit of `taken` for each number, which has
// room for two more words than n / 64, and returns how many were taken. The last eight are looked
// at once more, so that no loop goes over those that are left, which would end where no processor
// foresees it.
template <typename Look>
[[gnu::target("avx2,popcnt"), gnu::always_inline]] inline int64_t take_eights_inlined(
    int64_t n, const Look& look, int32_t* out, uint64_t* taken) {
  const Look own = look;  // a copy: what is written as bytes might be a part of anything else
  auto* byte = reinterpret_cast<uint8_t*>(taken);
  int64_t found = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    const uint32_t those = own.take(i, 0xFF, out + found);
    *byte++ = static_cast<uint8_t>(those);
    found += std::popcount(those);
  }
  const int64_t known = i + 8 - n;  // of the last eight
  const uint32_t those = own.take(n - 8, 0xFFu << known, out + found);
  const uint64_t last = those >> known;
  std::memcpy(byte, &last, sizeof(last));
  return found + std::popcount(those);
}

// The same, for callers that are compiled for any processor.
template <typename Look>
[[gnu::target("avx2,popcnt")]] int64_t take_eights(int64_t n, const Look& look, int32_t* out,
                                                   uint64_t* taken) {
  return take_eights_inlined(n, look, out, taken);
}

}  // namespace pyg_scale
#endif
