// first_places: where each of many numbers stands first, see pyg_scale/ops/first_places.py.
//
// A table with open addressing. Threads race for slots, so which slot a number gets depends on who
// comes first; the least place that was written to it does not.
#pragma once

#include "device.cuh"
#include "loading.h"

namespace pyg_scale::cuda {

constexpr uint64_t kEmptySlot = ~uint64_t{0};  // no number is negative

PYG_SCALE_DEVICE void first_places_clear_kernel(const FirstPlaces& args, int) {
  const int64_t slot = Lanes(1).group();
  if (slot >= args.slots) return;
  args.held[slot] = kEmptySlot;
  args.least[slot] = ~uint32_t{0};
}

// The slot of a number, which takes the next free one if it has none. Slots never change hands, so
// what was read without a lock is either right or empty, and then the exchange decides.
PYG_SCALE_DEVICE int64_t slot_of(const FirstPlaces& args, uint64_t key) {
  using Word = unsigned long long;  // as CUDA's exchange takes it
  const uint64_t mask = static_cast<uint64_t>(args.slots) - 1;
  uint64_t at = mix(key) & mask;
  for (int64_t tries = 0; tries < args.slots; ++tries, at = (at + 1) & mask) {
    uint64_t there = args.held[at];
    if (there == kEmptySlot) {
      there = atomicCAS(reinterpret_cast<Word*>(args.held + at), static_cast<Word>(kEmptySlot),
                        static_cast<Word>(key));
      if (there == kEmptySlot) return static_cast<int64_t>(at);
    }
#if !defined(PYG_SCALE_FAULT_SHARED_SLOTS)
    if (there == key)
#endif
      return static_cast<int64_t>(at);
  }
  stop_unless(false);
  return 0;
}

PYG_SCALE_DEVICE void first_places_find_kernel(const FirstPlaces& args, int) {
  const int64_t i = Lanes(1).group();
  if (i >= args.count) return;
  const int64_t key = args.key[i];
  stop_unless(key >= 0);
  const int64_t slot = slot_of(args, static_cast<uint64_t>(key));
  const auto place = static_cast<uint32_t>(i);
#if defined(PYG_SCALE_FAULT_ANY_PLACE)
  args.least[slot] = place;
#else
  if (args.least[slot] > place) atomicMin(args.least + slot, place);
#endif
  args.out[i] = slot;  // for the next kernel
}

PYG_SCALE_DEVICE void first_places_read_kernel(const FirstPlaces& args, int) {
  const int64_t i = Lanes(1).group();
  if (i < args.count) args.out[i] = args.least[args.out[i]];
}

}  // namespace pyg_scale::cuda
