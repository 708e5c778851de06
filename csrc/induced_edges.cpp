// induced_edges: all edges among some nodes (the meaning is in pyg_scale/ops/induced_edges.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "graph_view.h"
#include "inside.h"
#include "pool.h"

namespace pyg_scale {
namespace {

template <typename T>
std::tuple<Tensor, Tensor, Tensor> edges_among(const EdgeTable& table, const Chosen& chosen,
                                               int64_t count) {
  Tensor nodes = pool_empty({count}, ScalarType::Long);
  int64_t* node = nodes.mutable_data_ptr<int64_t>();
  chosen.write(node);
  auto& found = kept_by_thread<FoundEdges<T>, struct Induced>();
  found.clear();
  found.of_nodes(table, chosen, node, count);
  const int64_t size = found.size();
  Tensor ends = pool_empty({2, size}, ScalarType::Long);
  Tensor ids = pool_empty({table.id.data ? size : 0}, ScalarType::Long);
  int64_t* own = ends.mutable_data_ptr<int64_t>();
  const auto place = [&](int64_t v) __attribute__((always_inline)) { return chosen.place(v); };
  found.write(place, own, own + size);
  if (table.id.data) found.write_ids(ids.mutable_data_ptr<int64_t>());
  found.clear();
  return {nodes, ends, ids};
}

std::tuple<Tensor, Tensor, Tensor> induced_edges(Tensor indptr, Tensor index,
                                                 std::optional<Tensor> edge_id, Tensor drawn) {
  EdgeTable table{};
  table.num_nodes = num_pointed(indptr);
  table.num_edges = index.numel();
  table.pointer = int64_data(indptr, table.num_nodes + 1, "indptr");
  table.target = int_column(index, "index");
  bool alike = table.target.stride == 1 || table.target.stride == 2;
  if (edge_id) {
    table.id = int_column(*edge_id, "edge_id");
    check(edge_id->numel() == table.num_edges, "edge_id has " + std::to_string(edge_id->numel()) +
                                                   " entries, expected " +
                                                   std::to_string(table.num_edges));
    alike &= table.id.wide == table.target.wide && table.id.stride == table.target.stride;
  }
  check(table.num_edges == 0 || alike,
        "index and edge_id must have one dtype, and be contiguous or columns of pairs");
  const int64_t n = drawn.numel(), *each = int64_data(drawn, n, "drawn");
  check_each_within(each, n, "drawn: node", table.num_nodes);
  Chosen chosen(table.num_nodes);
  for (int64_t i = 0; i < n; ++i) chosen.add(each[i]);
  const int64_t count = chosen.number();
  return table.target.wide ? edges_among<int64_t>(table, chosen, count)
                           : edges_among<int32_t>(table, chosen, count);
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "induced_edges(Tensor indptr, Tensor index, Tensor? edge_id, Tensor drawn) -> (Tensor node, "
      "Tensor ends, Tensor edge)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("induced_edges", TORCH_BOX(&pyg_scale::induced_edges));
}
