// The two halves of a hop that spans several parts of a graph. The side that holds the in-edges of
// nodes chooses among them. The side that samples numbers what comes back. neighbor_sample does
// both at once.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "expand.h"
#include "graph_view.h"
#include "node_list.h"
#include "output.h"
#include "pool.h"

namespace pyg_scale {
namespace {

// The most that a thread keeps between calls: one of unusual size must not hold memory for ever.
constexpr size_t kKeptBytes = size_t{1} << 26;
constexpr int64_t kAhead = 16;  // rows; covers the latency of memory

Tensor copy(const int64_t* from, int64_t count) {
  Tensor out = pool_empty({count}, ScalarType::Long);
  std::copy_n(from, count, out.mutable_data_ptr<int64_t>());
  return out;
}

// Chooses in-edges of nodes that lie at `place` in a part. Returns how many edges each node has,
// the neighbours, the edge ids, and what edges weigh (nothing without `weighting`).
std::tuple<Tensor, Tensor, Tensor, Tensor> expand_neighbors(
    Tensor indptr, Tensor indices, Tensor edge_id, Tensor time, Tensor weight_prefix, Tensor place,
    Tensor node, Tensor seed, Tensor latest, Tensor after, int64_t num_neighbor_nodes, int64_t key,
    int64_t num_neighbors, bool replace, bool last, bool by_node, bool by_source, int64_t next_key,
    int64_t renewed, int64_t weighting) {
  EdgeView view;
  const int64_t num_edges = view.num_edges = indices.numel();
  view.num_neighbors = num_neighbor_nodes;
  view.num_expanded = num_pointed(indptr);
  view.indptr = int64_data(indptr, indptr.numel(), "indptr");
  check(view.indptr[0] == 0 && view.indptr[view.num_expanded] == num_edges,
        "indptr must go from 0 to the number of edges");
  view.indices = int_column(indices, "indices");
  if (edge_id.numel()) {
    check(edge_id.numel() == num_edges, "edge_id must have an entry for each edge");
    view.edge_id = int_column(edge_id, "edge_id");
  }
  view.time = optional_int64_data(time, num_edges, "time");
  view.weight_prefix = optional_int64_data(weight_prefix, num_edges, "weight_prefix");
  const int64_t n = node.numel();
  Rows rows{int64_data(node, n, "node"), optional_int64_data(seed, n, "seed"), nullptr};
  rows.place = int64_data(place, n, "place");
  rows.latest = optional_int64_data(latest, n, "latest");
  rows.after = optional_int64_data(after, n, "after");
  check(!rows.after || rows.latest, "after goes with latest");
  check(n == 0 || !view.time || (rows.seed && rows.latest),
        "edges with times need the seed and the latest time of each row");
  for (int64_t i = 0; i < n; ++i) {
    if (rows.place[i] < 0 || rows.place[i] >= view.num_expanded) [[unlikely]] {
      fail("place " + std::to_string(rows.place[i]) + " is out of range: there are " +
           std::to_string(view.num_expanded) + " nodes");
    }
  }
  check_count(num_neighbor_nodes, "num_neighbor_nodes");
  check(!(replace || by_source) || num_neighbors <= Picker::kMostDraws,
        "num_neighbors must be less than 2**31");
  check(by_source || !weighting, "weighting needs by_source");
  check(!by_source || !(replace || rows.seed), "by_source goes with neither replace nor seeds");
  check_32_bits(renewed, "renewed");
  HopOptions how{static_cast<uint64_t>(key), num_neighbors, replace, last, by_node};
  how.by_source = by_source;
  how.numbers = {static_cast<uint64_t>(key), static_cast<uint64_t>(next_key),
                 static_cast<uint32_t>(renewed)};
  how.weighting = weighting_of(weighting);
  check(how.weighting != Weighting::kGcn, "the degrees of neighbours are not known here");
  thread_local std::unique_ptr<Expansion> kept;
  std::unique_ptr<Expansion> expansion = std::move(kept);  // lost if anything below throws
  if (!expansion) expansion = std::make_unique<Expansion>();
  expansion->clear();
  const int64_t step = Expansion::block_rows(num_neighbors);
  for (int64_t from = 0; from < n; from += step) {
    expansion->expand(view, how, rows, from, std::min(n, from + step), n);
  }
  const Buffer<float>& weight = expansion->weight();
  Tensor weights = pool_empty({weight.size()}, ScalarType::Float);
  std::copy_n(weight.data(), weight.size(), static_cast<float*>(weights.mutable_data_ptr()));
  std::tuple<Tensor, Tensor, Tensor, Tensor> out{
      copy(expansion->count().data(), n), copy(expansion->neighbor(), expansion->num_edges()),
      copy(expansion->edge(), expansion->num_edges()), weights};
  if (expansion->bytes() <= kKeptBytes) kept = std::move(expansion);
  return out;
}

// Looks up the row of each node in a batch. A node that has none is appended if `append`; otherwise
// its row is -1. Returns all nodes, their seeds (if disjoint), and the rows.
std::tuple<Tensor, Tensor, Tensor> number_nodes(Tensor known, Tensor known_seed, Tensor node,
                                                Tensor seed, int64_t num_nodes, int64_t num_seeds,
                                                bool disjoint, bool append) {
  const int64_t size = known.numel(), n = node.numel();
  check_count(num_nodes, "num_nodes");
  if (disjoint) check_count(num_seeds, "num_seeds");
  const int64_t* first = int64_data(known, size, "known");
  const int64_t* wanted = int64_data(node, n, "node");
  const int64_t *first_seed = nullptr, *wanted_seed = nullptr;
  if (disjoint) {
    first_seed = int64_data(known_seed, size, "known_seed");
    wanted_seed = int64_data(seed, n, "seed");
  }
  const auto identities =
      static_cast<unsigned __int128>(std::max<int64_t>(num_nodes, 1)) *
      static_cast<unsigned __int128>(disjoint ? std::max<int64_t>(num_seeds, 1) : 1);
  check(identities < (static_cast<unsigned __int128>(1) << 63),
        "disjoint: the seeds times the nodes exceed 63 bits; use smaller batches");
  auto& table = kept_by_thread<RelabelTable, struct Numbered>();
  table.begin(static_cast<uint64_t>(identities));
  table.reserve(size + n);
  Tensor row = pool_empty({n}, ScalarType::Long);
  Tensor all = pool_empty({size + n}, ScalarType::Long);
  Tensor all_seed = pool_empty({disjoint ? size + n : 0}, ScalarType::Long);
  int64_t *to = row.mutable_data_ptr<int64_t>(), *out = all.mutable_data_ptr<int64_t>();
  int64_t* out_seed = disjoint ? all_seed.mutable_data_ptr<int64_t>() : nullptr;
  const auto identity = [&](int64_t v, int64_t s) {
    const auto own = static_cast<uint64_t>(v);
    return disjoint ? static_cast<uint64_t>(s) * static_cast<uint64_t>(num_nodes) + own : own;
  };
  // Checked in separate passes, which take a hundredth of the time of the loops below.
  check_each_within(first, size, "node", num_nodes);
  check_each_within(wanted, n, "node", num_nodes);
  if (disjoint) {
    check_each_within(first_seed, size, "seed", num_seeds);
    check_each_within(wanted_seed, n, "seed", num_seeds);
  }
  int64_t next = size;
  table.use([&](auto& slots) __attribute__((always_inline)) {
    const auto prefetch = [&](const int64_t* nodes, const int64_t* seeds, int64_t i, int64_t end) {
      if (i + kAhead < end) {
        slots.prefetch(identity(nodes[i + kAhead], disjoint ? seeds[i + kAhead] : 0));
      }
    };
    const auto insert = [&](uint64_t key, int64_t row) {
      return static_cast<int64_t>(slots.find_or_insert(key, static_cast<uint64_t>(row)));
    };
    for (int64_t i = 0; i < size; ++i) {
      prefetch(first, first_seed, i, size);
      insert(identity(first[i], disjoint ? first_seed[i] : 0), i);
      out[i] = first[i];
      if (disjoint) out_seed[i] = first_seed[i];
    }
    // Rows from `size` on stand for nodes that are not known, even if they are not kept.
    for (int64_t i = 0; i < n; ++i) {
      prefetch(wanted, wanted_seed, i, n);
      const int64_t found = insert(identity(wanted[i], disjoint ? wanted_seed[i] : 0), next);
      if (found == next) {
        out[next] = wanted[i];
        if (disjoint) out_seed[next] = wanted_seed[i];
        ++next;
      }
      to[i] = append || found < size ? found : -1;
    }
  });
  if (table.bytes() > kKeptBytes) table.release();
  const int64_t kept = append ? next : size;
  return {torch::stable::narrow(all, 0, 0, kept),
          disjoint ? torch::stable::narrow(all_seed, 0, 0, kept) : all_seed, row};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "expand_neighbors(Tensor indptr, Tensor indices, Tensor edge_id, Tensor time, "
      "Tensor weight_prefix, Tensor place, Tensor node, Tensor seed, Tensor latest, "
      "Tensor after, int num_neighbor_nodes, int key, int num_neighbors, bool replace, bool last, "
      "bool by_node=False, bool by_source=False, int next_key=0, int renewed=0, int weighting=0) "
      "-> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "number_nodes(Tensor known, Tensor known_seed, Tensor node, Tensor seed, int num_nodes, "
      "int num_seeds, bool disjoint, bool append) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("expand_neighbors", TORCH_BOX(&pyg_scale::expand_neighbors));
  m.impl("number_nodes", TORCH_BOX(&pyg_scale::number_nodes));
}
