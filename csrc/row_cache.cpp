// row_cache: rows in slots, copied to and from batches (the meaning is in
// pyg_scale/ops/row_cache.py).

#include "row_cache.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

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
  m.def("cache_scatter(Tensor rows, Tensor take, Tensor position, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("cache_lookup", TORCH_BOX(&pyg_scale::cache_lookup));
  m.impl("cache_plan_placed", TORCH_BOX(&pyg_scale::cache_plan_placed));
  m.impl("cache_copy", TORCH_BOX(&pyg_scale::cache_copy));
  m.impl("cache_fill", TORCH_BOX(&pyg_scale::cache_fill));
  m.impl("cache_scatter", TORCH_BOX(&pyg_scale::cache_scatter));
}
