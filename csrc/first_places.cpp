// first_places on the CPU: where each of many numbers stands first
// (pyg_scale/ops/first_places.py). csrc/cuda/first_places_ops.cpp has it for devices.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "graph_view.h"
#include "pool.h"
#include "relabel.h"

namespace pyg_scale {
namespace {

constexpr size_t kKeptBytes = size_t{1} << 26;  // by a thread, between calls
constexpr int64_t kAhead = 16;                  // covers the latency of memory

template <typename Slots>
PYG_SCALE_PREFETCH void find(Slots& slots, const int64_t* key, int64_t n, int64_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) slots.prefetch(static_cast<uint64_t>(key[i + kAhead]));
    const uint64_t first =
        slots.find_or_insert(static_cast<uint64_t>(key[i]), static_cast<uint64_t>(i));
    out[i] = static_cast<int64_t>(first);
  }
}

Tensor first_places(Tensor key, int64_t distinct) {
  const int64_t n = key.numel();
  check(distinct >= 0, "distinct must not be negative");
  const int64_t* keys = int64_data(key, n, "key");
  int64_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    check(keys[i] >= 0, "key must not be negative");
    most = std::max(most, keys[i]);
  }
  auto& table = kept_by_thread<RelabelTable, struct FirstPlaces>();
  table.begin(static_cast<uint64_t>(most) + 1);
  table.reserve(n);
  Tensor place = pool_empty({n}, ScalarType::Long);
  int64_t* out = place.mutable_data_ptr<int64_t>();
  table.use([&](auto& slots) __attribute__((always_inline)) { find(slots, keys, n, out); });
  if (table.bytes() > kKeptBytes) table.release();
  return place;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("first_places(Tensor key, int distinct) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("first_places", TORCH_BOX(&pyg_scale::first_places));
}
