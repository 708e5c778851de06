// join_clusters: the nodes of several clusters, and the edges among them (the meaning is in
// pyg_scale/ops/join_clusters.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <tuple>

#include "buffer.h"
#include "graph_view.h"
#include "inside.h"
#include "pool.h"

namespace pyg_scale {
namespace {

// `place_of` gives the place of what a look at `chosen` finds.
template <typename T, typename Set, typename Place>
std::tuple<Tensor, Tensor> edges_among(const EdgeTable& table, const Set& chosen,
                                       const Place& place_of, const int64_t* first_node,
                                       const Tensor& which, bool own_first, bool positions) {
  auto& found = kept_by_thread<FoundEdges<T>, struct Joined>();
  found.clear();
  const int64_t* part = which.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < which.numel(); ++i) {
    found.of_range(table, chosen, first_node[part[i]], first_node[part[i] + 1], positions);
  }
  const int64_t size = found.size();
  Tensor ends = pool_empty({2, size}, ScalarType::Long);
  Tensor position = pool_empty({positions ? size : 0}, ScalarType::Long);
  int64_t* first = ends.mutable_data_ptr<int64_t>();
  found.write(place_of, own_first ? first : first + size, own_first ? first + size : first);
  if (positions) found.write_ids(position.mutable_data_ptr<int64_t>());
  found.clear();
  return {ends, position};
}

std::tuple<Tensor, Tensor, Tensor> join_clusters(Tensor partptr, Tensor indptr, Tensor index,
                                                 Tensor which, bool own_first, bool positions) {
  const int64_t parts = num_pointed(partptr, "partptr"), count = which.numel();
  EdgeTable table{};
  table.num_nodes = num_pointed(indptr);
  table.num_edges = index.numel();
  table.pointer = int64_data(indptr, table.num_nodes + 1, "indptr");
  table.target = int_column(index, "index");
  check(table.num_edges == 0 || table.target.stride == 1, "index must be contiguous");
  check(table.target.wide || table.num_edges <= std::numeric_limits<int32_t>::max(),
        "index of so many edges must be int64");
  const int64_t* first = int64_data(partptr, parts + 1, "partptr");
  const int64_t* chosen_part = int64_data(which, count, "which");
  check_each_within(chosen_part, count, "which: cluster", parts);

  int64_t size = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = first[chosen_part[i]], end = first[chosen_part[i] + 1];
    check(begin >= 0 && begin <= end && end <= table.num_nodes,
          "partptr must rise from 0 to num_nodes");
    check(size <= (int64_t{1} << 59) - end, "the clusters have too many nodes");
    size += end - begin;
  }
  Tensor nodes = pool_empty({size}, ScalarType::Long);
  int64_t *node = nodes.mutable_data_ptr<int64_t>(), *next = node;
  Ranges ranges(table.num_nodes);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = first[chosen_part[i]], end = first[chosen_part[i] + 1];
    if (begin < end) ranges.add(begin, end, next - node);
    std::iota(next, next + (end - begin), begin);
    next += end - begin;
  }
  constexpr int64_t kNarrow = std::numeric_limits<int32_t>::max();
  if (!table.target.wide && takes_ranges() && std::max(size, table.num_nodes) <= kNarrow &&
      ranges.sort()) {
    const auto as_found = [](int64_t place) __attribute__((always_inline)) { return place; };
    const auto [ends, position] =
        edges_among<int32_t>(table, ranges, as_found, first, which, own_first, positions);
    return {nodes, ends, position};
  }
  Chosen chosen(table.num_nodes);
  for (int64_t i = 0; i < size; ++i) chosen.add(node[i]);
  Buffer<int64_t> place;  // of the nodes in ascending order
  place.reserve(chosen.number());
  for (int64_t i = 0, at = 0; i < count; ++i) {
    const int64_t begin = first[chosen_part[i]], nodes_of_part = first[chosen_part[i] + 1] - begin;
    if (nodes_of_part == 0) continue;
    int64_t* of_part = place.data() + chosen.place(begin);
    std::iota(of_part, of_part + nodes_of_part, at);
    at += nodes_of_part;
  }
  const auto place_of = [&](int64_t v)
                            __attribute__((always_inline)) { return place[chosen.place(v)]; };
  const auto [ends, position] =
      table.target.wide
          ? edges_among<int64_t>(table, chosen, place_of, first, which, own_first, positions)
          : edges_among<int32_t>(table, chosen, place_of, first, which, own_first, positions);
  return {nodes, ends, position};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "join_clusters(Tensor partptr, Tensor indptr, Tensor index, Tensor which, bool own_first, "
      "bool positions) -> (Tensor node, Tensor ends, Tensor edge)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("join_clusters", TORCH_BOX(&pyg_scale::join_clusters));
}
