// draw_neighbors on a device, see pyg_scale/ops/draw_neighbors.py.

#include <limits>
#include <tuple>
#include <vector>

#include "reading.h"

namespace pyg_scale::cuda {
namespace {

using Tensors = std::vector<Tensor>;
using Integers = std::vector<int64_t>;

constexpr int64_t kMostEdges = std::numeric_limits<int64_t>::max() / 8;  // bytes can be counted

std::tuple<Tensor, Tensor, Tensor> draw_neighbors(Tensors indptr, Tensors indices, Tensors edge_id,
                                                  Tensors node, Tensors seed, Tensors offset,
                                                  Tensors begin, Tensors end, Tensors weight_prefix,
                                                  Integers num_edges, Integers num_nodes,
                                                  Integers key, Integers num_neighbors,
                                                  bool replace) {
  const size_t types = indptr.size();
  check(types > 0, "there is no edge type");
  for (const size_t given : {indices.size(), edge_id.size(), node.size(), seed.size(),
                             offset.size(), begin.size(), end.size(), weight_prefix.size(),
                             num_edges.size(), num_nodes.size(), key.size(), num_neighbors.size()})
    check(given == types, "lists must have an entry for each edge type");
  const OnDevice device(indptr[0]);
  Reading read(device);
  int64_t total = 0;
  std::vector<DrawnType> of;
  for (size_t t = 0; t < types; ++t) {
    const int64_t pointers = indptr[t].numel(), count = node[t].numel();
    check(pointers > 0, "indptr must have one number more than there are nodes");
    check(num_edges[t] >= 0, "num_edges must not be negative");
    check(num_edges[t] <= kMostEdges - total, "num_edges are too many together");
    const int64_t positions = indices[t].numel();
    Spaced ids{{nullptr, false}, 1};
    if (edge_id[t].numel()) ids = read.integers(edge_id[t], positions, "edge_id");
    check((begin[t].numel() > 0) == (end[t].numel() > 0), "begin and end go together");
    of.push_back({read.longs(indptr[t], pointers, "indptr"),
                  read.integers(indices[t], -1, "indices"), ids, positions, pointers - 1,
                  num_nodes[t], read.longs(node[t], count, "node"),
                  read.maybe(seed[t], count, "seed"), read.longs(offset[t], count + 1, "offset"),
                  read.maybe(begin[t], count, "begin"), read.maybe(end[t], count, "end"),
                  read.maybe(weight_prefix[t], positions, "weight_prefix"), count, num_edges[t],
                  num_neighbors[t], total, static_cast<uint64_t>(key[t])});
    total += num_edges[t];
  }
  Tensor row = empty_like(indptr[0], {total}, ScalarType::Long);
  Tensor neighbor = empty_like(indptr[0], {total}, ScalarType::Long);
  Tensor edge = empty_like(indptr[0], {total}, ScalarType::Long);
  for (size_t from = 0; from < types; from += DrawNeighbors::kTypes) {
    DrawNeighbors args{};
    args.row = data_of<int64_t>(row);
    args.neighbor = data_of<int64_t>(neighbor);
    args.edge = data_of<int64_t>(edge);
    args.replace = replace;
    for (size_t t = from; t < types && args.count < DrawNeighbors::kTypes; ++t, ++args.count) {
      args.of[args.count] = of[t];
      const int64_t warps = of[t].num_edges ? of[t].count : 0;
      args.first[args.count + 1] = args.first[args.count] + warps;
    }
    device.done(pyg_scale_cuda_draw_neighbors(&args, device.stream()), "draw_neighbors");
  }
  return {row, neighbor, edge};
}

}  // namespace
}  // namespace pyg_scale::cuda

PYG_SCALE_DEVICE_LIBRARY(m) {
  m.impl("draw_neighbors", TORCH_BOX(&pyg_scale::cuda::draw_neighbors));
}
