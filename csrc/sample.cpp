// neighbor_sample: seeds and a key go in, the sampled neighbourhood comes out.
//
// Hop by hop and edge type by edge type, blocks of frontier rows pass three steps: draw positions
// (prefetching what they point to), read the neighbours, look up their rows. Draws depend on keys
// alone, so several threads may do the first two steps for different rows, while one numbers
// rows in order. docs/draws.md says what is drawn.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "buffer.h"
#include "expand.h"
#include "graph_view.h"
#include "induced.h"
#include "keys.h"
#include "node_list.h"
#include "output.h"
#include "parallel.h"

namespace pyg_scale {
namespace {

using Tensors = std::vector<Tensor>;
using Output =
    std::tuple<Tensors, Tensors, Tensors, Tensors, Tensors, Tensors, Tensors, Tensor, Tensor>;

struct Options {
  std::vector<int64_t> num_neighbors;  // [edge type][hop]
  int64_t num_hops;
  bool replace, disjoint, last, induced;
  uint64_t key;
  bool int32_output;
  int64_t num_threads;
  bool waits;    // for a disk: threads of its own
  bool by_node;  // a node's draws are the same for all seeds, if disjoint
  // Random numbers that belong to sources; else those of expanded nodes.
  bool by_source, same_in_all_hops;
  uint64_t next_key;
  uint32_t renewed;  // the share of nodes whose numbers are those of the next key, of 2^32
  Weighting weighting;
  bool layers;  // each hop expands all nodes of the batch, not only the new ones
  bool strict;  // seed times are before those of the seeds themselves
};

// What a thread keeps between batches.
struct Scratch {
  std::vector<NodeList> nodes;
  std::vector<EdgeList> edges;
  std::vector<Expansion> expansions;  // one per thread that takes part
  Induced induced;

  size_t bytes() const {
    size_t sum = induced.bytes();
    for (const auto& part : nodes) sum += part.bytes();
    for (const auto& part : edges) sum += part.bytes();
    for (const auto& part : expansions) sum += part.bytes();
    return sum;
  }
};

// A batch of unusual size must not hold its memory for ever.
constexpr size_t kScratchLimit = size_t{1} << 28;
constexpr int64_t kMostHops = 1000;

class Sampling {
 public:
  Sampling(const std::vector<EdgeView>& views, const std::vector<int64_t>& num_nodes,
           const Options& options, Scratch& scratch)
      : views_(views), options_(options), scratch_(scratch), num_types_(num_nodes.size()) {
    if (scratch.nodes.size() < num_types_) scratch.nodes.resize(num_types_);
    if (scratch.edges.size() < views.size()) scratch.edges.resize(views.size());
    if (scratch.expansions.empty()) scratch.expansions.resize(1);
    nodes_per_hop_ = zeros(num_types_, options.num_hops + 1);
    edges_per_hop_ = zeros(views.size(), options.num_hops);
  }

  void begin(const std::vector<int64_t>& num_nodes, const Tensors& seed, const Tensors& seed_time,
             const Tensors& after) {
    int64_t num_seeds = 0;
    for (const Tensor& one : seed) num_seeds += one.numel();
    const int64_t max_rows = options_.int32_output ? std::numeric_limits<int32_t>::max()
                                                   : std::numeric_limits<uint32_t>::max() - 256;
    const bool timed = std::any_of(views_.begin(), views_.end(),
                                   [](const EdgeView& view) { return view.temporal(); });
    check(!timed || options_.disjoint, "disjoint must be true in a temporal graph");
    int64_t position = 0;
    for (size_t t = 0; t < num_types_; ++t) {
      const int64_t count = seed[t].numel();
      nodes(t).begin(num_nodes[t], num_seeds, options_.disjoint, max_rows);
      nodes(t).add_seeds(int64_data(seed[t], count, "seed"), count, position);
      nodes_per_hop_[t][0] = count;
      position += count;
      if (!timed) continue;
      const int64_t* time = int64_data(seed_time[t], count, "seed_time");
      seed_time_.insert(seed_time_.end(), time, time + count);
    }
    for (size_t r = 0; r < views_.size(); ++r) {
      scratch_.edges[r].begin();
      after_.push_back(after.empty() ? nullptr : optional_int64_data(after[r], num_seeds, "after"));
    }
  }

