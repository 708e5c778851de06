// Choosing in-edges by random numbers that belong to their sources, as LABOR does, so that nodes
// take the same neighbours where they can; and the weights that make up for it.
// pyg_scale/sampler/labor.py is this in plain torch, docs/draws.md specifies both.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "buffer.h"
#include "graph_view.h"
#include "keys.h"
#include "pick.h"
#include "vectors.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace pyg_scale {

// What an edge that is taken with probability p weighs: 1 / p; the same over the degree of the
// node; or over the root of the product of both ends' degrees.
enum class Weighting : int64_t { kNone, kSum, kMean, kGcn };

inline Weighting weighting_of(int64_t number) {
  check(number >= 0 && number <= 3, "weighting must be from 0 to 3");
  return static_cast<Weighting>(number);
}

inline void check_32_bits(int64_t number, const char* name) {
  check(number >= 0 && number < int64_t{1} << 32,
        std::string(name) + " must be from 0 to 2**32 - 1");
}

constexpr double kCertain = 4294967296.0;  // 2^32, the share of what is always taken

// The random number of 32 bits that a source has for a key: a multiplicative hash that processors
// compute for many sources at a time (three rounds with the constants of Wellons' triple32, the
// halves of the key before the first and the second).
PYG_SCALE_INLINE uint32_t source_number(uint64_t key, uint64_t source) {
  if (source >> 32) [[unlikely]]
    key = fold(key, source >> 32);
  uint32_t x = static_cast<uint32_t>(source) ^ static_cast<uint32_t>(key);
  x = (x ^ (x >> 17)) * 0xED5AD4BBu ^ static_cast<uint32_t>(key >> 32);
  x = (x ^ (x >> 11)) * 0xAC4C1B51u;
  x = (x ^ (x >> 15)) * 0x31848BABu;
  return x ^ (x >> 14);
}

// The random numbers of sources. A share of all nodes has those of the next key.
struct SourceNumbers {
  uint64_t key = 0, next_key = 0;
  uint32_t renewed = 0;  // the share, of 2^32

  uint64_t operator()(int64_t source) const {
    const auto id = static_cast<uint64_t>(source);
    if (renewed && source_number(fold(key, 1), id) < renewed) return source_number(next_key, id);
    return source_number(key, id);
  }
};

#if defined(__x86_64__) && defined(__GNUC__)
// Eight sources at a time.
struct EightSources {
  static constexpr int64_t kSize = 8;

  // With `last`, the number after the last one is not read: a column of pairs may end there.
  [[gnu::target("avx2"), gnu::always_inline]] static inline __m256i load(const int32_t* source,
                                                                         bool pairs, bool last) {
    const auto* from = reinterpret_cast<const __m256i*>(source);
    const __m256i low = _mm256_loadu_si256(from);
    if (!pairs) return low;
    const __m256i high = last
                             ? _mm256_maskload_epi32(
                                   source + kSize, _mm256_setr_epi32(-1, -1, -1, -1, -1, -1, -1, 0))
                             : _mm256_loadu_si256(from + 1);
    const __m256 both =
        _mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), 0x88);
    return _mm256_permute4x64_epi64(_mm256_castps_si256(both), 0xD8);
  }

  [[gnu::target("avx2"), gnu::always_inline]] static inline __m256i number(uint64_t key,
                                                                           __m256i x) {
    x = _mm256_xor_si256(x, _mm256_set1_epi32(static_cast<int32_t>(key)));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 17)),
                           _mm256_set1_epi32(static_cast<int32_t>(0xED5AD4BBu)));
    x = _mm256_xor_si256(x, _mm256_set1_epi32(static_cast<int32_t>(key >> 32)));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 11)),
                           _mm256_set1_epi32(static_cast<int32_t>(0xAC4C1B51u)));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)),
                           _mm256_set1_epi32(0x31848BAB));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 14));
  }

  // All ones where an unsigned number is below a limit.
  [[gnu::target("avx2"), gnu::always_inline]] static inline __m256i below(__m256i x,
                                                                          uint32_t limit) {
    const __m256i sign = _mm256_set1_epi32(INT32_MIN);
    return _mm256_cmpgt_epi32(
        _mm256_xor_si256(_mm256_set1_epi32(static_cast<int32_t>(limit)), sign),
        _mm256_xor_si256(x, sign));
  }

  // Writes first + i for each bit i of a mask, and returns how many; up to eight are overwritten.
  // No branches, which would be guessed wrong every other time.
  [[gnu::target("avx2"), gnu::always_inline]] static inline int64_t write(uint32_t mask,
                                                                          int64_t first,
                                                                          int64_t* out) {
    const __m128i bits = _mm_cvtsi64_si128(static_cast<int64_t>(kBits[mask]));
    const __m256i from = _mm256_set1_epi64x(first);
    const __m256i low = _mm256_cvtepu8_epi64(bits);
    const __m256i high = _mm256_cvtepu8_epi64(_mm_srli_si128(bits, 4));
    auto* to = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(to, _mm256_add_epi64(from, low));
    _mm256_storeu_si256(to + 1, _mm256_add_epi64(from, high));
    return std::popcount(mask);
  }

 private:
  // The numbers of the bits of each mask, a byte each, in order.
  static constexpr std::array<uint64_t, 256> kBits = [] {
    std::array<uint64_t, 256> all{};
    for (uint64_t mask = 0; mask < 256; ++mask) {
      int shift = 0;
      for (uint64_t bit = 0; bit < 8; ++bit) {
        if (!(mask >> bit & 1)) continue;
        all[mask] |= bit << shift;
        shift += 8;
      }
    }
    return all;
  }();
};
#endif

