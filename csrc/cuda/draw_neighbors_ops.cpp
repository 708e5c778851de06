// draw_neighbors on a device, see pyg_scale/ops/draw_neighbors.py.

#include <tuple>
#include <utility>

#include "loading.h"
#include "tensors.h"

namespace pyg_scale::cuda {
namespace {

std::tuple<Tensor, Tensor> draw_neighbors(Tensor indptr, Tensor indices, MaybeTensor edge_id,
                                          Tensor node, Tensor row, Tensor offset, int64_t num_nodes,
                                          int64_t key, int64_t num_neighbors, bool replace) {
  const OnDevice device(indptr);
  const int64_t count = node.numel(), num_edges = row.numel();
  check(indptr.numel() > 0, "indptr must have one number more than there are nodes");
  const auto longs = [&](const Tensor& tensor, int64_t numel, const char* name) {
    return dense(device, tensor, ScalarType::Long, numel, name);
  };
  const Tensor pointers = longs(indptr, indptr.numel(), "indptr"),
               nodes = longs(node, count, "node");
  const Tensor rows = longs(row, num_edges, "row"), places = longs(offset, count + 1, "offset");
  const Tensor sources = integers(device, indices, -1, "indices");
  Column ids{nullptr, false};
  Tensor kept;
  if (edge_id) {
    kept = integers(device, *edge_id, sources.numel(), "edge_id");
    ids = column_of(kept);
  }
  Tensor neighbor = empty_like(indptr, {num_edges}, ScalarType::Long);
  Tensor edge = empty_like(indptr, {num_edges}, ScalarType::Long);
  const DrawNeighbors args{data_of<int64_t>(pointers),
                           column_of(sources),
                           ids,
                           sources.numel(),
                           pointers.numel() - 1,
                           num_nodes,
                           data_of<int64_t>(nodes),
                           data_of<int64_t>(rows),
                           data_of<int64_t>(places),
                           count,
                           num_edges,
                           num_neighbors,
                           static_cast<uint64_t>(key),
                           replace,
                           data_of<int64_t>(neighbor),
                           data_of<int64_t>(edge)};
  device.done(pyg_scale_cuda_draw_neighbors(&args, device.stream()), "draw_neighbors");
  return {neighbor, edge};
}

}  // namespace
}  // namespace pyg_scale::cuda

PYG_SCALE_DEVICE_LIBRARY(m) {
  m.impl("draw_neighbors", TORCH_BOX(&pyg_scale::cuda::draw_neighbors));
}