  void run() {
    std::vector<int64_t> begin(num_types_, 0), end(num_types_);
    for (int64_t hop = 0; hop < options_.num_hops; ++hop) {
      for (size_t t = 0; t < num_types_; ++t) end[t] = nodes(t).size();
      for (size_t r = 0; r < views_.size(); ++r) {
        const auto t = static_cast<size_t>(views_[r].expanded_type);
        expand(r, hop, begin[t], end[t]);
      }
      for (size_t t = 0; t < num_types_; ++t) {
        nodes_per_hop_[t][hop + 1] = nodes(t).size() - end[t];
      }
      if (!options_.layers) begin = end;
    }
    if (!options_.induced) return;
    for (size_t r = 0; r < views_.size(); ++r) {
      scratch_.induced.edges(views_[r], nodes(views_[r].expanded_type),
                             nodes(views_[r].neighbor_type), times(), after_[r], options_.strict,
                             scratch_.edges[r]);
    }
  }

  Output output() {
    Tensors node, row, col, edge, batch, colptr, weight;
    Outputs outputs(options_.waits ? 1 : options_.num_threads);
    const bool narrow = options_.int32_output;
    for (size_t r = 0; r < views_.size(); ++r) {
      const EdgeList& list = scratch_.edges[r];
      const auto [source, target] =
          outputs.edges(list.row.data(), list.colptr, list.first_rows, narrow);
      row.push_back(source);
      col.push_back(target);
      colptr.push_back(outputs.copy(list.colptr.data(), list.colptr.size(), false));
      edge.push_back(outputs.copy(list.edge.data(), list.edge.size(), false));
      if (options_.weighting == Weighting::kNone) continue;
      weight.push_back(outputs.copy(list.weight.data(), list.weight.size()));
    }
    for (size_t t = 0; t < num_types_; ++t) {
      const NodeList& list = nodes(t);
      node.push_back(outputs.copy(list.node(), list.size(), narrow));
      if (options_.disjoint) batch.push_back(outputs.copy(list.seed(), list.size(), false));
    }
    outputs.write();
    return {node,
            row,
            col,
            edge,
            batch,
            colptr,
            weight,
            matrix(nodes_per_hop_, options_.num_hops + 1),
            matrix(edges_per_hop_, options_.num_hops)};
  }

 private:
  using Counts = std::vector<std::vector<int64_t>>;

  static Counts zeros(size_t rows, int64_t columns) {
    return Counts(rows, std::vector<int64_t>(static_cast<size_t>(columns)));
  }

  static Tensor matrix(const Counts& counts, int64_t columns) {
    Tensor out =
        torch::stable::empty({static_cast<int64_t>(counts.size()), columns}, ScalarType::Long);
    int64_t* data = out.mutable_data_ptr<int64_t>();
    for (const auto& row : counts) data = std::copy(row.begin(), row.end(), data);
    return out;
  }

  template <typename I>
  NodeList& nodes(I type) {
    return scratch_.nodes[static_cast<size_t>(type)];
  }
  const int64_t* times() const { return seed_time_.empty() ? nullptr : seed_time_.data(); }

  // Samples the rows [begin, end) of the expanded type of edge type `r`.
  void expand(size_t r, int64_t hop, int64_t begin, int64_t end) {
    const EdgeView& view = views_[r];
    const int64_t k = options_.num_neighbors[r * options_.num_hops + hop];
    const uint64_t key = hop_key(options_.key, Purpose::kNeighbor, hop, view.hash);
    HopOptions how{key, k, options_.replace, options_.last, options_.by_node};
    how.by_source = options_.by_source;
    how.weighting = options_.weighting;
    if (options_.by_source) {
      const int64_t number = options_.same_in_all_hops ? 0 : hop;
      how.numbers = {hop_key(options_.key, Purpose::kSource, number, view.hash),
                     hop_key(options_.next_key, Purpose::kSource, number, view.hash),
                     options_.renewed};
    }
    EdgeList& list = scratch_.edges[r];
    const int64_t edges_before = list.row.size();
    if (options_.layers) list.first_rows.push_back(list.colptr.size() - 1);
    list.colptr.reserve(list.colptr.size() + end - begin);

    if (options_.num_threads > 1 && end - begin >= 2 * task_rows()) {
      expand_parallel(r, how, begin, end, list);
    } else {
      const int64_t step = Expansion::block_rows(k);
      Expansion& expansion = scratch_.expansions[0];
      expansion.clear();
      expansion.swap(list.edge, list.weight);
      for (int64_t from = begin; from < end; from += step) {
        expansion.clear_numbered();
        expansion.expand(view, how, rows(r), from, std::min(end, from + step), end);
        number(view, expansion, list);
      }
      expansion.swap(list.edge, list.weight);
    }
    edges_per_hop_[r][hop] = list.row.size() - edges_before;
  }

