// row_cache: rows in slots, copied to and from batches (the meaning is in
// pyg_scale/ops/row_cache.py).

#include "row_cache.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "prefetch.h"
#include "row_copy.h"

namespace pyg_scale {
namespace {

struct ByteRows {
  char* data;
  int64_t count, bytes;

  char* operator[](int64_t i) const { return data + i * bytes; }
  PYG_SCALE_PREFETCH void prefetch(int64_t i) const { prefetch_row_start(data + i * bytes, bytes); }
};

ByteRows byte_rows(Tensor& tensor, const char* name) {
  check(tensor.dim() == 2, std::string(name) + " must have two dimensions");
  return {data_of<char>(tensor, ScalarType::Byte, -1, name), tensor.size(0), tensor.size(1)};
}

void check_positions(const int64_t* position, int64_t count, int64_t size) {
  check(all_within(position, count, size), "a position is out of range");
}

Tensor cache_lookup(Tensor slot_of, Tensor ids) {
  const int64_t count = ids.numel();
  const int64_t* id = checked_ids(ids, slot_of.numel());
  const int32_t* slot = data_of<int32_t>(slot_of, ScalarType::Int, -1, "slot_of");
  Tensor out = pool_empty({count}, ScalarType::Int);
  auto* at = static_cast<int32_t*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    if (i + kPlanAhead < count) __builtin_prefetch(slot + id[i + kPlanAhead]);
    at[i] = std::max(slot[id[i]], 0) - 1;
  }
  return out;
}

// The rows that go into slots are fixed. The first request for a row brings it.
Tensors cache_plan_placed(Tensor slot_of, Tensor loaded, Tensor ids) {
  const int64_t count = ids.numel();
  const int64_t* id = checked_ids(ids, slot_of.numel());
  int32_t* slot = data_of<int32_t>(slot_of, ScalarType::Int, -1, "slot_of");
  auto* there = data_of<uint8_t>(loaded, ScalarType::Byte, -1, "loaded");
  const int64_t slots = loaded.numel();
  check_state({&slot_of, &loaded, &ids});
  Plan plan(count);
  std::vector<int32_t> before;  // what slot_of was for each miss
  for (int64_t i = 0; i < count; ++i) {
    if (i + kPlanAhead < count) __builtin_prefetch(slot + id[i + kPlanAhead]);
    const int32_t found = slot[id[i]];
    plan.at[i] = -1;
    if (found < 0) {
      plan.again.push_back(i);
      plan.same.push_back(plan.earlier(found));
    } else if (found > slots) {
      fail("slot_of: there is no slot " + std::to_string(found - 1) + "; there are " +
           std::to_string(slots));
    } else if (found > 0 && there[found - 1]) {
      plan.at[i] = found - 1;
    } else {
      plan.miss.push_back(i);
      before.push_back(found);
      slot[id[i]] = -static_cast<int32_t>(plan.miss.size());
    }
  }
  for (size_t k = 0; k < plan.miss.size(); ++k) {
    slot[id[plan.miss[k]]] = before[k];
    if (before[k] == 0) continue;
    there[before[k] - 1] = 1;
    plan.fill.push_back(plan.miss[k]);
    plan.fill_slot.push_back(before[k] - 1);
  }
  return plan.tensors();
}

Tensor cache_copy(Tensor rows, Tensor held, Tensor slot_at, Tensor ids, Tensor out) {
  const int64_t count = ids.numel();
  const int64_t* id = int64_data(ids, count, "index");
  const ByteRows from = byte_rows(rows, "rows"), to = byte_rows(out, "out");
  const int64_t* holds = int64_data(held, from.count, "held");
  const int32_t* slot = data_of<int32_t>(slot_at, ScalarType::Int, count, "slot_at");
  check(to.count == count && to.bytes == from.bytes, "out has another shape than the request");
  check_apart(out, "out", {&rows, &held, &slot_at, &ids});
  const int64_t ahead = rows_ahead(from.bytes);
  std::vector<int64_t> late;
  for (int64_t i = 0; i < count; ++i) {
    if (i + ahead < count && slot[i + ahead] >= 0 && slot[i + ahead] < from.count) {
      from.prefetch(slot[i + ahead]);
      __builtin_prefetch(holds + slot[i + ahead]);
    }
    if (slot[i] < 0) continue;
    check(slot[i] < from.count, "a slot is out of range");
    if (holds[slot[i]] == id[i]) {
      std::memcpy(to[i], from[slot[i]], static_cast<size_t>(to.bytes));
    } else {
      late.push_back(i);
    }
  }
  return numbers(late);
}

void cache_fill(Tensor rows, Tensor held, Tensor slots, Tensor position, Tensor ids, Tensor out) {
  const int64_t count = slots.numel();
  const ByteRows to = byte_rows(rows, "rows"), from = byte_rows(out, "out");
  const int64_t* id = int64_data(ids, from.count, "index");
  const int64_t* at = int64_data(position, count, "position");
  const int32_t* slot = data_of<int32_t>(slots, ScalarType::Int, count, "slots");
  auto* holds = data_of<int64_t>(held, ScalarType::Long, to.count, "held");
  check(to.bytes == from.bytes, "out has rows of another size");
  check_apart(rows, "rows", {&held, &slots, &position, &ids, &out});
  check_apart(held, "held", {&slots, &position, &ids, &out});
  check_positions(at, count, from.count);
  const int64_t ahead = rows_ahead(from.bytes);
  for (int64_t i = 0; i < count; ++i) {
    if (i + ahead < count) from.prefetch(at[i + ahead]);
    check(slot[i] >= 0 && slot[i] < to.count, "a slot is out of range");
    std::memcpy(to[slot[i]], from[at[i]], static_cast<size_t>(to.bytes));
    holds[slot[i]] = id[at[i]];
  }
}

void cache_scatter(Tensor rows, Tensor take, Tensor position, Tensor out) {
  const int64_t count = position.numel();
  const ByteRows from = byte_rows(rows, "rows"), to = byte_rows(out, "out");
  const bool all = take.numel() == 0;
  const IntColumn source = int_column(take, "take");
  const int64_t* at = int64_data(position, count, "position");
  check(to.bytes == from.bytes && (all ? count <= from.count : take.numel() == count),
        "rows and out do not fit");
  if (!all) {
    check(first_outside(source, count, from.count) == count, "a position is out of range");
  }
  check_positions(at, count, to.count);
  check_apart(out, "out", {&take, &position});  // rows may be those of out
  const int64_t ahead = rows_ahead(from.bytes);
  for (int64_t i = 0; i < count; ++i) {
    if (!all && i + ahead < count) from.prefetch(source[i + ahead]);
    put_row(to[at[i]], from[all ? i : source[i]], to.bytes);
  }
  streams_end();
}

// Where the rows of a request are that stay in their slots: a slot, or -1 - p for row p of those
// that are brought. These are the misses, then `moved`: rows whose slots the request refills.
std::tuple<Tensor, Tensor> cache_places(Tensor slot_at, Tensor miss, Tensor fill_slot, Tensor again,
                                        Tensor same, int64_t num_slots) {
  const int64_t count = slot_at.numel(), misses = miss.numel(), repeats = again.numel();
  const int32_t* slot = data_of<int32_t>(slot_at, ScalarType::Int, -1, "slot_at");
  const int64_t* missed = int64_data(miss, misses, "miss");
  const int64_t* later = int64_data(again, repeats, "again");
  const int64_t* first = int64_data(same, repeats, "same");
  const int32_t* refilled = data_of<int32_t>(fill_slot, ScalarType::Int, -1, "fill_slot");
  for (const auto& [position, size] :
       {std::pair{missed, misses}, {later, repeats}, {first, repeats}})
    check_positions(position, size, count);
  check(num_slots >= 0 && num_slots <= kMostSlots, "there are too many slots");
  std::vector<bool> leaves(static_cast<size_t>(fill_slot.numel() ? num_slots : 0));
  for (int64_t i = 0; i < fill_slot.numel(); ++i) {
    check(refilled[i] >= 0 && refilled[i] < num_slots, "a slot is out of range");
    leaves[static_cast<size_t>(refilled[i])] = true;
  }
  Tensor out = pool_empty({count}, ScalarType::Long);
  auto* place = static_cast<int64_t*>(out.mutable_data_ptr());
  std::vector<int64_t> moved;
  for (int64_t i = 0; i < count; ++i) {
    place[i] = slot[i];
    check(slot[i] < num_slots, "a slot is out of range");
    if (leaves.empty() || slot[i] < 0 || !leaves[static_cast<size_t>(slot[i])]) continue;
    place[i] = -1 - misses - static_cast<int64_t>(moved.size());
    moved.push_back(i);
  }
  for (int64_t k = 0; k < misses; ++k) place[missed[k]] = -1 - k;
  for (int64_t k = 0; k < repeats; ++k) place[later[k]] = place[first[k]];
  return {out, numbers(moved)};
}

// Counts a use of each slot that holds the row it should. Other places become -1 - next, ..., and
// their positions are returned.
Tensor cache_pin(Tensor pins, Tensor held, Tensor place, Tensor ids, int64_t next) {
  const int64_t count = place.numel(), slots = held.numel();
  auto* at = data_of<int64_t>(place, ScalarType::Long, -1, "place");
  const int64_t* id = int64_data(ids, count, "index");
  const int64_t* holds = int64_data(held, slots, "held");
  auto* uses = data_of<int32_t>(pins, ScalarType::Int, slots, "pins");
  check_apart(pins, "pins", {&held, &place, &ids});
  check_apart(place, "place", {&held, &ids});
  check_count(next, "next");
  for (int64_t i = 0; i < count; ++i) check(at[i] < slots, "a slot is out of range");
  std::vector<int64_t> late;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kPlanAhead < count && at[i + kPlanAhead] >= 0) {
      __builtin_prefetch(holds + at[i + kPlanAhead]);
      __builtin_prefetch(uses + at[i + kPlanAhead], 1);
    }
    if (at[i] < 0) continue;
    if (holds[at[i]] == id[i]) {
      uses[at[i]] = static_cast<int32_t>(static_cast<uint32_t>(uses[at[i]]) + 1);
    } else {
      at[i] = -1 - next - static_cast<int64_t>(late.size());
      late.push_back(i);
    }
  }
  return numbers(late);
}

