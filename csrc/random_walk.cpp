// random_walk: walks along the edges of a graph, see pyg_scale/ops/random_walk.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

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
  walk_first_order(graph, walks, num_threads);
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
