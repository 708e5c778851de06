// contract_graph: every cluster of nodes becomes a node, see pyg_scale/ops/contract_graph.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "adjacency.h"
#include "buffer.h"
#include "pool.h"

namespace pyg_scale {
namespace {

struct Edge {
  int64_t neighbor, weight;
};

std::tuple<Tensor, Tensor, Tensor> contract_graph(Tensor indptr, Tensor indices,
                                                  Tensor edge_weights, Tensor cluster,
                                                  int64_t num_clusters) {
  const int64_t num_nodes = num_pointed(indptr);
  const int64_t* to = int64_data(cluster, num_nodes, "cluster");
  check(num_clusters >= 0 && num_clusters < (int64_t{1} << 31) && num_clusters <= num_nodes,
        "num_clusters must be from 0 to the number of nodes, and less than 2**31");
  std::vector<int64_t> first(static_cast<size_t>(num_clusters) + 1, 0);
  for (int64_t v = 0; v < num_nodes; ++v) {
    check(to[v] >= 0 && to[v] < num_clusters, "cluster must be from 0 to num_clusters - 1");
    ++first[to[v] + 1];
  }
  for (int64_t c = 0; c < num_clusters; ++c) first[c + 1] += first[c];
  std::vector<int64_t> member(static_cast<size_t>(num_nodes)), next(first);
  for (int64_t v = 0; v < num_nodes; ++v) member[next[to[v]]++] = v;

  Tensor pointers = torch::stable::empty({num_clusters + 1}, ScalarType::Long);
  int64_t* begin = pointers.mutable_data_ptr<int64_t>();
  begin[0] = 0;
  Buffer<Edge> rows;  // of one cluster after the other, neighbours in any order
  with_adjacency(indptr, indices, edge_weights, [&](const auto& graph) {
    std::vector<int64_t> at(static_cast<size_t>(num_clusters), -1);
    for (int64_t c = 0; c < num_clusters; ++c) {
      for (int64_t i = first[c]; i < first[c + 1]; ++i) {
        graph.for_each(member[i], [&](int64_t u, int64_t w) {
          const int64_t other = to[u];
          if (other == c) return;
          if (at[other] >= begin[c]) {
            rows[at[other]].weight += w;
          } else {
            at[other] = rows.size();
            rows.push({other, w});
          }
        });
      }
      begin[c + 1] = rows.size();
    }
  });

  // The graph is symmetric: dealing the rows out in order makes rows that are sorted.
  Tensor neighbors = huge_empty({rows.size()}, ScalarType::Int);
  Tensor weights = huge_empty({rows.size()}, ScalarType::Long);
  int32_t* neighbor = rows.size() ? neighbors.mutable_data_ptr<int32_t>() : nullptr;
  int64_t* weight = rows.size() ? weights.mutable_data_ptr<int64_t>() : nullptr;
  std::vector<int64_t> place(begin, begin + num_clusters);
  for (int64_t c = 0; c < num_clusters; ++c) {
    for (int64_t e = begin[c]; e < begin[c + 1]; ++e) {
      const int64_t other = rows[e].neighbor, at = place[other]++;
      if (at >= begin[other + 1]) fail("the graph is not symmetric: give each edge both ways");
      neighbor[at] = static_cast<int32_t>(c);
      weight[at] = rows[e].weight;
    }
  }
  return {pointers, neighbors, weights};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "contract_graph(Tensor indptr, Tensor indices, Tensor edge_weights, Tensor cluster, "
      "int num_clusters) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("contract_graph", TORCH_BOX(&pyg_scale::contract_graph));
}
