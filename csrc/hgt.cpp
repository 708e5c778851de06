// hgt_sample: equally many nodes of every type, drawn from a budget of neighbours. hgt_take: one
// such draw, where the in-edges come from elsewhere. pyg_scale/ops/hgt.py defines both to the bit.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "buffer.h"
#include "graph_view.h"
#include "induced.h"
#include "keys.h"
#include "node_list.h"
#include "pool.h"
#include "prefetch.h"
#include "relabel.h"

namespace pyg_scale {
namespace {

using Tensors = std::vector<Tensor>;
using Output = std::tuple<Tensors, Tensors, Tensors, Tensors, Tensors>;

constexpr int kShiftedBits = 31;

// Weights by place, from which places are taken one after the other (Fenwick, "A new data
// structure for cumulative frequency tables", 1994): node i of the tree holds the sum of the
// (i & -i) weights up to it.
class FenwickTree {
 public:
  // Begins with the weights at `sums_`, which the caller has put there.
  Buffer<uint64_t>& begin(int64_t size) {
    sums_.clear();
    sums_.reserve(size);
    sums_.set_size(size);
    return sums_;
  }

  // Returns the total.
  uint64_t build() {
    uint64_t total = 0;
    const int64_t size = sums_.size();
    for (int64_t i = 0; i < size; ++i) total += sums_[i];
    for (int64_t i = 1; i <= size; ++i) {
      const int64_t parent = i + (i & -i);
      if (parent <= size) sums_[parent - 1] += sums_[i - 1];
    }
    return total;
  }

  // The first place at which the running sum exceeds `t`.
  int64_t find(uint64_t t) const {
    const int64_t size = sums_.size();
    int64_t place = 0;
    for (auto step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(size))); step;
         step /= 2) {
      if (place + step <= size && sums_[place + step - 1] <= t) {
        place += step;
        t -= sums_[place - 1];
      }
    }
    return place;
  }

  void subtract(int64_t place, uint64_t weight) {
    for (int64_t i = place + 1; i <= sums_.size(); i += i & -i) sums_[i - 1] -= weight;
  }

 private:
  Buffer<uint64_t> sums_;
};

// The nodes of one type that were seen but not taken, with their scores.
class Budget {
 public:
  void begin(int64_t num_nodes) {
    table_.begin(static_cast<uint64_t>(std::max<int64_t>(num_nodes, 1)));
    entries_.clear();
    num_nodes_ = num_nodes;
    node_bits_ = std::bit_width(static_cast<uint64_t>(num_nodes));
  }

  static constexpr int64_t kBlock = 64;  // table slots that are prefetched together

  // Adds to the scores of up to kBlock nodes, which may repeat. Raises if one is no node.
  void add(const int64_t* nodes, int64_t count, uint64_t score) {
    for (int64_t i = 0; i < count; ++i) {
      if (nodes[i] < 0 || nodes[i] >= num_nodes_) [[unlikely]] {
        fail("indices: neighbour " + std::to_string(nodes[i]) + " is not a node");
      }
    }
    table_.reserve(entries_.size() + count);
    table_.use([&](auto& slots)
                   __attribute__((always_inline)) { add_block(slots, nodes, count, score); });
  }

  // Takes up to `k` nodes that are not in `list` and puts them there.
  void take(int64_t k, uint64_t key, NodeList& list) {
    // The table holds places in entries_, so entries of taken nodes stay, and the rest is copied.
    left_.clear();
    left_.reserve(entries_.size());
    uint64_t largest = 0;
    for (int64_t i = 0; i < entries_.size(); ++i) {
      if (list.table().find(list.identity(entries_[i].node, 0)) >= 0) continue;
      left_.push(entries_[i]);
      largest = std::max(largest, entries_[i].score);
    }
    const int64_t size = left_.size();
    sort_left();
    if (k < 0 || k >= size) {
      for (int64_t i = 0; i < size; ++i) list.add_seeds(&left_[i].node, 1, 0);
      return;
    }
    const int shift = std::bit_width(largest) - kShiftedBits;
    const auto weigh = [&](uint64_t score) {
      score = shift > 0 ? score >> shift : score << -shift;
      return std::max<uint64_t>(score * score >> (kShiftedBits - 1), 1);
    };
    Buffer<uint64_t>& weights = tree_.begin(size);
    for (int64_t i = 0; i < size; ++i) weights[i] = weigh(left_[i].score);
    uint64_t total = tree_.build();
    for (int64_t i = 0; i < k; ++i) {
      const int64_t place = tree_.find(bounded(key, static_cast<uint64_t>(i), total));
      const uint64_t weight = weigh(left_[place].score);
      tree_.subtract(place, weight);
      total -= weight;
      list.add_seeds(&left_[place].node, 1, 0);
    }
  }