  // In rounds: one thread numbers what the others have sampled in the round before.
  void expand_parallel(size_t r, const HopOptions& how, int64_t begin, int64_t end,
                       EdgeList& list) {
    const EdgeView& view = views_[r];
    const int64_t size = end - begin;
    const int64_t workers = std::min(options_.num_threads - 1, size / task_rows());
    const int64_t per_task = std::max(task_rows(), size / (workers * kRounds) + 1);
    const int64_t rounds = (size + workers * per_task - 1) / (workers * per_task);
    if (static_cast<int64_t>(scratch_.expansions.size()) < 2 * workers) {
      scratch_.expansions.resize(static_cast<size_t>(2 * workers));
    }
    const int64_t step = Expansion::block_rows(how.num_neighbors);
    for (int64_t round = 0; round <= rounds; ++round) {
      // Plain pointers: other threads must not see this thread's thread_locals.
      Expansion* now = scratch_.expansions.data() + (round % 2) * workers;
      Expansion* before = scratch_.expansions.data() + ((round + 1) % 2) * workers;
      int64_t waiting = 0;
      for (int64_t w = 0; round > 0 && w < workers; ++w) waiting += before[w].num_edges();
      // Nodes are read while others are appended, so their memory must stay where it is.
      nodes(view.neighbor_type).reserve_nodes(waiting);
      const Rows all = rows(r);
      const auto work = [&](int64_t task) {
        if (task == 0) {
          for (int64_t w = 0; round > 0 && w < workers; ++w) append(view, before[w], list);
          return;
        }
        now[task - 1].clear();
        const int64_t first = begin + (round * workers + task - 1) * per_task;
        const int64_t stop = std::min(end, first + per_task);
        for (int64_t from = first; from < stop; from += step) {
          now[task - 1].expand(view, how, all, from, std::min(stop, from + step), stop);
        }
      };
      options_.waits ? for_each_in_own_thread(workers + 1, work) : for_each_task(workers + 1, work);
    }
  }

  Rows rows(size_t r) {
    const NodeList& list = nodes(views_[r].expanded_type);
    Rows out{list.node(), list.seed(), times()};
    out.after = after_[r];
    return out;
  }

  // Appends the edges of the rows that come next.
  void append(const EdgeView& view, const Expansion& expansion, EdgeList& list) {
    list.edge.append(expansion.edge(), expansion.num_edges());
    list.weight.append(expansion.weight().data(), expansion.weight().size());
    number(view, expansion, list);
  }

  // Numbers the sampled neighbours of the rows that come next.
  void number(const EdgeView& view, const Expansion& expansion, EdgeList& list) {
    const int64_t n = expansion.num_edges(), size = list.row.size();
    list.row.reserve(size + n);
    nodes(view.neighbor_type)
        .add_neighbors(expansion.neighbor(), n, expansion.count().data(), expansion.seed(),
                       list.row.data() + size);
    list.row.set_size(size + n);
    int64_t sum = size;
    for (int64_t i = 0; i < expansion.count().size(); ++i) {
      list.colptr.push(sum += expansion.count()[i]);
    }
  }

  int64_t task_rows() const { return options_.waits ? kWaitingRows : kTaskRows; }

  static constexpr int64_t kTaskRows = 2048;   // fewer rows are not worth a thread
  static constexpr int64_t kWaitingRows = 32;  // each of which may be a page of a disk
  static constexpr int64_t kRounds = 8;        // in each of which every thread waits for all

