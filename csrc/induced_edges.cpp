// induced_edges, walked_edges: all edges among some nodes, and among those of random walks (the
// meaning is in pyg_scale/ops/induced_edges.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "buffer.h"
#include "graph_view.h"
#include "inside.h"
#include "keys.h"
#include "pool.h"
#include "walks.h"

namespace pyg_scale {
namespace {

template <typename T>
std::tuple<Tensor, Tensor, Tensor> edges_with_ends(const EdgeTable& table, const Chosen& chosen,
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

// The nodes that are among `n` drawn ones, and all edges among them.
std::tuple<Tensor, Tensor, Tensor> edges_among(const EdgeTable& table, const int64_t* drawn,
                                               int64_t n) {
  Chosen chosen(table.num_nodes);
  for (int64_t i = 0; i < n; ++i) chosen.add(drawn[i]);
  const int64_t count = chosen.number();
  return table.target.wide ? edges_with_ends<int64_t>(table, chosen, count)
                           : edges_with_ends<int32_t>(table, chosen, count);
}

EdgeTable table_of(const Tensor& indptr, const Tensor& index,
                   const std::optional<Tensor>& edge_id) {
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
  return table;
}

std::tuple<Tensor, Tensor, Tensor> induced_edges(Tensor indptr, Tensor index,
                                                 std::optional<Tensor> edge_id, Tensor drawn) {
  const EdgeTable table = table_of(indptr, index, edge_id);
  const int64_t n = drawn.numel(), *each = int64_data(drawn, n, "drawn");
  check_each_within(each, n, "drawn: node", table.num_nodes);
  return edges_among(table, each, n);
}

std::tuple<Tensor, Tensor, Tensor> walked_edges(Tensor indptr, Tensor index,
                                                std::optional<Tensor> edge_id, int64_t count,
                                                int64_t length, int64_t start_key, int64_t key,
                                                int64_t num_threads) {
  const EdgeTable table = table_of(indptr, index, edge_id);
  const WalkGraph graph(indptr, index, std::nullopt);
  check_count(count, "count");
  check_count(length, "length");
  check(length < INT64_MAX / 8 / std::max<int64_t>(count, 1), "the walks have too many steps");
  check(graph.num_nodes > 0 || count == 0, "walks need a node to begin at, and the graph has none");
  Buffer<int64_t> start, nodes;
  start.reserve(count);
  nodes.reserve(count * (length + 1));
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t own = fold(static_cast<uint64_t>(start_key), static_cast<uint64_t>(i));
    start[i] = static_cast<int64_t>(bounded(own, 0, static_cast<uint64_t>(graph.num_nodes)));
  }
  Walks walks(start.data(), count, length, static_cast<uint64_t>(key));
  walks.nodes = nodes.data();
  walk_first_order(graph, walks, num_threads);
  return edges_among(table, nodes.data(), count * (length + 1));
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "induced_edges(Tensor indptr, Tensor index, Tensor? edge_id, Tensor drawn) -> (Tensor node, "
      "Tensor ends, Tensor edge)");
  m.def(
      "walked_edges(Tensor indptr, Tensor index, Tensor? edge_id, int count, int length, "
      "int start_key, int key, int num_threads) -> (Tensor node, Tensor ends, Tensor edge)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("induced_edges", TORCH_BOX(&pyg_scale::induced_edges));
  m.impl("walked_edges", TORCH_BOX(&pyg_scale::walked_edges));
}
