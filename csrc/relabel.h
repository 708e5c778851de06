// From the identity of a node to its row in the batch: the table behind every lookup.
#pragma once

#include <bit>
#include <cstdint>

#include "buffer.h"
#include "prefetch.h"

namespace pyg_scale {

// Open addressing with linear probing, of (identity -> row). A slot also holds the number of the
// batch (the epoch) that wrote it, so that the table is not cleared between batches: slots of
// another epoch are empty. Where identity, row and epoch fit, a slot is one word
// [epoch | identity | row]; else ("wide") two, [identity] and [epoch | row].
class RelabelTable {
 public:
  // Starts a batch of identities in {0, ..., bound - 1}.
  void begin(uint64_t bound) {
    key_bits_ = std::max(key_bits_, bound > 1 ? static_cast<int>(std::bit_width(bound - 1)) : 1);
    int bits = table_bits_;
    if (bits == 0) bits = kMinBits;
    while (bits > kMinBits && used_ < (int64_t{1} << bits) / 8) --bits;
    used_ = 0;
    const bool wide = key_bits_ + bits + kMinEpochBits > 64;
    if (bits != table_bits_ || wide != wide_ || key_bits_ != layout_key_bits_) {
      allot(bits, wide);
    } else if (++epoch_ > max_epoch_) {
      clear();
    }
  }

  bool wide() const { return wide_; }
  size_t bytes() const { return slots_.bytes(); }
  void release() {
    slots_.release();
    table_bits_ = key_bits_ = 0;
    used_ = 0;
  }

  // Makes room for `rows` identities in all. Rehashes when the table gets too full.
  void reserve(int64_t rows) {
    if (rows > limit_) [[unlikely]]
      rehash(rows);
  }

  template <bool kWide>
  PYG_SCALE_PREFETCH void prefetch(uint64_t key) const {
    __builtin_prefetch(slots_.data() + (home(key) << kWide), 1);
  }

  // The row of `key`; if it has none, `next` becomes its row.
  template <bool kWide>
  uint64_t find_or_insert(uint64_t key, uint64_t next) {
    uint64_t* slots = slots_.data();
    for (uint64_t i = home(key);; i = (i + 1) & mask_) {
      if constexpr (kWide) {
        uint64_t* slot = slots + 2 * i;
        const bool empty = (slot[1] >> row_bits_) != epoch_;
        if (empty || slot[0] == key) {
          const uint64_t row = empty ? next : slot[1] & row_mask_;
          slot[0] = key;
          slot[1] = epoch_ << row_bits_ | row;
          used_ += empty;
          return row;
        }
      } else {
        const uint64_t wanted = epoch_ << key_bits_ | key, slot = slots[i];
        const bool hit = (slot >> row_bits_) == wanted;
        const bool empty = (slot >> epoch_shift_) != epoch_;
        if (hit | empty) [[likely]] {
          const uint64_t row = hit ? slot & row_mask_ : next;
          slots[i] = wanted << row_bits_ | row;
          used_ += empty;
          return row;
        }
      }
    }
  }

  // The row of `key`, or -1.
  int64_t find(uint64_t key) const {
    const uint64_t* slots = slots_.data();
    for (uint64_t i = home(key);; i = (i + 1) & mask_) {
      const uint64_t tail = slots[wide_ ? 2 * i + 1 : i];
      if ((tail >> epoch_shift_) != epoch_) return -1;
      const uint64_t held = wide_ ? slots[2 * i] : (tail >> row_bits_) & key_mask_;
      if (held == key) return static_cast<int64_t>(tail & row_mask_);
    }
  }

  PYG_SCALE_PREFETCH void prefetch(uint64_t key) const {
    __builtin_prefetch(slots_.data() + (home(key) << wide_));
  }

 private:
  static constexpr int kMinBits = 10;
  static constexpr int kMinEpochBits = 8;
  static constexpr int kWideRowBits = 40;

  uint64_t home(uint64_t key) const { return (key * 0x9E3779B97F4A7C15ull) >> hash_shift_; }

  void allot(int bits, bool wide) {
    const int64_t words = (int64_t{1} << bits) << wide;
    slots_.reserve(words);
    table_bits_ = bits;
    layout_key_bits_ = key_bits_;
    wide_ = wide;
    hash_shift_ = 64 - bits;
    mask_ = (uint64_t{1} << bits) - 1;
    limit_ = (int64_t{1} << bits) / 16 * 11;  // longer probes cost less than a larger table
    row_bits_ = wide ? kWideRowBits : bits;
    row_mask_ = (uint64_t{1} << row_bits_) - 1;
    key_mask_ = key_bits_ >= 64 ? ~uint64_t{0} : (uint64_t{1} << key_bits_) - 1;
    epoch_shift_ = wide ? row_bits_ : row_bits_ + key_bits_;
    max_epoch_ = (uint64_t{1} << (64 - epoch_shift_)) - 1;
    clear();
  }

  void clear() {
    std::memset(slots_.data(), 0, ((mask_ + 1) << wide_) * sizeof(uint64_t));
    epoch_ = 1;
  }

  void rehash(int64_t rows) {
    Buffer<uint64_t> keys;  // pairs (identity, row)
    keys.reserve(2 * used_);
    for (uint64_t i = 0; i <= mask_; ++i) {
      const uint64_t tail = slots_[static_cast<int64_t>(wide_ ? 2 * i + 1 : i)];
      if ((tail >> epoch_shift_) != epoch_) continue;
      keys.push(wide_ ? slots_[static_cast<int64_t>(2 * i)] : (tail >> row_bits_) & key_mask_);
      keys.push(tail & row_mask_);
    }
    int bits = table_bits_;
    while ((int64_t{1} << bits) / 16 * 11 < rows) ++bits;
    used_ = 0;
    allot(bits, key_bits_ + bits + kMinEpochBits > 64);
    for (int64_t i = 0; i < keys.size(); i += 2) {
      wide_ ? find_or_insert<true>(keys[i], keys[i + 1])
            : find_or_insert<false>(keys[i], keys[i + 1]);
    }
  }

  Buffer<uint64_t> slots_;
  int64_t used_ = 0;   // identities of this batch
  int64_t limit_ = 0;  // identities beyond which the table grows
  int table_bits_ = 0, key_bits_ = 0, layout_key_bits_ = 0;
  int row_bits_ = 0, epoch_shift_ = 0, hash_shift_ = 0;
  bool wide_ = false;
  uint64_t mask_ = 0, row_mask_ = 0, key_mask_ = 0, epoch_ = 0, max_epoch_ = 0;
};

}  // namespace pyg_scale
