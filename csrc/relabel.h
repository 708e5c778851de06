// From the identity of a node to its row in the batch: the table behind every lookup.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "buffer.h"
#include "graph_view.h"
#include "prefetch.h"

namespace pyg_scale {

// A table of (identity -> row) is one of three kinds of slots. Each slot also holds the number of
// the batch (the epoch) that wrote it, so that a table is not cleared between batches: slots of
// another epoch are empty. `find_or_insert` returns the row of an identity; if it has none, `next`
// becomes its row. A loop has slots as a local variable, which the compiler keeps in registers.

// A slot for every identity there is: [epoch | row].
struct DirectSlots {
  static constexpr int kRowBits = 40;

  uint64_t* slots = nullptr;
  uint64_t size = 0, epoch = 0;
  int64_t used = 0;  // identities of this batch

  PYG_SCALE_PREFETCH void prefetch(uint64_t key) const {
    prefetch_entry<1>(slots, static_cast<int64_t>(key));
  }

  PYG_SCALE_PREFETCH uint64_t find_or_insert(uint64_t key, uint64_t next) {
    if (key >= size) [[unlikely]]
      fail("a node is out of range");
    const uint64_t slot = slots[key];
    const bool hit = slot >> kRowBits == epoch;
    const uint64_t row = hit ? slot & ((uint64_t{1} << kRowBits) - 1) : next;
    slots[key] = epoch << kRowBits | row;
    used += !hit;
    return row;
  }

  int64_t find(uint64_t key) const {
    if (key >= size || slots[key] >> kRowBits != epoch) return -1;
    return static_cast<int64_t>(slots[key] & ((uint64_t{1} << kRowBits) - 1));
  }
};

// Open addressing with linear probing. Where identity, row and epoch fit, a slot is one word
// [epoch | identity | row]; else ("wide") two, [identity] and [epoch | row].
template <bool kWide>
struct HashedSlots {
  uint64_t* slots = nullptr;
  uint64_t mask = 0, epoch = 0;
  int hash_shift = 0, key_bits = 0, row_bits = 0;
  int64_t used = 0;

  uint64_t home(uint64_t key) const { return (key * 0x9E3779B97F4A7C15ull) >> hash_shift; }
  int epoch_shift() const { return kWide ? row_bits : row_bits + key_bits; }
  uint64_t row_mask() const { return (uint64_t{1} << row_bits) - 1; }

  PYG_SCALE_PREFETCH void prefetch(uint64_t key) const {
    __builtin_prefetch(slots + (home(key) << kWide), 1);
  }

  PYG_SCALE_PREFETCH uint64_t find_or_insert(uint64_t key, uint64_t next) {
    for (uint64_t i = home(key);; i = (i + 1) & mask) {
      if constexpr (kWide) {
        uint64_t* slot = slots + 2 * i;
        const bool empty = slot[1] >> row_bits != epoch;
        if (empty || slot[0] == key) {
          const uint64_t row = empty ? next : slot[1] & row_mask();
          slot[0] = key;
          slot[1] = epoch << row_bits | row;
          used += empty;
          return row;
        }
      } else {
        const uint64_t wanted = epoch << key_bits | key, slot = slots[i];
        const bool hit = slot >> row_bits == wanted, empty = slot >> epoch_shift() != epoch;
        if (hit | empty) [[likely]] {
          const uint64_t row = hit ? slot & row_mask() : next;
          slots[i] = wanted << row_bits | row;
          used += empty;
          return row;
        }
      }
    }
  }

  PYG_SCALE_PREFETCH int64_t find(uint64_t key) const {
    for (uint64_t i = home(key);; i = (i + 1) & mask) {
      const uint64_t tail = slots[kWide ? 2 * i + 1 : i];
      if (tail >> epoch_shift() != epoch) return -1;
      if (identity(i) == key) return static_cast<int64_t>(tail & row_mask());
    }
  }

  bool empty(uint64_t i) const { return slots[kWide ? 2 * i + 1 : i] >> epoch_shift() != epoch; }
  uint64_t row(uint64_t i) const { return slots[kWide ? 2 * i + 1 : i] & row_mask(); }
  uint64_t identity(uint64_t i) const {
    if constexpr (kWide) return slots[2 * i];
    return slots[i] >> row_bits & ((uint64_t{1} << key_bits) - 1);
  }
};

class RelabelTable {
 public:
  // Starts a batch of identities in {0, ..., bound - 1}.
  void begin(uint64_t bound) {
    const int64_t before = used_;
    used_ = 0;
    direct_ =
        bound <= kMostSlots && bound <= kSpread * static_cast<uint64_t>(std::max(before, kFewRows));
    direct_ ? begin_direct(bound) : begin_hashed(bound, before);
  }

  size_t bytes() const { return by_identity_.bytes() + hashed_.bytes(); }
  void release() {
    by_identity_.release();
    hashed_.release();
    direct_slots_ = {};
    table_bits_ = key_bits_ = 0;
    used_ = 0;
  }

  // Makes room for `rows` identities in all. Rehashes when the table gets too full.
  void reserve(int64_t rows) {
    if (!direct_ && rows > limit_) [[unlikely]]
      wide_ ? rehash<true>(rows) : rehash<false>(rows);
  }

