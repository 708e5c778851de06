// is_edge: which pairs of nodes are joined by an edge (the meaning is in pyg_scale/ops/is_edge.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>

#include "graph_view.h"
#include "prefetch.h"

namespace pyg_scale {
namespace {

constexpr int64_t kAhead = 16;  // pairs; covers the latency of memory

// Neighbours are in order of edge ids, not of their own ids, so they cannot be bisected.
template <typename T>
bool contains(const T* data, int64_t stride, int64_t begin, int64_t end, int64_t wanted) {
  for (int64_t i = begin; i < end; ++i) {
    if (data[i * stride] == wanted) return true;
  }
  return false;
}

Tensor is_edge(Tensor indptr, Tensor indices, Tensor src, Tensor dst) {
  const int64_t count = dst.numel(), num_nodes = num_pointed(indptr);
  const int64_t* pointer = int64_data(indptr, num_nodes + 1, "indptr");
  const int64_t* wanted = int64_data(src, count, "src");
  const int64_t* node = int64_data(dst, count, "dst");
  const IntColumn column = int_column(indices, "indices");
  check(pointer[0] == 0 && pointer[num_nodes] == indices.numel(),
        "indptr must go from 0 to the number of edges");
  for (int64_t i = 0; i < count; ++i) {
    if (node[i] < 0 || node[i] >= num_nodes) [[unlikely]] {
      fail("dst: node " + std::to_string(node[i]) + " is out of range, there are " +
           std::to_string(num_nodes));
    }
  }
  Tensor out = torch::stable::empty({count}, ScalarType::Bool);
  bool* found = out.mutable_data_ptr<bool>();
  const uint64_t bytes = column.stride * (column.wide ? 8 : 4);
  for (int64_t i = 0; i < count; ++i) {
    if (i + 2 * kAhead < count) prefetch_ends(pointer, node[i + 2 * kAhead]);
    if (i + kAhead < count) {
      prefetch_entry(static_cast<const char*>(column.data), pointer[node[i + kAhead]] * bytes);
    }
    const int64_t begin = pointer[node[i]], end = pointer[node[i] + 1];
    check_entries(node[i], begin, end, indices.numel());
    found[i] = column.wide ? contains(static_cast<const int64_t*>(column.data), column.stride,
                                      begin, end, wanted[i])
                           : contains(static_cast<const int32_t*>(column.data), column.stride,
                                      begin, end, wanted[i]);
  }
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("is_edge(Tensor indptr, Tensor indices, Tensor src, Tensor dst) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("is_edge", TORCH_BOX(&pyg_scale::is_edge));
}
