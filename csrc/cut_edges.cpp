// cut_edges: how many edges of an undirected graph have their ends in different parts (the meaning
// is in pyg_scale/ops/cut_edges.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "adjacency.h"
#include "parallel.h"
#include "pool.h"

namespace pyg_scale {
namespace {

constexpr int64_t kTaskNodes = 4096;  // fewer are not worth a thread

int64_t cut_edges(Tensor indptr, Tensor indices, Tensor part, int64_t num_threads) {
  const int64_t num_nodes = num_pointed(indptr);
  const bool narrow = part.scalar_type() == ScalarType::Char;
  check(part.is_cpu() && part.dim() == 1 && part.is_contiguous() && part.numel() == num_nodes &&
            (narrow || part.scalar_type() == ScalarType::Int),
        "part must be a contiguous int8 or int32 tensor with an entry for each node");
  const Tensor no_weights = pool_empty({0}, ScalarType::Long);
  const auto run = [&](const auto& graph, const auto* of) {
    std::atomic<int64_t> entries{0};
    const auto count = [&](int64_t begin, int64_t end) {
      int64_t mine = 0;
      for (int64_t v = begin; v < end; ++v) {
        for (int64_t e = graph.indptr[v]; e < graph.indptr[v + 1]; ++e) {
          mine += of[graph.neighbor(e)] != of[v];
        }
      }
      entries += mine;
    };
    if (num_threads > 1) {
      const int64_t grain = std::max(kTaskNodes, num_nodes / (4 * usable_threads(num_threads)));
      torch::stable::parallel_for(0, num_nodes, grain, count);
    } else {
      count(0, num_nodes);
    }
    return entries / 2;  // each edge is there in both directions
  };
  return with_adjacency(indptr, indices, no_weights, [&](const auto& graph) {
    const void* of = part.const_data_ptr();
    return narrow ? run(graph, static_cast<const int8_t*>(of))
                  : run(graph, static_cast<const int32_t*>(of));
  });
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("cut_edges(Tensor indptr, Tensor indices, Tensor part, int num_threads) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("cut_edges", TORCH_BOX(&pyg_scale::cut_edges));
}