 private:
  struct Entry {
    int64_t node;
    uint64_t score;
  };

  template <typename Slots>
  PYG_SCALE_PREFETCH void add_block(Slots& slots, const int64_t* nodes, int64_t count,
                                    uint64_t score) {
    for (int64_t i = 0; i < count; ++i) slots.prefetch(static_cast<uint64_t>(nodes[i]));
    for (int64_t i = 0; i < count; ++i) {
      const auto next = static_cast<uint64_t>(entries_.size());
      const uint64_t place = slots.find_or_insert(static_cast<uint64_t>(nodes[i]), next);
      if (place == next) entries_.push({nodes[i], 0});
      entries_[static_cast<int64_t>(place)].score += score;
    }
  }

  // By node: a few digits at a time from the lowest on, each step keeping the order of the last.
  void sort_left() {
    constexpr int kDigit = 11;
    const int64_t size = left_.size();
    if (size < (int64_t{1} << kDigit)) {
      std::sort(left_.data(), left_.data() + size,
                [](const Entry& a, const Entry& b) { return a.node < b.node; });
      return;
    }
    sorted_.reserve(size);
    Entry *from = left_.data(), *to = sorted_.data();
    for (int shift = 0; shift < node_bits_; shift += kDigit) {
      int64_t start[(1 << kDigit) + 1] = {};
      const auto digit = [&](const Entry& entry) {
        return (entry.node >> shift) & ((1 << kDigit) - 1);
      };
      for (int64_t i = 0; i < size; ++i) ++start[digit(from[i]) + 1];
      for (int d = 0; d < 1 << kDigit; ++d) start[d + 1] += start[d];
      for (int64_t i = 0; i < size; ++i) to[start[digit(from[i])]++] = from[i];
      std::swap(from, to);
    }
    if (from != left_.data()) std::copy_n(from, size, left_.data());
  }

  RelabelTable table_;  // from nodes to places in entries_
  Buffer<Entry> entries_, left_, sorted_;
  int64_t num_nodes_ = 0;
  int node_bits_ = 0;
  FenwickTree tree_;
};

// Adds the in-edges of the nodes from row `begin` on to the budget of their sources.
void add_in_edges(const EdgeView& view, const NodeList& list, int64_t begin, int64_t end,
                  Budget& budget) {
  constexpr int64_t kAhead = 8;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t node = list.node()[row];
    if (row + kAhead < end) prefetch_ends(view.indptr, list.node()[row + kAhead]);
    if (list.table().find(list.identity(node, 0)) != row) continue;  // a repeated seed
    const int64_t first = view.indptr[node], last = view.indptr[node + 1];
    check_entries(node, first, last, view.num_edges);
    const int64_t degree = last - first;
    if (degree == 0) continue;
    const uint64_t score = std::max<uint64_t>((uint64_t{1} << 32) / degree, 1);
    int64_t block[Budget::kBlock];
    for (int64_t from = first; from < first + degree; from += Budget::kBlock) {
      const int64_t count = std::min(Budget::kBlock, first + degree - from);
      for (int64_t i = 0; i < count; ++i) block[i] = view.indices[from + i];
      budget.add(block, count, score);
    }
  }
}

