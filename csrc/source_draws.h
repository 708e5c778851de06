// Choosing in-edges by random numbers that belong to their sources, as LABOR does, so that nodes
// take the same neighbours where they can; and the weights that make up for it.
// pyg_scale/sampler/labor.py is this in plain torch, docs/draws.md specifies both.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "buffer.h"
#include "eights.h"
#include "graph_view.h"
#include "keys.h"
#include "narrow_edges.h"
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
// compute for many sources at a time (the two rounds of Wellons' lowbias32, the halves of the key
// before the first and the second).
PYG_SCALE_INLINE uint32_t source_number(uint64_t key, uint64_t source) {
  if (source >> 32) [[unlikely]]
    key = fold(key, source >> 32);
  uint32_t x = static_cast<uint32_t>(source) ^ static_cast<uint32_t>(key);
  x = (x ^ (x >> 16)) * 0x7FEB352Du ^ static_cast<uint32_t>(key >> 32);
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
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

  // Of eight sources those whose number is below a limit, as bits. `phase` is fold(own.key, 1).
  [[gnu::target("avx2"), gnu::always_inline]] static inline uint32_t below(const SourceNumbers& own,
                                                                           uint64_t phase,
                                                                           __m256i source,
                                                                           uint32_t limit) {
    __m256i word = number(own.key, source);
    if (own.renewed) {
      const __m256i late = below(number(phase, source), own.renewed);
      word = _mm256_blendv_epi8(word, number(own.next_key, source), late);
    }
    const __m256i taken = below(word, limit);
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(taken)));
  }

 private:
  // All ones where an unsigned number is below a limit.
  [[gnu::target("avx2"), gnu::always_inline]] static inline __m256i below(__m256i x,
                                                                          uint32_t limit) {
    const __m256i sign = _mm256_set1_epi32(INT32_MIN);
    return _mm256_cmpgt_epi32(
        _mm256_xor_si256(_mm256_set1_epi32(static_cast<int32_t>(limit)), sign),
        _mm256_xor_si256(x, sign));
  }

  [[gnu::target("avx2"), gnu::always_inline]] static inline __m256i number(uint64_t key,
                                                                           __m256i x) {
    x = _mm256_xor_si256(x, _mm256_set1_epi32(static_cast<int32_t>(key)));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)),
                           _mm256_set1_epi32(0x7FEB352D));
    x = _mm256_xor_si256(x, _mm256_set1_epi32(static_cast<int32_t>(key >> 32)));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)),
                           _mm256_set1_epi32(static_cast<int32_t>(0x846CA68Bu)));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
  }
};

// Sixteen sources at a time; of fewer, those of a mask.
struct SixteenSources {
  static constexpr int64_t kSize = 16;

  // Of `count` sources, at most 16. The number after the last one is not read.
  [[gnu::target("avx512f"), gnu::always_inline]] static inline __m512i load(const int32_t* source,
                                                                            bool pairs,
                                                                            int64_t count) {
    if (!pairs) return _mm512_maskz_loadu_epi32(first(count), source);
    const int64_t numbers = 2 * count - 1;
    const __m512i low = _mm512_maskz_loadu_epi32(first(std::min(numbers, kSize)), source);
    const __m512i high =
        _mm512_maskz_loadu_epi32(first(std::max<int64_t>(numbers - kSize, 0)), source + kSize);
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_epi32(low, even, high);
  }

  static __mmask16 first(int64_t count) {
    return static_cast<__mmask16>((uint32_t{1} << count) - 1);
  }

