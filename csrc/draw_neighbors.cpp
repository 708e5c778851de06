// draw_neighbors on the CPU: in-edges of nodes by keyed draws (pyg_scale/ops/draw_neighbors.py).
// csrc/cuda/draw_neighbors_ops.cpp has it for devices.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>
#include <tuple>

#include "graph_view.h"
#include "keys.h"
#include "pick.h"
#include "pool.h"

namespace pyg_scale {
namespace {

using Tensors = std::vector<Tensor>;
using Integers = std::vector<int64_t>;

constexpr int64_t kMostEdges = std::numeric_limits<int64_t>::max() / 8;  // bytes can be counted

// What is drawn along one edge type, and where it goes.
struct Draw {
  const int64_t *begin, *node, *seed, *place;  // indptr, and of each node where its edges begin
  const int64_t *first, *end;                  // of each node's candidates; or null
  const int64_t* weight_prefix;                // of each position; or null
  IntColumn source, id;
  int64_t num_rows, num_positions, num_nodes, count, total, num_neighbors;
  uint64_t key;
};

// What a node chooses among: all of its in-edges, or those that are given.
Candidates candidates_of(const Draw& draw, int64_t i, Candidates all) {
  if (!draw.first) return all;
  const Candidates found{draw.first[i], draw.end[i]};
  check(all.begin <= found.begin && found.begin <= found.end && found.end <= all.end,
        "begin and end must be among the in-edges of the node");
  return found;
}

void draw_along(const Draw& draw, bool replace, Picker& picker, int64_t* row, int64_t* neighbor,
                int64_t* edge) {
  const int64_t* place = draw.place;
  check(place[0] == 0 && place[draw.count] == draw.total,
        "offset must go from 0 to the number of edges");
  for (int64_t i = 0; i < draw.count; ++i) {
    const int64_t v = draw.node[i];
    check(v >= 0 && v < draw.num_rows, "a node has no in-edges: it is not in indptr");
    const Candidates all{draw.begin[v], draw.begin[v + 1]};
    check_entries(v, all.begin, all.end, draw.num_positions);
    const Candidates c = candidates_of(draw, i, all);
    const int64_t k = draw.num_neighbors, most = Picker::most(c.size(), k, replace);
    const bool by_weight = draw.weight_prefix && k >= 0 && (replace || k < c.size());
    const int64_t places = place[i] >= 0 && place[i + 1] >= place[i] && place[i + 1] <= draw.total
                               ? place[i + 1] - place[i]
                               : -1;
    check(places >= 0 && (by_weight ? places <= most : places == most),
          "offset does not fit the degrees");
    uint64_t own = fold(draw.key, static_cast<uint64_t>(v));
    if (draw.seed) own = fold(own, static_cast<uint64_t>(draw.seed[i]));
    int64_t* out = edge + place[i];
    if (by_weight) {  // candidates without weight are not drawn
      const int64_t n =
          picker.weighted(own, c, all.begin, draw.weight_prefix, places, replace, out);
      check(n == places, "offset does not fit the weights");
    } else {
      picker.uniform(own, c, k, replace, out);
    }
    std::fill(row + place[i], row + place[i + 1], i);
  }
  for (int64_t e = 0; e < draw.total; ++e) {
    const int64_t position = edge[e];
    neighbor[e] = draw.source[position];
    check(neighbor[e] >= 0 && neighbor[e] < draw.num_nodes, "indices: a neighbour is not a node");
    if (draw.id.data) edge[e] = draw.id[position];
  }
}

std::tuple<Tensor, Tensor, Tensor> draw_neighbors(Tensors indptr, Tensors indices, Tensors edge_id,
                                                  Tensors node, Tensors seed, Tensors offset,
                                                  Tensors begin, Tensors end, Tensors weight_prefix,
                                                  Integers num_edges, Integers num_nodes,
                                                  Integers key, Integers num_neighbors,
                                                  bool replace) {
  const size_t types = indptr.size();
  for (const size_t given : {indices.size(), edge_id.size(), node.size(), seed.size(),
                             offset.size(), begin.size(), end.size(), weight_prefix.size(),
                             num_edges.size(), num_nodes.size(), key.size(), num_neighbors.size()})
    check(given == types, "lists must have an entry for each edge type");
  int64_t total = 0;
  for (const int64_t count : num_edges) {
    check(count >= 0, "num_edges must not be negative");
    check(count <= kMostEdges - total, "num_edges are too many together");
    total += count;
  }
  Tensor row = pool_empty({total}, ScalarType::Long);
  Tensor neighbor = pool_empty({total}, ScalarType::Long);
  Tensor edge = pool_empty({total}, ScalarType::Long);
  int64_t *rows = row.mutable_data_ptr<int64_t>(), *to = neighbor.mutable_data_ptr<int64_t>(),
          *ids = edge.mutable_data_ptr<int64_t>();
  Picker picker;
  for (size_t t = 0; t < types; ++t) {
    const int64_t count = node[t].numel(), positions = indices[t].numel();
    IntColumn id;
    if (edge_id[t].numel()) {
      check(edge_id[t].numel() == positions, "edge_id must have an entry for each edge");
      id = int_column(edge_id[t], "edge_id");
    }
    check((begin[t].numel() > 0) == (end[t].numel() > 0), "begin and end go together");
    const Draw draw{int64_data(indptr[t], indptr[t].numel(), "indptr"),
                    int64_data(node[t], count, "node"),
                    optional_int64_data(seed[t], count, "seed"),
                    int64_data(offset[t], count + 1, "offset"),
                    optional_int64_data(begin[t], count, "begin"),
                    optional_int64_data(end[t], count, "end"),
                    optional_int64_data(weight_prefix[t], positions, "weight_prefix"),
                    int_column(indices[t], "indices"),
                    id,
                    num_pointed(indptr[t]),
                    positions,
                    num_nodes[t],
                    count,
                    num_edges[t],
                    num_neighbors[t],
                    static_cast<uint64_t>(key[t])};
    draw_along(draw, replace, picker, rows, to, ids);
    rows += num_edges[t], to += num_edges[t], ids += num_edges[t];
  }
  return {row, neighbor, edge};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "draw_neighbors(Tensor[] indptr, Tensor[] indices, Tensor[] edge_id, Tensor[] node, "
      "Tensor[] seed, Tensor[] offset, Tensor[] begin, Tensor[] end, Tensor[] weight_prefix, "
      "int[] num_edges, int[] num_nodes, int[] key, int[] "
      "num_neighbors, "
      "bool replace) -> (Tensor row, Tensor neighbor, Tensor edge)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("draw_neighbors", TORCH_BOX(&pyg_scale::draw_neighbors));
}