  const std::vector<EdgeView>& views_;
  const Options& options_;
  Scratch& scratch_;
  size_t num_types_;
  std::vector<int64_t> seed_time_;     // of each seed position
  std::vector<const int64_t*> after_;  // of each edge type, or null: of each seed position
  Counts nodes_per_hop_, edges_per_hop_;
};

void check_length(size_t length, size_t expected, const char* name) {
  check(length == expected, std::string(name) + " has " + std::to_string(length) +
                                " entries, expected " + std::to_string(expected));
}

struct TypeTensors {
  const Tensor &indptr, &indices, &edge_id, &time, &weight_prefix;
};

// The in-edges of `size` nodes of the expanded type.
EdgeView edge_view(const TypeTensors& edges, const Tensors& node_time,
                   const std::vector<int64_t>& num_nodes, int64_t expanded, int64_t neighbor,
                   int64_t hash, int64_t size) {
  const auto& [indptr, indices, edge_id, time, weight_prefix] = edges;
  const auto types = static_cast<int64_t>(num_nodes.size());
  check(neighbor >= 0 && neighbor < types, "neighbor_type is not the number of a node type");
  EdgeView view;
  view.expanded_type = expanded;
  view.neighbor_type = neighbor;
  view.num_neighbors = num_nodes[neighbor];
  view.hash = static_cast<uint64_t>(hash);
  view.num_expanded = size;
  view.indptr = int64_data(indptr, size + 1, "indptr");
  view.indices = int_column(indices, "indices");
  const int64_t num_edges = view.num_edges = indices.numel();
  check(view.indptr[0] == 0 && view.indptr[size] == num_edges,
        "indptr must go from 0 to the number of edges, " + std::to_string(num_edges));
  if (edge_id.numel()) {
    check_length(edge_id.numel(), num_edges, "edge_id");
    view.edge_id = int_column(edge_id, "edge_id");
  }
  view.time = optional_int64_data(time, num_edges, "edge_time");
  view.weight_prefix = optional_int64_data(weight_prefix, num_edges, "weight_prefix");
  view.neighbor_time = optional_int64_data(node_time[neighbor], num_nodes[neighbor], "node_time");
  check(!view.time || !view.neighbor_time,
        "an edge type has edge times while its neighbours have node times: keep one of them");
  return view;
}

Output neighbor_sample(Tensors indptr, Tensors indices, Tensors edge_id, Tensors edge_time,
                       Tensors weight_prefix, Tensors node_time, std::vector<int64_t> num_nodes,
                       std::vector<int64_t> expanded_type, std::vector<int64_t> neighbor_type,
                       std::vector<int64_t> edge_type_hash, Tensors seed, Tensors seed_time,
                       std::vector<int64_t> num_neighbors, int64_t num_hops, bool replace,
                       bool disjoint, bool last, bool induced, int64_t key, bool int32_output,
                       int64_t num_threads, Tensors part, Tensors local, Tensors offsets,
                       Tensors after, bool times_of_neighbors, bool waits, bool by_node,
                       bool by_source, bool same_in_all_hops, int64_t next_key, int64_t renewed,
                       int64_t weighting, bool layers, bool strict) {
  const size_t types = num_nodes.size(), edge_types = expanded_type.size();
  const bool in_parts = !offsets.empty();
  const std::vector<Places> places =
      in_parts ? places_of(part, local, offsets, num_nodes) : std::vector<Places>();
  const size_t parts = in_parts ? static_cast<size_t>(places[0].num_parts) : 1;
  for (const int64_t count : num_nodes) check_count(count, "num_nodes");
  for (const int64_t k : num_neighbors) {
    check(!(replace || by_source) || k <= Picker::kMostDraws,
          "num_neighbors must be less than 2**31");
  }
  check(num_hops >= 0 && num_hops <= kMostHops, "num_hops must be from 0 to 1000");
  check(by_source || !weighting, "weighting needs by_source");
  check(!by_source || !(replace || disjoint), "by_source goes with neither replace nor disjoint");
  check(!(layers && induced), "layers and induced exclude each other");
  check_32_bits(renewed, "renewed");
  check_length(indptr.size(), edge_types * parts, "indptr");
  check_length(indices.size(), edge_types * parts, "indices");
  check_length(edge_id.size(), edge_types * parts, "edge_id");
  check_length(edge_time.size(), edge_types * parts, "edge_time");
  check_length(weight_prefix.size(), edge_types * parts, "weight_prefix");
  check_length(neighbor_type.size(), edge_types, "neighbor_type");
  check_length(edge_type_hash.size(), edge_types, "edge_type_hash");
  check_length(node_time.size(), types, "node_time");
  check_length(seed.size(), types, "seed");
  check_length(seed_time.size(), types, "seed_time");
  check_length(num_neighbors.size(), edge_types * num_hops, "num_neighbors");
  if (!after.empty()) check_length(after.size(), edge_types, "after");

  std::vector<EdgeView> views, of_parts;
  for (size_t i = 0; i < edge_types * parts; ++i) {
    const size_t r = i / parts;
    check(expanded_type[r] >= 0 && expanded_type[r] < static_cast<int64_t>(types),
          "expanded_type is not the number of a node type");
    const int64_t size = in_parts ? num_pointed(indptr[i]) : num_nodes[expanded_type[r]];
    of_parts.push_back(
        edge_view({indptr[i], indices[i], edge_id[i], edge_time[i], weight_prefix[i]}, node_time,
                  num_nodes, expanded_type[r], neighbor_type[r], edge_type_hash[r], size));
    of_parts.back().times_of_neighbors = times_of_neighbors;
  }
  for (size_t r = 0; in_parts && r < edge_types; ++r) {
    const Places& where = places[expanded_type[r]];
    check(where.num_parts == static_cast<int64_t>(parts), "books differ in the number of parts");
    views.push_back(over_parts(of_parts[r * parts], of_parts.data() + r * parts, where));
  }
  for (size_t r = 0; r < edge_types; ++r) {
    check(weighting_of(weighting) != Weighting::kGcn || expanded_type[r] == neighbor_type[r],
          "weighting by both degrees needs edges within one node type");
  }
  if (!in_parts) views = of_parts;
  const Options options{num_neighbors,
                        num_hops,
                        replace,
                        disjoint,
                        last,
                        induced,
                        static_cast<uint64_t>(key),
                        int32_output,
                        usable_threads(num_threads),
                        waits,
                        by_node,
                        by_source,
                        same_in_all_hops,
                        static_cast<uint64_t>(next_key),
                        static_cast<uint32_t>(renewed),
                        weighting_of(weighting),
                        layers,
                        strict};
  thread_local std::unique_ptr<Scratch> kept;
  std::unique_ptr<Scratch> scratch = std::move(kept);  // lost if anything below throws
  if (!scratch) scratch = std::make_unique<Scratch>();
  Sampling sampling(views, num_nodes, options, *scratch);
  sampling.begin(num_nodes, seed, seed_time, after);
  sampling.run();
  Output out = sampling.output();
  if (scratch->bytes() <= kScratchLimit) kept = std::move(scratch);
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "neighbor_sample(Tensor[] indptr, Tensor[] indices, Tensor[] edge_id, Tensor[] edge_time, "
      "Tensor[] weight_prefix, Tensor[] node_time, int[] num_nodes, int[] expanded_type, "
      "int[] neighbor_type, int[] edge_type_hash, Tensor[] seed, Tensor[] seed_time, "
      "int[] num_neighbors, int num_hops, bool replace, bool disjoint, bool last, bool induced, "
      "int key, bool int32_output, int num_threads, Tensor[] part, Tensor[] local, "
      "Tensor[] offsets, Tensor[] after, bool times_of_neighbors, bool waits, bool by_node=False, "
      "bool "
      "by_source=False, "
      "bool same_in_all_hops=False, int next_key=0, int renewed=0, int weighting=0, "
      "bool layers=False, bool strict=False) -> (Tensor[] node, Tensor[] row, Tensor[] col, "
      "Tensor[] edge, "
      "Tensor[] batch, Tensor[] colptr, Tensor[] weight, Tensor num_sampled_nodes, "
      "Tensor num_sampled_edges)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("neighbor_sample", TORCH_BOX(&pyg_scale::neighbor_sample));
}
