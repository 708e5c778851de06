// What the ops of partitioning read of a graph: undirected, each edge in both directions.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>

#include "graph_view.h"

namespace pyg_scale {

constexpr int64_t kMostRounds = 10000;  // more would hang on a graph that is not symmetric

template <typename T>
struct Adjacency {
  int64_t num_nodes = 0;
  const int64_t* indptr = nullptr;
  const T* indices = nullptr;
  int64_t stride = 1;
  const int64_t* edge_weight = nullptr;  // of each entry of indices; absent: 1

  int64_t degree(int64_t v) const { return indptr[v + 1] - indptr[v]; }
  int64_t neighbor(int64_t e) const { return static_cast<int64_t>(indices[e * stride]); }
  int64_t weight(int64_t e) const { return edge_weight ? edge_weight[e] : 1; }

  // Calls f(neighbour, weight) for each entry of node v.
  template <typename F>
  void for_each(int64_t v, const F& f) const {
    for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) f(neighbor(e), weight(e));
  }
};

// Checks every number of the graph, then calls f with the Adjacency of its type of index.
template <typename F>
auto with_adjacency(const Tensor& indptr, const Tensor& indices, const Tensor& edge_weights,
                    const F& f) {
  const int64_t num_nodes = num_pointed(indptr), num_entries = indices.numel();
  const int64_t* begin = int64_data(indptr, num_nodes + 1, "indptr");
  const IntColumn column = int_column(indices, "indices");
  const int64_t* weight = optional_int64_data(edge_weights, num_entries, "edge_weights");
  if (weight) checked_sum(weight, num_entries, "edge_weights");
  check(begin[0] == 0 && begin[num_nodes] == num_entries,
        "indptr must go from 0 to the number of entries of indices");
  for (int64_t v = 0; v < num_nodes; ++v) check(begin[v] <= begin[v + 1], "indptr must not fall");
  const auto go = [&](const auto* data) {
    for (int64_t e = 0; e < num_entries; ++e) {
      const auto u = static_cast<int64_t>(data[e * column.stride]);
      if (static_cast<uint64_t>(u) >= static_cast<uint64_t>(num_nodes)) [[unlikely]] {
        fail("indices[" + std::to_string(e) + "] is " + std::to_string(u) + ", but there are " +
             std::to_string(num_nodes) + " nodes");
      }
    }
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(data)>>;
    return f(Adjacency<T>{num_nodes, begin, data, column.stride, weight});
  };
  return column.wide ? go(static_cast<const int64_t*>(column.data))
                     : go(static_cast<const int32_t*>(column.data));
}

// A contiguous int64 matrix of `rows` times `columns`.
inline const int64_t* int64_matrix(const Tensor& tensor, int64_t rows, int64_t columns,
                                   const char* name) {
  check(tensor.is_cpu() && tensor.dim() == 2 && tensor.is_contiguous() &&
            tensor.scalar_type() == ScalarType::Long,
        std::string(name) + " must be a contiguous 2-D int64 tensor on the CPU");
  check(tensor.size(0) == rows && tensor.size(1) == columns,
        std::string(name) + " must be of shape [" + std::to_string(rows) + ", " +
            std::to_string(columns) + "]");
  return tensor.numel() ? tensor.const_data_ptr<int64_t>() : nullptr;
}

}  // namespace pyg_scale
