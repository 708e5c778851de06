// sieve: which rows a cache keeps when nothing is known of the future (the meaning is in
// pyg_scale/ops/sieve.py).

#include <torch/csrc/stable/library.h>

#include <string>

#include "row_cache.h"

namespace pyg_scale {
namespace {

constexpr int32_t kNone = -1;

// A queue of slots, from the newest (head) to the oldest (tail), and a hand that moves from old to
// new (Zhang et al., NSDI 2024).
struct Queue {
  int64_t &used, &head, &tail, &hand;
  int64_t* owner;
  int32_t *newer, *older;
  uint8_t* visited;
  int32_t* slot_of;
  int64_t count, num_rows;

  // Refuses a number that is not a slot: the state of a cache comes from its user.
  int64_t slot(int64_t at, const char* name) const {
    if (static_cast<uint64_t>(at) >= static_cast<uint64_t>(count)) [[unlikely]] {
      no_slot(at, name);
    }
    return at;
  }

  // Not inlined: the loops that look at slots stay small.
  [[noreturn, gnu::noinline, gnu::cold]] void no_slot(int64_t at, const char* name) const {
    fail(std::string(name) + ": there is no slot " + std::to_string(at) + "; there are " +
         std::to_string(count));
  }

  int64_t slot_or_none(int64_t at, const char* name) const {
    return at == kNone ? at : slot(at, name);
  }

  // Gives a row a slot at the head. If none is free, the row that the hand comes to makes room.
  int32_t insert(int64_t row) {
    const auto slot = used < count ? static_cast<int32_t>(used++) : evict();
    owner[slot] = row;
    slot_of[row] = slot + 1;
    visited[slot] = 0;
    newer[slot] = kNone;
    older[slot] = static_cast<int32_t>(head);
    if (head != kNone) newer[this->slot(head, "older")] = slot;
    head = slot;
    if (tail == kNone) tail = slot;
    return slot;
  }

  int32_t evict() {
    int64_t at = slot(hand == kNone ? tail : hand, "state");
    while (visited[at]) {
      visited[at] = 0;
      at = slot(newer[at] == kNone ? tail : newer[at], "newer");
    }
    const int64_t after = slot_or_none(newer[at], "newer");
    const int64_t before = slot_or_none(older[at], "older");
    const int64_t row = owner[at];
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(num_rows)) [[unlikely]] {
      fail("owner: slot " + std::to_string(at) + " has row " + std::to_string(row) +
           ", but there are only " + std::to_string(num_rows));
    }
    hand = after;
    if (after == kNone) {
      head = before;
    } else {
      older[after] = static_cast<int32_t>(before);
    }
    if (before == kNone) {
      tail = after;
    } else {
      newer[before] = static_cast<int32_t>(after);
    }
    slot_of[row] = 0;
    return static_cast<int32_t>(at);
  }
};

// One row after the other. What was in a slot before the request can still be copied from it: slots
// are filled when that is done. A row that is asked for again after it was evicted is a miss again.
Tensors sieve_plan(Tensor slot_of, Tensor owner, Tensor newer, Tensor older, Tensor visited,
                   Tensor since, Tensor state, Tensor ids) {
  const int64_t slots = owner.numel(), size = ids.numel();
  auto* at = data_of<int64_t>(state, ScalarType::Long, 5, "state");
  auto* inserted = data_of<int64_t>(since, ScalarType::Long, slots, "since");
  Queue queue{at[0],
              at[1],
              at[2],
              at[3],
              data_of<int64_t>(owner, ScalarType::Long, -1, "owner"),
              data_of<int32_t>(newer, ScalarType::Int, slots, "newer"),
              data_of<int32_t>(older, ScalarType::Int, slots, "older"),
              data_of<uint8_t>(visited, ScalarType::Byte, slots, "visited"),
              data_of<int32_t>(slot_of, ScalarType::Int, -1, "slot_of"),
              slots,
              slot_of.numel()};
  const int64_t* id = checked_ids(ids, slot_of.numel());
  check_state({&slot_of, &owner, &newer, &older, &visited, &since, &state, &ids});
  const int64_t base = at[4];  // rows of earlier requests
  check(slots <= kMostSlots && 0 <= queue.used && queue.used <= slots,
        "state: there are not so many slots in use");
  check_count(base, "state: the number of rows asked for");
  for (const int64_t each : {queue.head, queue.tail, queue.hand}) queue.slot_or_none(each, "state");
  Plan plan(size);
  for (int64_t i = 0; i < size; ++i) {
    if (i + kPlanAhead < size) __builtin_prefetch(queue.slot_of + id[i + kPlanAhead]);
    plan.at[i] = -1;
    const int64_t slot = int64_t{queue.slot_of[id[i]]} - 1;
    if (slot >= 0) {
      queue.visited[queue.slot(slot, "slot_of")] = 1;
      const int64_t number = inserted[slot];
      if (number < base) {
        plan.at[i] = static_cast<int32_t>(slot);
      } else {
        check(number - base < i, "since has a row that comes later");
        plan.again.push_back(i);
        plan.same.push_back(number - base);
      }
      continue;
    }
    plan.miss.push_back(i);
    const int32_t into = queue.insert(id[i]);
    inserted[into] = base + i;
  }
  for (const int64_t i : plan.miss) {
    const int32_t slot = queue.slot_of[id[i]] - 1;
    if (slot < 0 || inserted[slot] != base + i) continue;  // it was evicted since
    plan.fill.push_back(i);
    plan.fill_slot.push_back(slot);
  }
  at[4] = base + size;
  return plan.tensors();
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "sieve_plan(Tensor(a!) slot_of, Tensor(b!) owner, Tensor(c!) newer, Tensor(d!) older, "
      "Tensor(e!) visited, Tensor(f!) since, Tensor(g!) state, Tensor ids) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("sieve_plan", TORCH_BOX(&pyg_scale::sieve_plan));
}