template <typename T>
Tensor to_tensor(const T* data, int64_t count, bool int32) {
  Tensor out = pool_empty({count}, int32 ? ScalarType::Int : ScalarType::Long);
  if (int32) {
    std::copy_n(data, count, out.mutable_data_ptr<int32_t>());
  } else {
    std::copy_n(data, count, out.mutable_data_ptr<int64_t>());
  }
  return out;
}

template <typename T>
void fill_col(const Buffer<int64_t>& colptr, T* col) {
  for (int64_t i = 0; i + 1 < colptr.size(); ++i) {
    std::fill(col + colptr[i], col + colptr[i + 1], static_cast<T>(i));
  }
}

std::vector<EdgeView> edge_views(const Tensors& indptr, const Tensors& indices,
                                 const Tensors& edge_id, const std::vector<int64_t>& num_nodes,
                                 const std::vector<int64_t>& dst_type,
                                 const std::vector<int64_t>& src_type) {
  const size_t count = indptr.size();
  check(indices.size() == count && edge_id.size() == count && dst_type.size() == count &&
            src_type.size() == count,
        "indptr, indices, edge_id, dst_type and src_type must have one entry per edge type");
  std::vector<EdgeView> views(count);
  for (size_t r = 0; r < count; ++r) {
    EdgeView& view = views[r];
    const auto types = static_cast<int64_t>(num_nodes.size());
    check(dst_type[r] >= 0 && dst_type[r] < types && src_type[r] >= 0 && src_type[r] < types,
          "dst_type and src_type must be numbers of node types");
    view.expanded_type = dst_type[r];
    view.neighbor_type = src_type[r];
    view.num_expanded = num_nodes[dst_type[r]];
    view.num_neighbors = num_nodes[src_type[r]];
    view.indptr = int64_data(indptr[r], view.num_expanded + 1, "indptr");
    view.indices = int_column(indices[r], "indices");
    view.num_edges = indices[r].numel();
    check(view.indptr[0] == 0 && view.indptr[view.num_expanded] == view.num_edges,
          "indptr must go from 0 to the number of edges");
    if (edge_id[r].numel()) {
      check(edge_id[r].numel() == indices[r].numel(), "edge_id must have one entry per edge");
      view.edge_id = int_column(edge_id[r], "edge_id");
    }
  }
  return views;
}

Output hgt_sample(Tensors indptr, Tensors indices, Tensors edge_id, std::vector<int64_t> num_nodes,
                  std::vector<int64_t> dst_type, std::vector<int64_t> src_type,
                  std::vector<int64_t> node_type_hash, Tensors seed,
                  std::vector<int64_t> num_samples, int64_t key, bool int32_output) {
  const size_t types = num_nodes.size();
  for (const int64_t count : num_nodes) check_count(count, "num_nodes");
  check(types && node_type_hash.size() == types && seed.size() == types,
        "num_nodes, node_type_hash and seed must have one entry per node type");
  check(num_samples.size() % types == 0, "num_samples must be one number per node type and hop");
  const size_t num_hops = num_samples.size() / types;
  const std::vector<EdgeView> views =
      edge_views(indptr, indices, edge_id, num_nodes, dst_type, src_type);
  const int64_t max_rows = int32_output ? std::numeric_limits<int32_t>::max()
                                        : std::numeric_limits<uint32_t>::max() - 256;

  std::vector<NodeList> nodes(types);
  std::vector<Budget> budgets(types);
  for (size_t t = 0; t < types; ++t) {
    nodes[t].begin(num_nodes[t], seed[t].numel(), false, max_rows);
    nodes[t].add_seeds(int64_data(seed[t], seed[t].numel(), "seed"), seed[t].numel(), 0);
    budgets[t].begin(num_nodes[t]);
  }
  std::vector<int64_t> begin(types, 0), end(types);
  const uint64_t base = fold(static_cast<uint64_t>(key), static_cast<uint64_t>(Purpose::kHgt));
  for (size_t hop = 0; hop < num_hops; ++hop) {
    for (size_t t = 0; t < types; ++t) end[t] = nodes[t].size();
    for (const EdgeView& view : views) {
      add_in_edges(view, nodes[view.expanded_type], begin[view.expanded_type],
                   end[view.expanded_type], budgets[view.neighbor_type]);
    }
    for (size_t t = 0; t < types; ++t) {
      const uint64_t hash = static_cast<uint64_t>(node_type_hash[t]);
      budgets[t].take(num_samples[t * num_hops + hop], fold(fold(base, hop), hash), nodes[t]);
      check(nodes[t].size() <= max_rows, "num_samples: more nodes than can be numbered");
    }
    begin = end;
  }

  Tensors node, row, col, edge, colptr;
  for (const NodeList& list : nodes) {
    node.push_back(to_tensor(list.node(), list.size(), int32_output));
  }
  Induced induced;
  EdgeList list;
  for (const EdgeView& view : views) {
    induced.edges(view, nodes[view.expanded_type], nodes[view.neighbor_type], nullptr, nullptr,
                  false, list);
    const int64_t count = list.row.size();
    row.push_back(to_tensor(list.row.data(), count, int32_output));
    edge.push_back(to_tensor(list.edge.data(), count, false));
    colptr.push_back(to_tensor(list.colptr.data(), list.colptr.size(), false));
    col.push_back(pool_empty({count}, int32_output ? ScalarType::Int : ScalarType::Long));
    int32_output ? fill_col(list.colptr, col.back().mutable_data_ptr<int32_t>())
                 : fill_col(list.colptr, col.back().mutable_data_ptr<int64_t>());
  }
  return {node, row, col, edge, colptr};
}

