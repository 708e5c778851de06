// candidates on a device, see pyg_scale/ops/candidates.py.

#include <tuple>
#include <vector>

#include "reading.h"

namespace pyg_scale::cuda {
namespace {

using Tensors = std::vector<Tensor>;
using Integers = std::vector<int64_t>;

std::tuple<Tensor, Tensor, Tensor> candidates(Tensors indptr, Tensors indices, Tensors time,
                                              Tensors neighbor_time, Tensors weight_prefix,
                                              Tensors node, Tensors latest, Tensors after,
                                              Integers num_neighbors, bool replace, bool last) {
  const size_t types = indptr.size();
  check(types > 0, "there is no edge type");
  for (const size_t given :
       {indices.size(), time.size(), neighbor_time.size(), weight_prefix.size(), node.size(),
        latest.size(), after.size(), num_neighbors.size()})
    check(given == types, "lists must have an entry for each edge type");
  const OnDevice device(indptr[0]);
  Reading read(device);
  int64_t total = 0;
  std::vector<ChoosingType> of;
  for (size_t t = 0; t < types; ++t) {
    const int64_t pointers = indptr[t].numel(), count = node[t].numel();
    const int64_t positions = indices[t].numel(), nodes = neighbor_time[t].numel();
    check(pointers > 0, "indptr must have one number more than there are nodes");
    const ChoosingType one{read.longs(indptr[t], pointers, "indptr"),
                           read.integers(indices[t], -1, "indices"),
                           read.maybe(time[t], positions, "time"),
                           read.maybe(neighbor_time[t], nodes, "neighbor_time"),
                           read.maybe(weight_prefix[t], positions, "weight_prefix"),
                           positions,
                           pointers - 1,
                           nodes,
                           read.longs(node[t], count, "node"),
                           read.maybe(latest[t], count, "latest"),
                           read.maybe(after[t], count, "after"),
                           count,
                           num_neighbors[t],
                           total};
    check(!one.after || one.latest, "after goes with latest");
    check(!one.latest || one.time || one.neighbor_time || positions == 0, "latest goes with times");
    of.push_back(one);
    total += count;
  }
  Tensor begin = empty_like(indptr[0], {total}, ScalarType::Long);
  Tensor end = empty_like(indptr[0], {total}, ScalarType::Long);
  Tensor counts = empty_like(indptr[0], {total}, ScalarType::Long);
  for (size_t from = 0; from < types; from += ChooseCandidates::kTypes) {
    ChooseCandidates args{};
    args.begin = data_of<int64_t>(begin);
    args.end = data_of<int64_t>(end);
    args.counts = data_of<int64_t>(counts);
    args.replace = replace;
    args.last = last;
    for (size_t t = from; t < types && args.count < ChooseCandidates::kTypes; ++t, ++args.count) {
      args.of[args.count] = of[t];
      args.first[args.count + 1] = args.first[args.count] + of[t].count;
    }
    device.done(pyg_scale_cuda_candidates(&args, device.stream()), "candidates");
  }
  return {begin, end, counts};
}

}  // namespace
}  // namespace pyg_scale::cuda

PYG_SCALE_DEVICE_LIBRARY(m) { m.impl("candidates", TORCH_BOX(&pyg_scale::cuda::candidates)); }
