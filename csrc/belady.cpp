// belady: which rows a cache keeps when the coming batches are known (the meaning is in
// pyg_scale/ops/belady.py).

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "row_cache.h"

namespace pyg_scale {
namespace {

constexpr int32_t kNever = std::numeric_limits<int32_t>::max();
constexpr int32_t kTaken = -1;

// Bit b % bits of a row's word says that batch b, one of the `bits` coming ones, needs it.
template <typename Word>
constexpr int64_t kBits = sizeof(Word) * 8;

template <typename Word>
uint64_t place_of(int64_t batch) {
  return static_cast<uint64_t>(batch) % kBits<Word>;
}

template <typename Word>
int32_t next_use(Word word, int64_t now) {
  if (word == 0) return kNever;
  const auto next = now + 1;
  const Word turned = std::rotr(word, static_cast<int>(place_of<Word>(next)));
  return static_cast<int32_t>(next + std::countr_zero(turned));
}

struct Slots {
  int32_t* slot_of;
  int64_t* owner;
  int32_t* next;     // the batch that needs the row next
  uint8_t* visited;  // since the hand passed
  int64_t* used;     // slots that have an owner: the first ones
  int64_t* hand;
  int64_t count;
  int64_t num_rows;

  [[noreturn, gnu::noinline, gnu::cold]] void no_row(int64_t slot) const {
    fail("owner: slot " + std::to_string(slot) + " has row " + std::to_string(owner[slot]) +
         ", but there are only " + std::to_string(num_rows));
  }

  // The row of a slot.
  int64_t row(int64_t slot) const {
    const int64_t row = owner[slot];
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(num_rows)) [[unlikely]]
      no_row(slot);
    return row;
  }
};

// Refuses a batch number unless int32 holds it and those of the batches announced after it.
void check_batch(int64_t batch, const char* name) {
  if (batch < -kNever || batch >= kNever - 64) {
    fail(std::string(name) + " must fit into 31 bits (got " + std::to_string(batch) + ")");
  }
}

[[noreturn, gnu::noinline, gnu::cold]] void no_slot(int64_t slot, int64_t count) {
  fail("slot_of: there is no slot " + std::to_string(slot) + "; there are " +
       std::to_string(count));
}

// The number of rows at each distance. The last entry counts those that no batch needs.
template <typename Word>
struct Distances {
  std::vector<int64_t> count = std::vector<int64_t>(kBits<Word> + 1);

