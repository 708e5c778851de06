// sort_subgraphs: subgraphs side by side, put in order (the meaning is in
// pyg_scale/ops/sort_subgraphs.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "buffer.h"
#include "graph_view.h"
#include "pool.h"

namespace pyg_scale {
namespace {

// A node and where it was, ordered by both: nodes have 63 bits, places 32.
using Key = unsigned __int128;

// The first place of each of `size` groups, and the number of all members last.
void begin_groups(const IntColumn& group, int64_t n, int64_t size, const char* what,
                  Buffer<int64_t>& begin) {
  begin.reserve(size + 2);
  std::fill_n(begin.data(), size + 2, 0);
  int64_t* count = begin.data() + 1;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t g = group[i];
    if (static_cast<uint64_t>(g) >= static_cast<uint64_t>(size)) [[unlikely]]
      fail_missing(what, g, size);
    ++count[g];
  }
  for (int64_t g = 0; g < size; ++g) count[g] += begin[g];
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sort_subgraphs(Tensor node, Tensor batch,
                                                                  Tensor row, Tensor col,
                                                                  Tensor edge, int64_t num_graphs) {
  const int64_t n = node.numel(), m = row.numel();
  check(n < int64_t{1} << 32, "there are 2**32 nodes or more");
  check_count(num_graphs, "num_graphs");
  const IntColumn id = int_column(node, "node"), graph = int_column(batch, "batch");
  const IntColumn source = int_column(row, "row"), target = int_column(col, "col");
  const int64_t* edge_id = int64_data(edge, m, "edge");
  check(batch.numel() == n, "batch must have as many entries as node");
  check(col.numel() == m, "col must have as many entries as row");

  // The nodes of each graph, then sorted.
  Buffer<int64_t> next;  // where the next one goes
  begin_groups(graph, n, num_graphs, "batch: graph", next);
  Buffer<Key> keys;
  keys.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    check(id[i] >= 0, "node must not be negative");
    keys[next[graph[i]]++] = static_cast<Key>(id[i]) << 32 | static_cast<Key>(i);
  }
  Tensor nodes = pool_empty({n}, ScalarType::Long), graphs = pool_empty({n}, ScalarType::Long);
  Tensor places = pool_empty({n}, ScalarType::Long);
  int64_t *to = nodes.mutable_data_ptr<int64_t>(), *of = graphs.mutable_data_ptr<int64_t>();
  int64_t* place = places.mutable_data_ptr<int64_t>();  // of each node as it was
  Buffer<uint32_t> before;                              // where each node was
  before.reserve(n);
  for (int64_t g = 0, begin = 0; g < num_graphs; begin = next[g++]) {
    std::sort(keys.data() + begin, keys.data() + next[g]);
    for (int64_t i = begin; i < next[g]; ++i) {
      before[i] = static_cast<uint32_t>(keys[i]);
      to[i] = static_cast<int64_t>(keys[i] >> 32);
      of[i] = g;
      place[before[i]] = i;
    }
  }

  // Edges in the order of their targets now, to where those of their sources begin.
  Buffer<int64_t> into, from;  // the first edge of each target as it was, and of each source now
  begin_groups(target, m, n, "col: node", into);
  for (int64_t e = 1; e < m; ++e) check(target[e - 1] <= target[e], "col must not decrease");
  Buffer<uint32_t> source_place;
  source_place.reserve(m);
  from.reserve(n + 2);
  std::fill_n(from.data(), n + 2, 0);
  for (int64_t e = 0; e < m; ++e) {
    const int64_t s = source[e];
    if (static_cast<uint64_t>(s) >= static_cast<uint64_t>(n)) [[unlikely]]
      fail_missing("row: node", s, n);
    source_place[e] = static_cast<uint32_t>(place[s]);
    ++from[place[s] + 1];
  }
  Tensor ends = pool_empty({2, m}, ScalarType::Long), ids = pool_empty({m}, ScalarType::Long);
  int64_t *own = ends.mutable_data_ptr<int64_t>(), *other = own + m;
  int64_t* edge_to = ids.mutable_data_ptr<int64_t>();
  for (int64_t i = 0, at = 0; i < n; ++i) {
    const int64_t degree = from[i + 1];
    from[i + 1] = at + degree;
    std::fill_n(own + at, degree, i);
    at += degree;
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t e = into[before[i]]; e < into[before[i] + 1]; ++e) {
      const int64_t at = from[source_place[e]]++;
      other[at] = i;
      edge_to[at] = edge_id[e];
    }
  }
  return {nodes, graphs, ends, ids, places};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "sort_subgraphs(Tensor node, Tensor batch, Tensor row, Tensor col, Tensor edge, "
      "int num_graphs) -> (Tensor node, Tensor batch, Tensor ends, Tensor edge, Tensor place)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("sort_subgraphs", TORCH_BOX(&pyg_scale::sort_subgraphs));
}
