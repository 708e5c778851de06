// join_clusters: the nodes of several clusters, and the edges among them (the meaning is in
// pyg_scale/ops/join_clusters.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <tuple>

#include "buffer.h"
#include "graph_view.h"
#include "pool.h"

namespace pyg_scale {
namespace {

constexpr int64_t kOutside = std::numeric_limits<int64_t>::min();
constexpr int64_t kAhead = 24;  // edges whose ends' clusters are asked for

// The edges of a batch, of which more are written than it has at last.
struct Edges {
  Buffer<int64_t> own, other, edge;
};

std::tuple<Tensor, Tensor, Tensor> join_clusters(Tensor partptr, Tensor indptr, Tensor index,
                                                 Tensor part_of, Tensor which, bool own_first) {
  const int64_t parts = num_pointed(partptr, "partptr"), count = which.numel();
  const int64_t num_nodes = num_pointed(indptr), num_edges = index.numel();
  const int64_t* first = int64_data(partptr, parts + 1, "partptr");
  const int64_t* pointer = int64_data(indptr, num_nodes + 1, "indptr");
  const int64_t* target = int64_data(index, num_edges, "index");
  const int64_t* chosen = int64_data(which, count, "which");
  check(part_of.is_cpu() && part_of.dim() == 1 && part_of.is_contiguous() &&
            part_of.scalar_type() == ScalarType::Int && part_of.numel() == num_nodes,
        "part_of must be a contiguous int32 tensor with an entry for each node");
  const int32_t* part = part_of.const_data_ptr<int32_t>();
  check_each_within(chosen, count, "which: cluster", parts);

  Buffer<int64_t> shift;  // from a node of each cluster to its place in the batch
  shift.reserve(parts);
  std::fill_n(shift.data(), parts, kOutside);
  int64_t size = 0;
  // The nodes of these clusters, a bit each: small, and so in a cache near by.
  Buffer<uint64_t> inside;
  inside.reserve(num_nodes / 64 + 1);
  std::fill_n(inside.data(), num_nodes / 64 + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = first[chosen[i]], end = first[chosen[i] + 1];
    check(begin >= 0 && begin <= end && end <= num_nodes, "partptr must rise from 0 to num_nodes");
    shift[chosen[i]] = size - begin;
    check(size <= (int64_t{1} << 59) - end, "the clusters have too many nodes");
    size += end - begin;
    for (int64_t v = begin; v < end; ++v) inside[v >> 6] |= uint64_t{1} << (v & 63);
  }
  Tensor nodes = pool_empty({size}, ScalarType::Long);
  int64_t* node = nodes.mutable_data_ptr<int64_t>();
  thread_local Edges kept;
  Edges& edges = kept;
  int64_t place = 0, found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = first[chosen[i]], end = first[chosen[i] + 1];
    std::iota(node + place, node + place + (end - begin), begin);
    for (int64_t v = begin; v < end; ++v, ++place) {
      const int64_t from = pointer[v], to = pointer[v + 1];
      check_entries(v, from, to, num_edges);
      for (Buffer<int64_t>* each : {&edges.own, &edges.other, &edges.edge}) {
        each->set_size(found);
        each->reserve(found + to - from);
      }
      int64_t *own = edges.own.data(), *other = edges.other.data(), *edge = edges.edge.data();
      for (int64_t e = from; e < to; ++e) {
        const int64_t u = target[e];
        if (static_cast<uint64_t>(u) >= static_cast<uint64_t>(num_nodes)) [[unlikely]]
          fail_missing("index: node", u, num_nodes);
        own[found] = place;
        other[found] = u;
        edge[found] = e;
        found += inside[u >> 6] >> (u & 63) & 1;
      }
    }
  }
  Tensor ends = pool_empty({2, found}, ScalarType::Long);
  Tensor position = pool_empty({found}, ScalarType::Long);
  int64_t* to = ends.mutable_data_ptr<int64_t>();
  int64_t* others = own_first ? to + found : to;
  const int64_t* other = edges.other.data();
  for (int64_t at = 0; at < found; ++at) {
    if (at + kAhead < found) __builtin_prefetch(part + other[at + kAhead]);
    const int64_t u = other[at], p = part[u];
    if (static_cast<uint64_t>(p) >= static_cast<uint64_t>(parts)) [[unlikely]]
      fail_missing("part_of: cluster", p, parts);
    check(first[p] <= u && u < first[p + 1] && shift[p] != kOutside,
          "part_of must have the clusters of partptr");
    others[at] = u + shift[p];
  }
  std::copy_n(edges.own.data(), found, own_first ? to : to + found);
  std::copy_n(edges.edge.data(), found, position.mutable_data_ptr<int64_t>());
  constexpr size_t kKeptBytes = size_t{1} << 26;  // a batch of unusual size keeps no memory
  for (Buffer<int64_t>* each : {&edges.own, &edges.other, &edges.edge}) {
    each->clear();
    if (each->bytes() > kKeptBytes) each->release();
  }
  return {nodes, ends, position};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "join_clusters(Tensor partptr, Tensor indptr, Tensor index, Tensor part_of, Tensor which, "
      "bool own_first) -> (Tensor node, Tensor ends, Tensor edge)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("join_clusters", TORCH_BOX(&pyg_scale::join_clusters));
}
