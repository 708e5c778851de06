// candidates on the CPU: the in-edges among which nodes choose (pyg_scale/ops/candidates.py).
// csrc/cuda/candidates_ops.cpp has it for devices.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "graph_view.h"
#include "pick.h"
#include "pool.h"

namespace pyg_scale {
namespace {

using Tensors = std::vector<Tensor>;
using Integers = std::vector<int64_t>;

// How many of d candidates a node gets by weight: those of weight 0 only if it gets all.
int64_t most_weighted(Candidates c, int64_t first, const int64_t* prefix, int64_t k, bool replace) {
  const int64_t most = Picker::most(c.size(), k, replace);
  if (k < 0 || c.size() == 0 || (!replace && k >= c.size())) return most;
  int64_t before = c.begin > first ? prefix[c.begin - 1] : 0, found = 0;
  if (replace) return prefix[c.end - 1] > before ? k : 0;
  for (int64_t p = c.begin; p < c.end && found < k; ++p) {
    found += prefix[p] > before;
    before = prefix[p];
  }
  return found;
}

std::tuple<Tensor, Tensor, Tensor> candidates(Tensors indptr, Tensors indices, Tensors time,
                                              Tensors neighbor_time, Tensors weight_prefix,
                                              Tensors node, Tensors latest, Tensors after,
                                              Integers num_neighbors, bool replace, bool last) {
  const size_t types = indptr.size();
  for (const size_t given :
       {indices.size(), time.size(), neighbor_time.size(), weight_prefix.size(), node.size(),
        latest.size(), after.size(), num_neighbors.size()})
    check(given == types, "lists must have an entry for each edge type");
  int64_t total = 0;
  for (const Tensor& one : node) total += one.numel();
  Tensor begin = pool_empty({total}, ScalarType::Long), end = pool_empty({total}, ScalarType::Long);
  Tensor counts = pool_empty({total}, ScalarType::Long);
  int64_t *from = begin.mutable_data_ptr<int64_t>(), *to = end.mutable_data_ptr<int64_t>(),
          *count = counts.mutable_data_ptr<int64_t>();
  for (size_t t = 0; t < types; ++t) {
    const int64_t n = node[t].numel(), k = num_neighbors[t];
    EdgeView view;
    view.indptr = int64_data(indptr[t], indptr[t].numel(), "indptr");
    view.num_expanded = num_pointed(indptr[t]);
    view.indices = int_column(indices[t], "indices");
    view.num_edges = indices[t].numel();
    view.time = optional_int64_data(time[t], view.num_edges, "time");
    view.weight_prefix = optional_int64_data(weight_prefix[t], view.num_edges, "weight_prefix");
    view.num_neighbors = neighbor_time[t].numel();
    view.neighbor_time = optional_int64_data(neighbor_time[t], view.num_neighbors, "neighbor_time");
    const int64_t* nodes = int64_data(node[t], n, "node");
    const int64_t* until = optional_int64_data(latest[t], n, "latest");
    const int64_t* since = optional_int64_data(after[t], n, "after");
    check(!since || until, "after goes with latest");
    check(!until || view.temporal() || view.num_edges == 0, "latest goes with times");
    for (int64_t i = 0; i < n; ++i) {
      const int64_t v = nodes[i];
      check(v >= 0 && v < view.num_expanded, "a node has no in-edges: it is not in indptr");
      const int64_t first = view.indptr[v];
      Candidates c{first, view.indptr[v + 1]};
      check_entries(v, c.begin, c.end, view.num_edges);
      if (until) {
        c.end = first + view.until(first, c.end, until[i]);
        if (since) c.begin = first + view.until(first, c.end, since[i]);
        if (last && k >= 0) c.begin = std::max(c.begin, c.end - k);
      }
      *from++ = c.begin;
      *to++ = c.end;
      *count++ = view.weight_prefix ? most_weighted(c, first, view.weight_prefix, k, replace)
                                    : Picker::most(c.size(), k, replace);
    }
  }
  return {begin, end, counts};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "candidates(Tensor[] indptr, Tensor[] indices, Tensor[] time, Tensor[] neighbor_time, "
      "Tensor[] weight_prefix, Tensor[] node, Tensor[] latest, Tensor[] after, "
      "int[] num_neighbors, bool replace, bool last) -> (Tensor begin, Tensor end, Tensor counts)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("candidates", TORCH_BOX(&pyg_scale::candidates));
}