// Takes the in-edges whose sources' numbers are below their share. One per thread; what it holds is
// only memory.
class SourcePicker {
 public:
  // Writes the positions to `out`, in order, and the share of each to `share`, as a number of 2^32.
  // About `k` of the candidates are taken, all if k < 0 or there are no more than k.
  int64_t uniform(const SourceNumbers& number, const IntColumn& source, Candidates c, int64_t k,
                  int64_t* out, double* share) {
    const int64_t d = c.size();
    if (k < 0 || k >= d) return all(c, out, share);
    const uint64_t limit = ((static_cast<uint64_t>(k) << 32) + static_cast<uint64_t>(d) - 1) /
                           static_cast<uint64_t>(d);
    const int64_t n = scan(number, source, c, limit, out);
    std::fill_n(share, n, static_cast<double>(limit));
    return n;
  }

  // As `uniform`, in proportion to weights. `prefix` are their running sums by position; `first` is
  // the node's first position.
  int64_t weighted(const SourceNumbers& number, const IntColumn& source, Candidates c,
                   int64_t first, const int64_t* prefix, int64_t k, int64_t* out, double* share) {
    const int64_t d = c.size();
    if (k < 0 || k >= d) return all(c, out, share);
    if (k == 0) return 0;
    shares(c, first, prefix, k);
    int64_t n = 0;
    for (int64_t i = 0; i < d; ++i) {
      if (static_cast<double>(number(source[c.begin + i])) >= share_[i]) continue;
      out[n] = c.begin + i;
      share[n++] = share_[i];
    }
    return n;
  }

  size_t bytes() const { return share_.bytes() + weight_.bytes(); }

 private:
  static int64_t all(Candidates c, int64_t* out, double* share) {
    for (int64_t i = c.begin; i < c.end; ++i) *out++ = i;
    std::fill_n(share, c.size(), kCertain);
    return c.size();
  }

  static int64_t scan(const SourceNumbers& number, const IntColumn& source, Candidates c,
                      uint64_t limit, int64_t* out) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (!source.wide && (source.stride == 1 || source.stride == 2) && limit < uint64_t{1} << 32 &&
        c.size() >= EightSources::kSize && has_avx2()) {
      return scan_eights(number, source, c, static_cast<uint32_t>(limit), out);
    }
#endif
    int64_t n = 0;
    for (int64_t i = c.begin; i < c.end; ++i) {
      out[n] = i;
      n += number(source[i]) < limit;
    }
    return n;
  }

#if defined(__x86_64__) && defined(__GNUC__)
  [[gnu::target("avx2,bmi,popcnt")]] static int64_t scan_eights(const SourceNumbers& number,
                                                                const IntColumn& source,
                                                                Candidates c, uint32_t limit,
                                                                int64_t* out) {
    const bool pairs = source.stride == 2;
    const auto* data = static_cast<const int32_t*>(source.data);
    const uint64_t phase = fold(number.key, 1);
    const auto below = [&](int64_t i, bool last) __attribute__((always_inline, target("avx2"))) {
      const __m256i id = EightSources::load(data + i * source.stride, pairs, last);
      __m256i word = EightSources::number(number.key, id);
      if (number.renewed) {
        const __m256i late = EightSources::below(EightSources::number(phase, id), number.renewed);
        word = _mm256_blendv_epi8(word, EightSources::number(number.next_key, id), late);
      }
      const __m256i taken = EightSources::below(word, limit);
      return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(taken)));
    };
    int64_t n = 0, i = c.begin;
    for (; i + EightSources::kSize < c.end; i += EightSources::kSize) {
      n += EightSources::write(below(i, false), i, out + n);
    }
    // The last eight overlap those before.
    const int64_t rest = c.end - EightSources::kSize;
    const uint32_t mask = below(rest, true) >> (i - rest);
    for (uint32_t left = mask; left; left &= left - 1) out[n++] = i + std::countr_zero(left);
    return n;
  }
#endif

  // Shares in proportion to weights, of sum k, none above 1: those that would be are 1, and the
  // rest share what is left.
  void shares(Candidates c, int64_t first, const int64_t* prefix, int64_t k) {
    const int64_t d = c.size();
    share_.reserve(d);
    weight_.reserve(d);
    int64_t before = c.begin > first ? prefix[c.begin - 1] : 0, left = 0;
    check(before >= 0, "weight_prefix must rise from 0 within a node");
    for (int64_t i = 0; i < d; ++i) {
      const int64_t sum = prefix[c.begin + i];
      check(sum >= before, "weight_prefix must rise from 0 within a node");
      weight_[i] = sum - before;
      share_[i] = 0;
      left += weight_[i];
      before = sum;
    }
    double rate = 0;
    for (bool again = true; again && left > 0;) {
      again = false;
      rate = static_cast<double>(k) * kCertain / static_cast<double>(left);
      for (int64_t i = 0; i < d; ++i) {
        if (share_[i] > 0 || static_cast<double>(weight_[i]) * rate < kCertain) continue;
        share_[i] = kCertain;
        left -= weight_[i];
        --k;
        again = true;
      }
    }
    for (int64_t i = 0; i < d; ++i) {
      if (share_[i] > 0 || weight_[i] == 0) continue;
      share_[i] = std::max(1.0, std::ceil(static_cast<double>(weight_[i]) * rate));
    }
  }

  Buffer<double> share_;
  Buffer<int64_t> weight_;
};

}  // namespace pyg_scale