Tensor hgt_take(Tensors neighbor, Tensors counts, Tensors score, Tensor taken, int64_t num_nodes,
                int64_t k, int64_t key) {
  check(counts.size() == neighbor.size() && score.size() == neighbor.size(),
        "neighbor, counts and score must have as many entries");
  NodeList nodes;
  nodes.begin(num_nodes, taken.numel(), false, std::numeric_limits<uint32_t>::max() - 256);
  nodes.add_seeds(int64_data(taken, taken.numel(), "taken"), taken.numel(), 0);
  const int64_t before = nodes.size();
  Budget budget;
  budget.begin(num_nodes);
  for (size_t r = 0; r < neighbor.size(); ++r) {
    const int64_t total = neighbor[r].numel(), rows = counts[r].numel();
    const int64_t* from = int64_data(neighbor[r], total, "neighbor");
    const int64_t* count = int64_data(counts[r], rows, "counts");
    const int64_t* adds = int64_data(score[r], rows, "score");
    int64_t begin = 0;
    for (int64_t i = 0; i < rows; ++i) {
      check(count[i] >= 0 && count[i] <= total - begin, "counts must add up to neighbor");
      for (const int64_t end = begin + count[i]; begin < end;) {
        const int64_t block = std::min(Budget::kBlock, end - begin);
        if (adds[i]) budget.add(from + begin, block, static_cast<uint64_t>(adds[i]));
        begin += block;
      }
    }
    check(begin == total, "counts must add up to neighbor");
  }
  budget.take(k, static_cast<uint64_t>(key), nodes);
  return to_tensor(nodes.node() + before, nodes.size() - before, false);
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "hgt_sample(Tensor[] indptr, Tensor[] indices, Tensor[] edge_id, int[] num_nodes, "
      "int[] dst_type, int[] src_type, int[] node_type_hash, Tensor[] seed, int[] num_samples, "
      "int key, bool int32_output) -> (Tensor[] node, Tensor[] row, Tensor[] col, "
      "Tensor[] edge, Tensor[] colptr)");
  m.def(
      "hgt_take(Tensor[] neighbor, Tensor[] counts, Tensor[] score, Tensor taken, int num_nodes, "
      "int k, int key) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("hgt_sample", TORCH_BOX(&pyg_scale::hgt_sample));
  m.impl("hgt_take", TORCH_BOX(&pyg_scale::hgt_take));
}
