// stitch_edges: what several answers say about some nodes, in the order of the nodes (the meaning
// is in pyg_scale/ops/stitch.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "graph_view.h"
#include "pool.h"

namespace pyg_scale {
namespace {

struct Answer {
  const int64_t *position, *take, *count;
  int64_t places;
  IntColumn neighbor, edge;
  std::vector<int64_t> begin;  // of each answered node's edges
};

void copy(const IntColumn& from, int64_t begin, int64_t n, int64_t* to) {
  if (from.wide && from.stride == 1) {
    const auto* data = static_cast<const int64_t*>(from.data) + begin;
    for (int64_t i = 0; i < n; ++i) to[i] = data[i];
  } else if (from.stride == 1) {
    const auto* data = static_cast<const int32_t*>(from.data) + begin;
    for (int64_t i = 0; i < n; ++i) to[i] = data[i];
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = from[begin + i];
  }
}

std::tuple<Tensor, Tensor, Tensor> stitch_edges(int64_t size, std::vector<Tensor> position,
                                                std::vector<Tensor> take,
                                                std::vector<Tensor> counts,
                                                std::vector<Tensor> neighbor,
                                                std::vector<Tensor> edge) {
  const size_t n = position.size();
  check(take.size() == n && counts.size() == n && neighbor.size() == n && edge.size() == n,
        "lists differ in length");
  int64_t places = 0;
  for (const Tensor& each : position) places += each.numel();
  check(places == size, "there must be one answer for each of the `size` nodes");
  std::vector<Answer> answers(n);
  Tensor count = pool_empty({size}, ScalarType::Long);
  int64_t* of = count.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < size; ++i) of[i] = -1;
  for (size_t a = 0; a < n; ++a) {
    Answer& answer = answers[a];
    const int64_t nodes = counts[a].numel();
    answer.places = position[a].numel();
    answer.position = int64_data(position[a], answer.places, "position");
    answer.take = optional_int64_data(take[a], answer.places, "take");
    answer.count = int64_data(counts[a], nodes, "counts");
    answer.neighbor = int_column(neighbor[a], "neighbor");
    answer.edge = int_column(edge[a], "edge");
    check(answer.take || answer.places == nodes, "counts must have an entry for each position");
    answer.begin.resize(static_cast<size_t>(nodes) + 1);
    int64_t sum = 0;
    for (int64_t i = 0; i < nodes; ++i) {
      if (answer.count[i] < 0 || answer.count[i] > neighbor[a].numel() - sum) [[unlikely]] {
        fail("counts must not be negative, and add up to the edges");
      }
      answer.begin[static_cast<size_t>(i)] = sum;
      sum += answer.count[i];
    }
    check(sum == neighbor[a].numel() && sum == edge[a].numel(), "counts do not fit the edges");
    for (int64_t i = 0; i < answer.places; ++i) {
      const int64_t at = answer.position[i], from = answer.take ? answer.take[i] : i;
      if (at < 0 || at >= size || from < 0 || from >= nodes || of[at] >= 0) [[unlikely]] {
        fail("a position or what it takes is out of range, or comes twice");
      }
      of[at] = answer.count[from];
    }
  }
  std::vector<int64_t> begin(static_cast<size_t>(size) + 1);
  int64_t total = 0;
  for (int64_t i = 0; i < size; ++i) {
    begin[static_cast<size_t>(i)] = total;
    total += of[i];
  }
  Tensor neighbors = pool_empty({total}, ScalarType::Long);
  Tensor edges = pool_empty({total}, ScalarType::Long);
  int64_t* to_neighbor = neighbors.mutable_data_ptr<int64_t>();
  int64_t* to_edge = edges.mutable_data_ptr<int64_t>();
  for (const Answer& answer : answers) {
    for (int64_t i = 0; i < answer.places; ++i) {
      const int64_t at = answer.position[i], from = answer.take ? answer.take[i] : i;
      const int64_t first = answer.begin[static_cast<size_t>(from)];
      const int64_t out = begin[static_cast<size_t>(at)];
      copy(answer.neighbor, first, of[at], to_neighbor + out);
      copy(answer.edge, first, of[at], to_edge + out);
    }
  }
  return {count, neighbors, edges};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "stitch_edges(int size, Tensor[] position, Tensor[] take, Tensor[] counts, "
      "Tensor[] neighbor, Tensor[] edge) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("stitch_edges", TORCH_BOX(&pyg_scale::stitch_edges));
}
