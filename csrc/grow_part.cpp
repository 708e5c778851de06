// grow_part: a connected piece of a graph of a given size, see pyg_scale/ops/grow_part.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <queue>
#include <vector>

#include "adjacency.h"
#include "keys.h"

namespace pyg_scale {
namespace {

struct Candidate {
  int64_t gain;
  uint64_t tie;
  int64_t node;
  bool operator<(const Candidate& other) const {  // the queue gives the largest
    if (gain != other.gain) return gain < other.gain;
    if (tie != other.tie) return tie > other.tie;
    return node > other.node;
  }
};

Tensor grow_part(Tensor indptr, Tensor indices, Tensor edge_weights, Tensor size, Tensor order,
                 int64_t target, int64_t key) {
  const int64_t num_nodes = num_pointed(indptr);
  const int64_t* sizes = int64_data(size, num_nodes, "size");
  const int64_t* start = int64_data(order, num_nodes, "order");
  for (int64_t v = 0; v < num_nodes; ++v) {
    check(start[v] >= 0 && start[v] < num_nodes, "order must be of nodes");
  }
  checked_sum(sizes, num_nodes, "size");
  Tensor out = torch::stable::empty({num_nodes}, ScalarType::Bool);
  if (num_nodes == 0) return out;
  bool* grown = out.mutable_data_ptr<bool>();
  for (int64_t v = 0; v < num_nodes; ++v) grown[v] = false;
  with_adjacency(indptr, indices, edge_weights, [&](const auto& graph) {
    std::vector<int64_t> gain(static_cast<size_t>(num_nodes), 0);
    std::vector<char> skipped(static_cast<size_t>(num_nodes), 0);
    for (int64_t v = 0; v < num_nodes; ++v) {
      graph.for_each(v, [&](int64_t, int64_t w) { gain[v] -= w; });
    }
    std::priority_queue<Candidate> queue;
    const auto push = [&](int64_t v) {
      queue.push({gain[v], fold(static_cast<uint64_t>(key), static_cast<uint64_t>(v)) >> 1, v});
    };
    int64_t total = 0, next = 0;
    while (total < target) {
      if (queue.empty()) {
        while (next < num_nodes && (grown[start[next]] || skipped[start[next]])) ++next;
        if (next == num_nodes) break;
        push(start[next]);
      }
      const Candidate top = queue.top();
      queue.pop();
      const int64_t v = top.node;
      if (grown[v] || skipped[v] || gain[v] != top.gain) continue;
      if (total + sizes[v] - target > target - total) {  // nearer to the target without it
        skipped[v] = 1;
        continue;
      }
      grown[v] = true;
      total += sizes[v];
      graph.for_each(v, [&](int64_t u, int64_t w) {
        gain[u] += 2 * w;
        if (!grown[u] && !skipped[u]) push(u);
      });
    }
  });
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "grow_part(Tensor indptr, Tensor indices, Tensor edge_weights, Tensor size, Tensor order, "
      "int target, int key) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("grow_part", TORCH_BOX(&pyg_scale::grow_part));
}
