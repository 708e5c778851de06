// random_walk: walks along the edges of a graph, see pyg_scale/ops/random_walk.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "pool.h"
#include "walks.h"

namespace pyg_scale {
namespace {

std::tuple<Tensor, Tensor> random_walk(Tensor indptr, Tensor indices,
                                       std::optional<Tensor> weight_prefix, Tensor start,
                                       std::optional<Tensor> walk, int64_t length, int64_t key,
                                       bool positions, int64_t num_threads) {
  const WalkGraph graph(indptr, indices, weight_prefix);
  Walks walks(start, walk, length, key);
  walks.check_start(graph);
  Tensor nodes = pool_empty({walks.count, length + 1}, ScalarType::Long);
  Tensor taken = pool_empty({positions ? walks.count : 0, length}, ScalarType::Long);
  if (walks.count == 0) return {nodes, taken};
  walks.nodes = static_cast<int64_t*>(nodes.mutable_data_ptr());
  if (positions) walks.positions = static_cast<int64_t*>(taken.mutable_data_ptr());
  walks.for_each_group(num_threads, [&](int64_t from, int64_t to) {
    int64_t node[kTogether];
    uint64_t stream[kTogether];
    for (int64_t i = to; i < std::min(to + kTogether, walks.count); ++i) {
      __builtin_prefetch(graph.begin + walks.first[i]);  // of the walks that come next
    }
    for (int64_t i = from; i < to; ++i) {
      node[i - from] = walks.nodes[i * (length + 1)] = walks.first[i];
      stream[i - from] = walks.key_of(i);
    }
    for (int64_t step = 0; step < length; ++step) {
      first_order_step(graph, walks, stream, node, from, to, step);
    }
  });
  return {nodes, taken};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "random_walk(Tensor indptr, Tensor indices, Tensor? weight_prefix, Tensor start, "
      "Tensor? walk, int length, int key, bool positions, int num_threads) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("random_walk", TORCH_BOX(&pyg_scale::random_walk));
}