void cache_unpin(Tensor pins, Tensor place) {
  const int64_t count = place.numel(), slots = pins.numel();
  const int64_t* at = int64_data(place, count, "place");
  auto* uses = data_of<int32_t>(pins, ScalarType::Int, slots, "pins");
  check_apart(pins, "pins", {&place});
  for (int64_t i = 0; i < count; ++i) check(at[i] < slots, "a slot is out of range");
  for (int64_t i = 0; i < count; ++i) {
    if (at[i] >= 0) uses[at[i]] = static_cast<int32_t>(static_cast<uint32_t>(uses[at[i]]) - 1);
  }
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("cache_lookup(Tensor slot_of, Tensor ids) -> Tensor");
  m.def("cache_plan_placed(Tensor(a!) slot_of, Tensor(b!) loaded, Tensor ids) -> Tensor[]");
  m.def(
      "cache_copy(Tensor rows, Tensor held, Tensor slot_at, Tensor ids, Tensor(a!) out) -> Tensor");
  m.def(
      "cache_fill(Tensor(a!) rows, Tensor(b!) held, Tensor slots, Tensor position, Tensor ids, "
      "Tensor out) -> ()");
  m.def(
      "cache_places(Tensor slot_at, Tensor miss, Tensor fill_slot, Tensor again, Tensor same, "
      "int num_slots) -> (Tensor, Tensor)");
  m.def(
      "cache_pin(Tensor(a!) pins, Tensor held, Tensor(b!) place, Tensor ids, int next) -> "
      "Tensor");
  m.def("cache_unpin(Tensor(a!) pins, Tensor place) -> ()");
  m.def("cache_scatter(Tensor rows, Tensor take, Tensor position, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("cache_lookup", TORCH_BOX(&pyg_scale::cache_lookup));
  m.impl("cache_plan_placed", TORCH_BOX(&pyg_scale::cache_plan_placed));
  m.impl("cache_copy", TORCH_BOX(&pyg_scale::cache_copy));
  m.impl("cache_fill", TORCH_BOX(&pyg_scale::cache_fill));
  m.impl("cache_places", TORCH_BOX(&pyg_scale::cache_places));
  m.impl("cache_pin", TORCH_BOX(&pyg_scale::cache_pin));
  m.impl("cache_unpin", TORCH_BOX(&pyg_scale::cache_unpin));
  m.impl("cache_scatter", TORCH_BOX(&pyg_scale::cache_scatter));
}
