// Which of a node's in-edges are sampled: positions, drawn from the key of the node.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "buffer.h"
#include "keys.h"

namespace pyg_scale {

// The in-edges of one node that may be chosen: positions [begin, end) of the edge type.
struct Candidates {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Chooses positions. One per thread; what it holds is only memory.
class Picker {
 public:
  // More draws with replacement from one node than these are refused.
  static constexpr int64_t kMostDraws = (int64_t{1} << 31) - 1;

  // At most this many positions are chosen from d candidates with k wanted (k < 0: all).
  static int64_t most(int64_t d, int64_t k, bool replace) {
    if (k < 0 || d == 0) return d;
    return replace ? k : std::min(k, d);
  }

  // Writes the chosen positions to `out`, in order of the draws; returns how many.
  int64_t uniform(uint64_t key, Candidates c, int64_t k, bool replace, int64_t* out) {
    const int64_t d = c.size();
    if (k < 0 || (!replace && k >= d)) return all(c, out);
    if (d == 0) return 0;
    if (replace) {
      for (int64_t i = 0; i < k; ++i) out[i] = c.begin + below(key, i, d);
    } else if (k <= kScan) {
      floyd_scan(key, c.begin, d, k, out);
    } else {
      floyd_bitmap(key, c.begin, d, k, out);
    }
    return k;
  }

  // As `uniform`, in proportion to weights. `prefix` are the running sums of the node's
  // weights by position; `first` is the node's first position.
  int64_t weighted(uint64_t key, Candidates c, int64_t first, const int64_t* prefix, int64_t k,
                   bool replace, int64_t* out) {
    const int64_t d = c.size();
    if (k < 0 || (!replace && k >= d)) return all(c, out);
    if (d == 0) return 0;
    const int64_t base = c.begin > first ? prefix[c.begin - 1] : 0;
    if (base < 0 || prefix[c.end - 1] < base) [[unlikely]]
      not_rising(c);
    const int64_t total = prefix[c.end - 1] - base;
    if (!replace) return successive(key, c, base, total, prefix, k, out);
    if (total == 0) return 0;
    for (int64_t i = 0; i < k; ++i) out[i] = locate(c, prefix, base + below(key, i, total));
    return k;
  }

  size_t bytes() const { return bits_.bytes() + picked_.bytes(); }

 private:
  static constexpr int64_t kScan = 64;  // up to here scanning what is picked beats a set

  struct Pick {
    int64_t before, weight;  // sum of the weights before it in the window; its own
  };

  static int64_t below(uint64_t key, int64_t index, int64_t size) {
    return static_cast<int64_t>(
        bounded(key, static_cast<uint64_t>(index), static_cast<uint64_t>(size)));
  }

  static int64_t all(Candidates c, int64_t* out) {
    for (int64_t i = c.begin; i < c.end; ++i) *out++ = i;
    return c.size();
  }

  // Floyd: draw one of the first j + 1 candidates. If it was picked before, pick candidate j.
  static void floyd_scan(uint64_t key, int64_t begin, int64_t d, int64_t k, int64_t* out) {
    for (int64_t i = 0; i < k; ++i) {
      const int64_t j = d - k + i;
      const int64_t position = begin + below(key, i, j + 1);
      bool taken = false;
      for (int64_t p = 0; p < i; ++p) taken |= out[p] == position;
      out[i] = taken ? begin + j : position;
    }
  }

  void floyd_bitmap(uint64_t key, int64_t begin, int64_t d, int64_t k, int64_t* out) {
    const int64_t words = d / 64 + 1;
    if (words > bits_.size()) {
      bits_.reserve(words);
      bits_.set_size(words);
      std::memset(bits_.data(), 0, static_cast<size_t>(words) * sizeof(uint64_t));
    }
    for (int64_t i = 0; i < k; ++i) {
      int64_t t = below(key, i, d - k + i + 1);
      if (bits_[t / 64] >> (t % 64) & 1) t = d - k + i;
      bits_[t / 64] |= uint64_t{1} << (t % 64);
      out[i] = begin + t;
    }
    for (int64_t i = 0; i < k; ++i) bits_[(out[i] - begin) / 64] = 0;
  }

  [[noreturn]] static void not_rising(Candidates c) {
    throw std::invalid_argument(
        "weight_prefix must rise from 0 within a node, but does not at positions " +
        std::to_string(c.begin) + " to " + std::to_string(c.end - 1));
  }

  // The first position whose running sum is beyond `sum`.
  static int64_t locate(Candidates c, const int64_t* prefix, int64_t sum) {
    const int64_t position = std::upper_bound(prefix + c.begin, prefix + c.end, sum) - prefix;
    if (position == c.end) [[unlikely]]
      not_rising(c);
    return position;
  }

  // Successive sampling without replacement: draw from what is left of the total, and step
  // over the intervals of the positions that were picked before, in ascending order.
  int64_t successive(uint64_t key, Candidates c, int64_t base, int64_t total, const int64_t* prefix,
                     int64_t k, int64_t* out) {
    picked_.clear();
    picked_.reserve(k);
    int64_t left = total;
    for (int64_t i = 0; i < k; ++i) {
      if (left == 0) return i;
      int64_t t = below(key, i, left), at = 0;
      while (at < i && t >= picked_[at].before) t += picked_[at++].weight;
      const int64_t position = locate(c, prefix, base + t);
      // sums must rise: otherwise this wraps round, and is refused
      const uint64_t until = position > c.begin ? static_cast<uint64_t>(prefix[position - 1]) -
                                                      static_cast<uint64_t>(base)
                                                : 0;
      const auto before = static_cast<int64_t>(until);
      const auto weight = static_cast<int64_t>(static_cast<uint64_t>(prefix[position]) -
                                               static_cast<uint64_t>(base) - until);
      if (before < 0 || weight <= 0 || weight > left) [[unlikely]]
        not_rising(c);
      picked_.set_size(i + 1);
      std::memmove(picked_.data() + at + 1, picked_.data() + at,
                   static_cast<size_t>(i - at) * sizeof(Pick));
      picked_[at] = {before, weight};
      left -= weight;
      out[i] = position;
    }
    return k;
  }

  Buffer<uint64_t> bits_;  // all zero between calls
  Buffer<Pick> picked_;    // in order of position
};

}  // namespace pyg_scale