  static size_t of(int32_t next, int64_t now) {
    const int64_t distance = int64_t{next} - now - 1;
    return static_cast<size_t>(distance < 0 ? kBits<Word> : std::min(distance, kBits<Word>));
  }
};

// Takes `wanted` of the slots that no coming batch needs, in the hand's order. A slot that was
// visited since the hand passed is spared once.
void by_hand(const Slots& slots, int64_t wanted, std::vector<int32_t>& victims) {
  int64_t at = *slots.hand, left = wanted;
  for (int64_t s = 0; s < 2 * *slots.used && left > 0; ++s) {
    if (slots.next[at] == kNever && !slots.visited[at]) {
      slots.next[at] = kTaken;
      victims.push_back(static_cast<int32_t>(at));
      --left;
    } else if (slots.next[at] == kNever) {
      slots.visited[at] = 0;
    }
    at = at + 1 == *slots.used ? 0 : at + 1;
  }
  *slots.hand = at;
}

// The same for rows that are not known to be needed either. Each of them may try one slot, and no
// slot is tried twice. Returns how many rows got a slot.
int64_t by_trying(const Slots& slots, int64_t tries, std::vector<int32_t>& victims) {
  int64_t at = *slots.hand, got = 0;
  for (int64_t s = 0; s < *slots.used && tries > 0; ++s) {
    if (slots.next[at] == kNever) {
      --tries;
      if (slots.visited[at]) {
        slots.visited[at] = 0;
      } else {
        slots.next[at] = kTaken;
        victims.push_back(static_cast<int32_t>(at));
        ++got;
      }
    }
    at = at + 1 == *slots.used ? 0 : at + 1;
  }
  *slots.hand = at;
  return got;
}

template <typename Word>
Tensors plan_for(const Slots& slots, Word* coming, const int64_t* id, int64_t size, int64_t now) {
  Plan plan(size);
  std::vector<int32_t> miss_next;
  const Word bit = static_cast<Word>(Word{1} << place_of<Word>(now));
  for (int64_t i = 0; i < size; ++i) {
    if (i + kPlanAhead < size) {
      __builtin_prefetch(slots.slot_of + id[i + kPlanAhead]);
      __builtin_prefetch(coming + id[i + kPlanAhead]);
    }
    const int64_t row = id[i];
    const int32_t found = slots.slot_of[row];
    coming[row] = static_cast<Word>(coming[row] & ~bit);
    plan.at[i] = -1;
    if (found > 0) {
      if (found > slots.count) [[unlikely]]
        no_slot(found - 1, slots.count);
      plan.at[i] = found - 1;
      slots.visited[found - 1] = 1;
      slots.next[found - 1] = next_use(coming[row], now);
    } else if (found < 0) {
      plan.again.push_back(i);
      plan.same.push_back(plan.earlier(found));
    } else {
      plan.miss.push_back(i);
      miss_next.push_back(next_use(coming[row], now));
      slots.slot_of[row] = -static_cast<int32_t>(plan.miss.size());
    }
  }
  const auto misses = static_cast<int64_t>(plan.miss.size());
  for (const int64_t i : plan.miss) slots.slot_of[id[i]] = 0;

  // Misses nearer than `last` are kept, and `at_last` of the misses at that distance.
  using Distance = Distances<Word>;
  const size_t never = static_cast<size_t>(kBits<Word>);
  Distance missed, kept;
  for (const int32_t next : miss_next) ++missed.count[Distance::of(next, now)];
  size_t last = never;
  int64_t at_last = missed.count[never];
  std::vector<int32_t> victims;
  if (*slots.used + misses > slots.count) {
    for (int64_t s = 0; s < *slots.used; ++s) ++kept.count[Distance::of(slots.next[s], now)];
    const int64_t spare = slots.count - *slots.used;
    int64_t room = slots.count, nearer = 0;
    for (last = 0; last < never; ++last) {
      if (kept.count[last] + missed.count[last] > room) break;
      room -= kept.count[last] + missed.count[last];
      nearer += missed.count[last];
    }
    if (last == never) {
      by_hand(slots, std::max<int64_t>(0, nearer - spare), victims);
      const int64_t direct = std::min(at_last, std::max<int64_t>(0, spare - nearer));
      at_last = direct + by_trying(slots, at_last - direct, victims);
    } else {
      const int64_t stay = std::min(kept.count[last], room);
      at_last = std::min(missed.count[last], room - stay);
      const int64_t wanted = std::max<int64_t>(0, nearer + at_last - spare);
      int64_t staying = stay;
      for (int64_t s = 0; s < *slots.used && static_cast<int64_t>(victims.size()) < wanted; ++s) {
        const size_t d = Distance::of(slots.next[s], now);
        if (d > last || (d == last && staying-- <= 0)) victims.push_back(static_cast<int32_t>(s));
      }
    }
    for (const int32_t s : victims) slots.slot_of[slots.row(s)] = 0;
  }
  auto victim = victims.begin();
  for (size_t k = 0; k < plan.miss.size(); ++k) {
    const size_t d = Distance::of(miss_next[k], now);
    if (d > last || (d == last && at_last-- <= 0)) continue;
    if (*slots.used == slots.count && victim == victims.end()) break;
    const int64_t s = *slots.used < slots.count ? (*slots.used)++ : *victim++;
    const int64_t row = id[plan.miss[k]];
    slots.owner[s] = row;
    slots.slot_of[row] = static_cast<int32_t>(s + 1);
    slots.next[s] = miss_next[k];
    slots.visited[s] = 0;
    plan.fill.push_back(plan.miss[k]);
    plan.fill_slot.push_back(static_cast<int32_t>(s));
  }
  return plan.tensors();
}

// Calls f with a word of the size that `coming` has.
template <typename F>
auto with_word(const Tensor& coming, int64_t num_rows, const F& f) {
  check(coming.is_cpu() && coming.numel() == num_rows && coming.is_contiguous(),
        "coming has a wrong size or layout");
  switch (coming.scalar_type()) {
    case ScalarType::Byte: return f(uint8_t{});
    case ScalarType::Short: return f(uint16_t{});
    case ScalarType::Int: return f(uint32_t{});
    case ScalarType::Long: return f(uint64_t{});
    default: fail("coming must be uint8, int16, int32 or int64");
  }
}

Tensors belady_plan(Tensor slot_of, Tensor coming, Tensor owner, Tensor next, Tensor visited,
                    Tensor state, Tensor ids, int64_t now) {
  const int64_t num_rows = slot_of.numel(), count = owner.numel();
  auto* position = data_of<int64_t>(state, ScalarType::Long, 2, "state");
  const Slots slots{data_of<int32_t>(slot_of, ScalarType::Int, -1, "slot_of"),
                    data_of<int64_t>(owner, ScalarType::Long, -1, "owner"),
                    data_of<int32_t>(next, ScalarType::Int, count, "next"),
                    data_of<uint8_t>(visited, ScalarType::Byte, count, "visited"),
                    position,
                    position + 1,
                    count,
                    num_rows};
  const int64_t* id = checked_ids(ids, num_rows);
  check_state({&slot_of, &coming, &owner, &next, &visited, &state, &ids});
  check(count <= kMostSlots && 0 <= *slots.used && *slots.used <= count,
        "state: there are not so many slots in use");
  check(0 <= *slots.hand && *slots.hand < std::max<int64_t>(1, *slots.used),
        "state: the hand is at no slot");
  check_batch(now, "now");
  const auto run = [&](auto word) {
    using Word = decltype(word);
    return plan_for(slots, static_cast<Word*>(coming.mutable_data_ptr()), id, ids.numel(), now);
  };
  return with_word(coming, num_rows, run);
}

// Batch number `batch` will need these rows; with `batch` < 0, forget everything about them.
void belady_announce(Tensor slot_of, Tensor coming, Tensor next, Tensor ids, int64_t batch) {
  const int64_t size = ids.numel();
  const int64_t* id = checked_ids(ids, slot_of.numel());
  const int32_t* slot = data_of<int32_t>(slot_of, ScalarType::Int, -1, "slot_of");
  auto* when = data_of<int32_t>(next, ScalarType::Int, -1, "next");
  const int64_t slots = next.numel();
  check_state({&slot_of, &coming, &next, &ids});
  check_batch(batch, "batch");
  const auto run = [&](auto word) {
    using Word = decltype(word);
    auto* words = static_cast<Word*>(coming.mutable_data_ptr());
    const Word bit = batch < 0 ? Word{0} : static_cast<Word>(Word{1} << place_of<Word>(batch));
    for (int64_t i = 0; i < size; ++i) {
      if (i + kPlanAhead < size) {
        __builtin_prefetch(slot + id[i + kPlanAhead]);
        __builtin_prefetch(words + id[i + kPlanAhead]);
      }
      const int32_t found = slot[id[i]];
      words[id[i]] = batch < 0 ? Word{0} : static_cast<Word>(words[id[i]] | bit);
      if (found <= 0) continue;
      if (found > slots) [[unlikely]]
        no_slot(found - 1, slots);
      if (batch < 0) {
        when[found - 1] = kNever;
      } else if (when[found - 1] == kNever) {
        when[found - 1] = static_cast<int32_t>(batch);
      }
    }
  };
  with_word(coming, slot_of.numel(), run);
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "belady_plan(Tensor(a!) slot_of, Tensor(b!) coming, Tensor(c!) owner, Tensor(d!) next, "
      "Tensor(e!) visited, Tensor(f!) state, Tensor ids, int now) -> Tensor[]");
  m.def(
      "belady_announce(Tensor slot_of, Tensor(a!) coming, Tensor(b!) next, Tensor ids, int batch) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("belady_plan", TORCH_BOX(&pyg_scale::belady_plan));
  m.impl("belady_announce", TORCH_BOX(&pyg_scale::belady_announce));
}
