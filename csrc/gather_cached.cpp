// gather_cached on the CPU: rows from a cache and from elsewhere (pyg_scale/ops/gather_cached.py).
// csrc/cuda/gather_cached_ops.cpp has it for devices, and map_rows and unmap_rows.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "graph_view.h"
#include "pool.h"
#include "prefetch.h"
#include "row_writer.h"

namespace pyg_scale {
namespace {

struct Bytes {
  Tensor tensor;
  const char* data;
  int64_t count, row;
};

Bytes bytes_of(const Tensor& x, const char* name) {
  check(x.is_cpu() && x.dim() >= 1, std::string(name) + " must have rows, on the CPU");
  Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  const int64_t count = dense.size(0);
  int64_t row = static_cast<int64_t>(dense.element_size());
  for (int64_t d = 1; d < dense.dim(); ++d) row *= dense.size(d);
  const auto* data = static_cast<const char*>(dense.const_data_ptr());
  return {dense, data ? data : "", count, row};  // rows of no bytes are somewhere, too
}

[[noreturn]] void no_row(int64_t i, int64_t row, const char* of, int64_t count) {
  throw std::out_of_range("index[" + std::to_string(i) + "] leads to row " + std::to_string(row) +
                          " of " + of + ", which has " + std::to_string(count) + " rows");
}

Tensor gather_cached(Tensor cached, Tensor rest, Tensor index, std::optional<Tensor> slot_of) {
  const Bytes held = bytes_of(cached, "cached"), left = bytes_of(rest, "rest");
  check(held.row == left.row && cached.scalar_type() == rest.scalar_type(),
        "cached and rest must have rows alike");
  const IntColumn ids = int_column(index, "index");
  IntColumn slots;
  if (slot_of) {
    slots = int_column(*slot_of, "slot_of");
    check(!slots.wide && slot_of->numel() == left.count, "slot_of must have an entry for each row");
  }
  const int64_t count = index.numel();
  std::vector<int64_t> sizes{count};
  for (int64_t d = 1; d < cached.dim(); ++d) sizes.push_back(cached.size(d));
  Tensor out = pool_empty(sizes, cached.scalar_type());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  // The slot of a row, or -1 - p for row p of the rest. These are always inlined, see prefetch.h.
  const auto place = [=, by_slot = slot_of.has_value()](int64_t i) __attribute__((always_inline)) {
    const int64_t id = ids[i];
    if (!by_slot) return id;
    if (id < 0 || id >= left.count) [[unlikely]]
      return INT64_MIN;  // row 2^63 - 1 of the rest
    const int64_t slot = slots[id];
    return slot >= 0 ? slot : -1 - id;
  };
  const auto at = [=](int64_t i) __attribute__((always_inline)) -> const char* {
    const int64_t p = place(i), row = p >= 0 ? p : -1 - p;
    const Bytes& from = p >= 0 ? held : left;
    return row < from.count ? from.data + row * held.row : nullptr;
  };
  const auto refuse = [&](int64_t i) {
    if (place(i) >= 0) no_row(i, place(i), "cached", held.count);
    if (slot_of) no_row(i, ids[i], "slot_of", left.count);
    no_row(i, -1 - place(i), "rest", left.count);
  };
  if (passes_caches(held.row, count * held.row)) {
    const int64_t done = write_rows(count, held.row, to, at);
    if (done < count) refuse(done);
    return out;
  }
  const int64_t ahead = rows_ahead(held.row);
  for (int64_t i = 0; i < count; ++i) {
    if (const char* coming = i + ahead < count ? at(i + ahead) : nullptr) {
      prefetch_row_start(coming, held.row);
    }
    const char* from = at(i);
    if (!from) [[unlikely]]
      refuse(i);
    std::memcpy(to + i * held.row, from, static_cast<size_t>(held.row));
  }
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("gather_cached(Tensor cached, Tensor rest, Tensor index, Tensor? slot_of) -> Tensor");
  m.def("map_rows(Tensor x, int device) -> ()");
  m.def("unmap_rows(Tensor x, int device) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("gather_cached", TORCH_BOX(&pyg_scale::gather_cached));
}