  // Writes those of a mask, and whatever is after them up to kSize numbers in all.
  [[gnu::target("avx512f"), gnu::always_inline]] static inline void write(__m512i x, __mmask16 mask,
                                                                          int32_t* out) {
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(mask, x));
  }

  // The same, `base` more each. There are `count` of them.
  [[gnu::target("avx512f"), gnu::always_inline]] static inline void write(__m512i x, __mmask16 mask,
                                                                          int64_t count,
                                                                          int64_t* out,
                                                                          int64_t base) {
    const __m512i packed = _mm512_maskz_compress_epi32(mask, x), more = _mm512_set1_epi64(base);
    const auto wide = [more](__m256i half) __attribute__((always_inline, target("avx512f"))) {
      return _mm512_add_epi64(_mm512_maskz_cvtepi32_epi64(0xFF, half), more);
    };
    _mm512_storeu_si512(out, wide(_mm512_maskz_extracti64x4_epi64(0xF, packed, 0)));
    if (count <= kSize / 2) return;
    _mm512_storeu_si512(out + kSize / 2, wide(_mm512_maskz_extracti64x4_epi64(0xF, packed, 1)));
  }

  // Right by some bits. Of the form without a mask GCC 12 warns that it is not initialized (its bug
  // 105593); with all bits of the mask set, this compiles to the same instruction.
  [[gnu::target("avx512f"), gnu::always_inline]] static inline __m512i shifted(__m512i x,
                                                                               unsigned bits) {
    return _mm512_maskz_srli_epi32(0xFFFF, x, bits);
  }

  [[gnu::target("avx512f"), gnu::always_inline]] static inline __m512i number(uint64_t key,
                                                                              __m512i x) {
    x = _mm512_xor_si512(x, _mm512_set1_epi32(static_cast<int32_t>(key)));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, shifted(x, 16)), _mm512_set1_epi32(0x7FEB352D));
    x = _mm512_xor_si512(x, _mm512_set1_epi32(static_cast<int32_t>(key >> 32)));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, shifted(x, 15)),
                           _mm512_set1_epi32(static_cast<int32_t>(0x846CA68Bu)));
    return _mm512_xor_si512(x, shifted(x, 16));
  }

  [[gnu::target("avx512f"), gnu::always_inline]] static inline __mmask16 below(__m512i x,
                                                                               uint32_t limit) {
    return _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(static_cast<int32_t>(limit)));
  }
};
#endif

// Takes the in-edges whose sources' numbers are below their share. One per thread; what it holds is
// only memory.
class SourcePicker {
 public:
  // Writes the positions to `out`, in order, and the share of all of them to `*share`, as a number
  // of 2^32. About `k` of the candidates are taken, all if k < 0 or there are no more than k.
  int64_t uniform(const SourceNumbers& number, const IntColumn& source, Candidates c, int64_t k,
                  int64_t* out, double* share) {
    const int64_t d = c.size();
    if (k < 0 || k >= d) {
      *share = kCertain;
      return all(c, out);
    }
    const uint64_t limit = limit_of(k, d);
    *share = static_cast<double>(limit);
    return scan(number, source, c, limit, out);
  }

#if defined(__x86_64__) && defined(__GNUC__)
  static constexpr int64_t kRoom =
      SixteenSources::kSize;  // that both of these may write beyond the last

  // The same for processors with AVX-512, with the sources and beside them the ids of their edges,
  // if these are in pairs with them, else the positions.
  template <bool kPairs>
  [[gnu::target("avx512f,popcnt"), gnu::always_inline]] static inline int64_t take_by_sixteens(
      const SourceNumbers& number, const NarrowEdges& edges, Candidates c, int64_t k,
      int32_t* source, NarrowEdges::Id<kPairs>* id, double* share) {
    const int64_t d = c.size();
    if (k < 0 || k >= d) {
      *share = kCertain;
      return take_sixteens<kPairs, true>(number, edges, c, 0, source, id);
    }
    const uint64_t limit = limit_of(k, d);  // below 2^32, as k is below d
    *share = static_cast<double>(limit);
    return take_sixteens<kPairs, false>(number, edges, c, static_cast<uint32_t>(limit), source, id);
  }

  // The same for processors with AVX2.
  template <bool kPairs>
  [[gnu::target("avx2,bmi,popcnt"), gnu::always_inline]] static inline int64_t take_by_eights(
      const SourceNumbers& number, const NarrowEdges& edges, Candidates c, int64_t k,
      int32_t* source, NarrowEdges::Id<kPairs>* id, double* share, EdgesAhead<kPairs>& ahead) {
    const int64_t d = c.size();
    const int32_t* sources = edges.source;
    int64_t n = 0;
    const bool all = k < 0 || k >= d;
    if (all || d < EightSources::kSize) {
      const uint64_t limit = all ? uint64_t{1} << 32 : limit_of(k, d);
      *share = static_cast<double>(limit);
      for (int64_t begin = c.begin; begin <= c.end; begin += EightSources::kSize) {
        ahead.step();
        const int64_t end = std::min(begin + EightSources::kSize, c.end);
        for (int64_t i = begin; i < end; ++i) {
          source[n] = sources[kPairs ? 2 * i : i];
          id[n] = kPairs ? sources[2 * i + 1] : i;
          n += all || number(source[n]) < limit;
        }
      }
      return n;
    }
    const auto limit = static_cast<uint32_t>(limit_of(k, d));  // below 2^32, as k is below d
    *share = static_cast<double>(limit);
    const SourceNumbers own = number;  // what is written might else change it
    const uint64_t phase = fold(own.key, 1);
    const auto take =
        [&](int64_t i, uint32_t these) __attribute__((always_inline, target("avx2,bmi,popcnt"))) {
          ahead.step();
          if constexpr (kPairs) {
            const EightPairs pairs = load_eight_pairs(sources + 2 * i);
            const uint32_t those = these & EightSources::below(own, phase, pairs.first, limit);
            store_those(source + n, pairs.first, those);
            store_those(id + n, pairs.second, those);
            n += std::popcount(those);
          } else {
            const __m256i from = load_eight<1>(sources + i);
            const uint32_t those = these & EightSources::below(own, phase, from, limit);
            store_those(source + n, from, those);
            store_those(id + n, i, those);
            n += std::popcount(those);
          }
        };
    int64_t i = c.begin;
    for (; i + EightSources::kSize <= c.end; i += EightSources::kSize) take(i, 0xFF);
    // The last eight are looked at once more, so that no loop goes over those that are left.
    take(c.end - EightSources::kSize, 0xFFu << (i + EightSources::kSize - c.end) & 0xFF);
    return n;
  }
#endif