  // Calls f(slots), which has the table for itself meanwhile.
  template <typename F>
  PYG_SCALE_PREFETCH void use(const F& f) {
    if (direct_) {
      DirectSlots slots = direct_slots_;
      f(slots);
      used_ += slots.used;
    } else if (wide_) {
      HashedSlots<true> slots = hashed_slots<true>();
      f(slots);
      used_ += slots.used;
    } else {
      HashedSlots<false> slots = hashed_slots<false>();
      f(slots);
      used_ += slots.used;
    }
  }

  // Calls f(slots), which only reads them.
  template <typename F>
  PYG_SCALE_PREFETCH void look(const F& f) const {
    if (direct_) {
      f(direct_slots_);
    } else if (wide_) {
      f(hashed_slots<true>());
    } else {
      f(hashed_slots<false>());
    }
  }

  uint64_t find_or_insert(uint64_t key, uint64_t next) {
    uint64_t row = 0;
    use([&](auto& slots) { row = slots.find_or_insert(key, next); });
    return row;
  }

  // The row of `key`, or -1.
  int64_t find(uint64_t key) const {
    if (direct_) return direct_slots_.find(key);
    return wide_ ? hashed_slots<true>().find(key) : hashed_slots<false>().find(key);
  }

  PYG_SCALE_PREFETCH void prefetch(uint64_t key) const {
    if (direct_) {
      direct_slots_.prefetch(key);
    } else if (wide_) {
      hashed_slots<true>().prefetch(key);
    } else {
      hashed_slots<false>().prefetch(key);
    }
  }

 private:
  static constexpr int kMinBits = 10;
  static constexpr int kMinEpochBits = 8;
  // A slot for every identity takes memory that is read here and there; where it is at most so many
  // times the last batch, that costs less than probing.
  static constexpr uint64_t kSpread = 16, kMostSlots = uint64_t{1} << 22;
  static constexpr int64_t kFewRows = 256;

  void begin_direct(uint64_t bound) {
    if (bound > direct_slots_.size) {
      by_identity_.reserve(static_cast<int64_t>(bound));
      direct_slots_.size = bound;
      direct_slots_.epoch = ~uint64_t{0} >> DirectSlots::kRowBits;  // the last one
    }
    direct_slots_.slots = by_identity_.data();
    if (++direct_slots_.epoch >> (64 - DirectSlots::kRowBits)) {
      std::memset(direct_slots_.slots, 0, direct_slots_.size * sizeof(uint64_t));
      direct_slots_.epoch = 1;
    }
  }

  void begin_hashed(uint64_t bound, int64_t before) {
    key_bits_ = std::max(key_bits_, bound > 1 ? static_cast<int>(std::bit_width(bound - 1)) : 1);
    int bits = table_bits_;
    if (bits == 0) bits = kMinBits;
    while (bits > kMinBits && before < (int64_t{1} << bits) / 8) --bits;
    const bool wide = key_bits_ + bits + kMinEpochBits > 64;
    if (bits != table_bits_ || wide != wide_ || key_bits_ != layout_key_bits_) {
      allot(bits, wide);
    } else if (++epoch_ > max_epoch_) {
      clear();
    }
  }

  template <bool kWide>
  HashedSlots<kWide> hashed_slots() const {
    return {const_cast<uint64_t*>(hashed_.data()),
            (uint64_t{1} << table_bits_) - 1,
            epoch_,
            64 - table_bits_,
            layout_key_bits_,
            row_bits_,
            0};
  }

  void allot(int bits, bool wide) {
    const int64_t words = (int64_t{1} << bits) << wide;
    hashed_.reserve(words);
    table_bits_ = bits;
    layout_key_bits_ = key_bits_;
    wide_ = wide;
    limit_ = (int64_t{1} << bits) / 16 * 11;  // longer probes cost less than a larger table
    row_bits_ = wide ? DirectSlots::kRowBits : bits;
    const int epoch_bits = 64 - row_bits_ - (wide ? 0 : key_bits_);
    max_epoch_ = (uint64_t{1} << epoch_bits) - 1;
    clear();
  }

  void clear() {
    std::memset(hashed_.data(), 0, ((size_t{1} << table_bits_) << wide_) * sizeof(uint64_t));
    epoch_ = 1;
  }

  template <bool kWas>
  void rehash(int64_t rows) {
    Buffer<uint64_t> keys;  // pairs (identity, row)
    keys.reserve(2 * used_);
    const HashedSlots<kWas> before = hashed_slots<kWas>();
    for (uint64_t i = 0; i <= before.mask; ++i) {
      if (before.empty(i)) continue;
      keys.push(before.identity(i));
      keys.push(before.row(i));
    }
    int bits = table_bits_;
    while ((int64_t{1} << bits) / 16 * 11 < rows) ++bits;
    used_ = 0;
    allot(bits, key_bits_ + bits + kMinEpochBits > 64);
    use([&](auto& slots) {
      for (int64_t i = 0; i < keys.size(); i += 2) slots.find_or_insert(keys[i], keys[i + 1]);
    });
  }

  bool direct_ = false;
  int64_t used_ = 0;  // identities of this batch

  Buffer<uint64_t> by_identity_;
  DirectSlots direct_slots_;

  Buffer<uint64_t> hashed_;
  int64_t limit_ = 0;  // identities beyond which the table grows
  int table_bits_ = 0, key_bits_ = 0, layout_key_bits_ = 0, row_bits_ = 0;
  bool wide_ = false;
  uint64_t epoch_ = 0, max_epoch_ = 0;
};

}  // namespace pyg_scale
