// Keyed draws: every random number is a function of integers, never of execution order.
// The same bits as pyg_scale/ops/keys.py; docs/draws.md specifies both.
#pragma once

#include <cstdint>

namespace pyg_scale {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;  // 2^64 / golden ratio, odd

// What a key is used for. The numbers are part of the specification.
enum class Purpose : uint64_t { kNeighbor = 1, kHgt = 8, kSource = 25 };

// The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
inline uint64_t mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
  return word ^ (word >> 31);
}

// Absorbs one integer into a key.
inline uint64_t fold(uint64_t key, uint64_t value) { return mix(key ^ (value * kGolden)); }

// The key of a hop along an edge type.
inline uint64_t hop_key(uint64_t key, Purpose purpose, int64_t hop, uint64_t edge_type) {
  key = fold(fold(key, static_cast<uint64_t>(purpose)), static_cast<uint64_t>(hop));
  return fold(key, edge_type);
}

// Word number `index` of the stream of a key.
inline uint64_t draw(uint64_t key, uint64_t index) { return mix(key + (index + 1) * kGolden); }

// Uniform in {0, ..., size - 1}, size >= 1, by Lemire's multiplication (TOMACS 2019). The
// remainder is only needed, and only computed, when the lower half is below `size`.
inline uint64_t bounded(uint64_t key, uint64_t index, uint64_t size) {
  uint64_t word = draw(key, index);
  unsigned __int128 product = static_cast<unsigned __int128>(word) * size;
  if (static_cast<uint64_t>(product) < size) [[unlikely]] {
    const uint64_t threshold = (0 - size) % size;  // 2^64 mod size
    while (static_cast<uint64_t>(product) < threshold) {
      word = mix(word + kGolden);
      product = static_cast<unsigned __int128>(word) * size;
    }
  }
  return static_cast<uint64_t>(product >> 64);
}

}  // namespace pyg_scale