  // The same in proportion to weights, with a share for each. `prefix` are their running sums by
  // position; `first` is the node's first position.
  int64_t weighted(const SourceNumbers& number, const IntColumn& source, Candidates c,
                   int64_t first, const int64_t* prefix, int64_t k, int64_t* out, double* share) {
    const int64_t d = c.size();
    if (k < 0 || k >= d) {
      std::fill_n(share, d, kCertain);
      return all(c, out);
    }
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
  static uint64_t limit_of(int64_t k, int64_t d) {
    return ((static_cast<uint64_t>(k) << 32) + static_cast<uint64_t>(d) - 1) /
           static_cast<uint64_t>(d);
  }

  static int64_t all(Candidates c, int64_t* out) {
    for (int64_t i = c.begin; i < c.end; ++i) *out++ = i;
    return c.size();
  }

  static int64_t scan(const SourceNumbers& number, const IntColumn& source, Candidates c,
                      uint64_t limit, int64_t* out) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (!source.wide && (source.stride == 1 || source.stride == 2) && limit < uint64_t{1} << 32) {
      const auto below = static_cast<uint32_t>(limit);
      if (has_avx512()) return scan_sixteens(number, source, c, below, out);
      if (c.size() >= EightSources::kSize && has_avx2()) {
        return scan_eights(number, source, c, below, out);
      }
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
  // A masked load waits for all lines that it could reach, also those whose bytes it leaves out. So
  // of a node with sixteen in-edges or more, the last sixteen are read as a whole, without those
  // that have been seen; of fewer, the second line only if there are any in it.
  template <bool kPairs, bool kAll>
  [[gnu::target("avx512f,popcnt"), gnu::always_inline]] static inline int64_t take_sixteens(
      const SourceNumbers& own, const NarrowEdges& edges, Candidates c, uint32_t limit,
      int32_t* source, NarrowEdges::Id<kPairs>* id) {
    using S = SixteenSources;
    const int32_t* sources = edges.source;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i even = _mm512_maskz_slli_epi32(0xFFFF, lanes, 1);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    int64_t n = 0;
    const auto take = [&](__m512i u, __m512i e, int64_t i, __mmask16 these) __attribute__((
                          always_inline, target("avx512f,popcnt"))) {
      __mmask16 taken = these;
      if constexpr (!kAll) {
        __m512i word = S::number(own.key, u);
        if (own.renewed) {
          const __mmask16 late = S::below(S::number(fold(own.key, 1), u), own.renewed);
          word = _mm512_mask_blend_epi32(late, word, S::number(own.next_key, u));
        }
        taken &= S::below(word, limit);
      }
      const int64_t found = std::popcount(static_cast<uint32_t>(taken));
      S::write(u, taken, source + n);
      if constexpr (kPairs) {
        S::write(e, taken, id + n);
      } else {
        S::write(e, taken, found, id + n, i);
      }
      n += found;
    };
    const auto sixteen =
        [&](int64_t i, __mmask16 these) __attribute__((always_inline, target("avx512f,popcnt"))) {
          if constexpr (kPairs) {
            const int32_t* at = sources + 2 * i;
            const __m512i low = _mm512_loadu_si512(at), high = _mm512_loadu_si512(at + S::kSize);
            take(_mm512_permutex2var_epi32(low, even, high),
                 _mm512_permutex2var_epi32(low, odd, high), i, these);
          } else {
            take(_mm512_loadu_si512(sources + i), lanes, i, these);
          }
        };
    const int64_t d = c.size();
    if (d >= S::kSize) [[likely]] {
      int64_t i = c.begin;
      constexpr int64_t kAhead = NarrowEdges::kStart / (kPairs ? 8 : 4);
      for (; i + S::kSize <= c.end; i += S::kSize) {
        if (i + kAhead < c.end) {
          edges.prefetch(i + kAhead);
          if (kPairs) edges.prefetch(i + kAhead + S::kSize / 2);
        }
        sixteen(i, 0xFFFF);
      }
      if (const int64_t rest = c.end - i; rest > 0) {
        sixteen(c.end - S::kSize, static_cast<__mmask16>(0xFFFF << (S::kSize - rest)));
      }
      return n;
    }
    const __mmask16 these = S::first(d);
    if constexpr (kPairs) {
      const int32_t* at = sources + 2 * c.begin;
      const __m512i low = _mm512_maskz_loadu_epi32(S::first(std::min(2 * d, S::kSize)), at);
      const __m512i high = 2 * d > S::kSize
                               ? _mm512_maskz_loadu_epi32(S::first(2 * d - S::kSize), at + S::kSize)
                               : _mm512_setzero_si512();
      take(_mm512_permutex2var_epi32(low, even, high), _mm512_permutex2var_epi32(low, odd, high),
           c.begin, these);
    } else {
      take(_mm512_maskz_loadu_epi32(these, sources + c.begin), lanes, c.begin, these);
    }
    return n;
  }

  [[gnu::target("avx512f,bmi")]] static int64_t scan_sixteens(const SourceNumbers& number,
                                                              const IntColumn& source, Candidates c,
                                                              uint32_t limit, int64_t* out) {
    const bool pairs = source.stride == 2;
    const auto* data = static_cast<const int32_t*>(source.data);
    const SourceNumbers own = number;  // what is written might else change it
    const uint64_t phase = fold(own.key, 1);
    const auto below = [=](int64_t i,
                           int64_t count) __attribute__((always_inline, target("avx512f"))) {
      const __m512i id = SixteenSources::load(data + i * source.stride, pairs, count);
      __m512i word = SixteenSources::number(own.key, id);
      if (own.renewed) {
        const __mmask16 late =
            SixteenSources::below(SixteenSources::number(phase, id), own.renewed);
        word = _mm512_mask_blend_epi32(late, word, SixteenSources::number(own.next_key, id));
      }
      return static_cast<uint64_t>(SixteenSources::below(word, limit));
    };
    constexpr int64_t kSize = SixteenSources::kSize, kBits = 64;
    int64_t n = 0;
    for (int64_t block = c.begin; block < c.end; block += kBits) {
      uint64_t mask = 0;
      int64_t i = block;
      for (const int64_t stop = std::min(block + kBits, c.end - kSize); i < stop; i += kSize) {
        mask |= below(i, kSize) << (i - block);
      }
      if (i < std::min(block + kBits, c.end)) {
        const int64_t count = c.end - i;
        mask |= (below(i, count) & SixteenSources::first(count)) << (i - block);
      }
      for (; mask; mask &= mask - 1) out[n++] = block + std::countr_zero(mask);
    }
    return n;
  }

  [[gnu::target("avx2,bmi")]] static int64_t scan_eights(const SourceNumbers& number,
                                                         const IntColumn& source, Candidates c,
                                                         uint32_t limit, int64_t* out) {
    const bool pairs = source.stride == 2;
    const auto* data = static_cast<const int32_t*>(source.data);
    const SourceNumbers own = number;  // what is written might else change it
    const uint64_t phase = fold(own.key, 1);
    const auto below = [=](int64_t i) __attribute__((always_inline, target("avx2"))) {
      const __m256i id = pairs ? load_eight<2>(data + 2 * i) : load_eight<1>(data + i);
      return uint64_t{EightSources::below(own, phase, id, limit)};
    };
    constexpr int64_t kSize = EightSources::kSize, kBits = 64;
    int64_t n = 0;
    for (int64_t block = c.begin; block < c.end; block += kBits) {
      uint64_t mask = 0;
      int64_t i = block;
      for (const int64_t stop = std::min(block + kBits, c.end - kSize); i < stop; i += kSize) {
        mask |= below(i) << (i - block);
      }
      if (i < std::min(block + kBits, c.end)) {  // the last eight overlap those before
        const int64_t rest = c.end - kSize;
        mask |= below(rest) >> (i - rest) << (i - block);
      }
      for (; mask; mask &= mask - 1) out[n++] = block + std::countr_zero(mask);
    }
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
