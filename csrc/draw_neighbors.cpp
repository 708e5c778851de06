// draw_neighbors on the CPU: in-edges of nodes by keyed draws (pyg_scale/ops/draw_neighbors.py).
// csrc/cuda/draw_neighbors_ops.cpp has it for devices.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "graph_view.h"
#include "keys.h"
#include "pick.h"
#include "pool.h"

namespace pyg_scale {
namespace {

std::tuple<Tensor, Tensor> draw_neighbors(Tensor indptr, Tensor indices,
                                          std::optional<Tensor> edge_id, Tensor node, Tensor row,
                                          Tensor offset, int64_t num_nodes, int64_t key,
                                          int64_t num_neighbors, bool replace) {
  const int64_t count = node.numel(), num_rows = num_pointed(indptr), total = row.numel();
  const int64_t* begin = int64_data(indptr, indptr.numel(), "indptr");
  const int64_t* wanted = int64_data(node, count, "node");
  const int64_t* place = int64_data(offset, count + 1, "offset");
  const IntColumn column = int_column(indices, "indices");
  IntColumn id;
  if (edge_id) {
    check(edge_id->numel() == indices.numel(), "edge_id must have an entry for each edge");
    id = int_column(*edge_id, "edge_id");
  }
  Tensor neighbor = pool_empty({total}, ScalarType::Long);
  Tensor edge = pool_empty({total}, ScalarType::Long);
  int64_t *to = neighbor.mutable_data_ptr<int64_t>(), *ids = edge.mutable_data_ptr<int64_t>();
  check(place[0] == 0 && place[count] == total, "offset must go from 0 to the number of edges");
  Picker picker;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t v = wanted[i];
    check(v >= 0 && v < num_rows, "a node has no in-edges: it is not in indptr");
    const Candidates all{begin[v], begin[v + 1]};
    check_entries(v, all.begin, all.end, indices.numel());
    check(place[i] >= 0 && place[i + 1] >= place[i] && place[i + 1] <= total &&
              place[i + 1] - place[i] == Picker::most(all.size(), num_neighbors, replace),
          "offset does not fit the degrees");
    const uint64_t own = fold(static_cast<uint64_t>(key), static_cast<uint64_t>(v));
    picker.uniform(own, all, num_neighbors, replace, ids + place[i]);
  }
  for (int64_t e = 0; e < total; ++e) {
    const int64_t position = ids[e];
    to[e] = column[position];
    check(to[e] >= 0 && to[e] < num_nodes, "indices: a neighbour is not a node");
    if (id.data) ids[e] = id[position];
  }
  return {neighbor, edge};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "draw_neighbors(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor node, Tensor row, "
      "Tensor offset, int num_nodes, int key, int num_neighbors, bool replace) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("draw_neighbors", TORCH_BOX(&pyg_scale::draw_neighbors));
}
