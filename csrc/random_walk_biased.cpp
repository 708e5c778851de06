// random_walk_biased: the walks of node2vec, see pyg_scale/ops/random_walk.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>

#include "pool.h"
#include "prefetch.h"
#include "walks.h"

namespace pyg_scale {
namespace {

constexpr int64_t kAttempts = 32;  // at least so many before all edges of a node are looked at
constexpr int64_t kSure = int64_t{1} << 62;

// Of 2^62: the odds of taking a drawn edge, by where it leads.
struct Odds {
  int64_t back, near, far;
  int64_t least, most;  // of near and far
};

struct SecondOrder {
  const WalkGraph& graph;
  IntColumn sorted;  // the neighbours of each node in ascending order; or none, and all are read
  Odds odds;

  bool is_edge(const NodeEdges& from, int64_t x) const {
    if (!sorted.data) {
      for (int64_t e = from.low; e < from.high; ++e) {
        if (graph.neighbor[e] == x) return true;
      }
      return false;
    }
    int64_t low = from.low, left = from.high - from.low;
    while (left > 1) {
      const int64_t half = left / 2;
      low += sorted[low + half] <= x ? half : 0;
      left -= half;
    }
    return left == 1 && sorted[low] == x;
  }

  int64_t odds_of(int64_t before, const NodeEdges& of_before, int64_t x) const {
    if (x == before) return odds.back;
    return is_edge(of_before, x) ? odds.near : odds.far;
  }

  bool accepts(int64_t word, int64_t before, const NodeEdges& of_before, int64_t x) const {
    if (x == before) return word < odds.back;
    if (word < odds.least) return true;
    if (word >= odds.most) return false;
    return word < (is_edge(of_before, x) ? odds.near : odds.far);
  }

  // Draws among all edges of v at once: first where to, then which one.
  int64_t exact(uint64_t key, int64_t attempts, int64_t v, const NodeEdges& edges, int64_t before,
                const NodeEdges& of_before) const {
    const int64_t each[] = {odds.back, odds.near, odds.far};
    const auto kind_of = [&](int64_t e) {
      const int64_t x = graph.end_of(e);
      return x == before ? 0 : is_edge(of_before, x) ? 1 : 2;
    };
    int64_t weight[3] = {0, 0, 0};
    for (int64_t e = edges.low; e < edges.high; ++e) {
      weight[kind_of(e)] += graph.weight(v, edges, e);
    }
    unsigned __int128 mass[3], all = 0;
    for (int k = 0; k < 3; ++k) {
      mass[k] = static_cast<unsigned __int128>(weight[k]) * static_cast<uint64_t>(each[k]);
      all += mass[k];
    }
    int shift = 0;
    while (all >> shift >> 62) ++shift;
    uint64_t share[3], total = 0;
    for (int k = 0; k < 3; ++k) {
      share[k] = static_cast<uint64_t>(mass[k] >> shift);
      if (mass[k] && !share[k]) share[k] = 1;
      total += share[k];
    }
    if (total == 0) return -1;
    uint64_t r = bounded(key, static_cast<uint64_t>(2 * attempts), total);
    int kind = 0;
    while (r >= share[kind]) r -= share[kind++];
    auto left = static_cast<int64_t>(
        bounded(key, static_cast<uint64_t>(2 * attempts + 1), static_cast<uint64_t>(weight[kind])));
    for (int64_t e = edges.low; e < edges.high; ++e) {
      if (kind_of(e) != kind) continue;
      left -= graph.weight(v, edges, e);
      if (left < 0) return e;
    }
    fail_not_rising(v);
  }
};

// A walk that has not taken its step yet.
struct Pending {
  int64_t walk;  // in its group
  uint64_t key;
  NodeEdges edges;
  int64_t attempts, place;
};

class Group {
 public:
  Group(const SecondOrder& rule, const Walks& walks, int64_t from, int64_t to)
      : rule_(rule), walks_(walks), from_(from), to_(to) {
    for (int64_t i = from; i < to; ++i) {
      node_[i - from] = walks.nodes[i * (walks.length + 1)] = walks.first[i];
      stream_[i - from] = walks.key_of(i);
    }
  }

  void walk() {
    const WalkGraph& graph = rule_.graph;
    for (int64_t step = 0; step < walks_.length; ++step) {
      std::copy_n(node_, kTogether, coming_);
      if (step == 0) {
        for (int64_t i = 0; i < to_ - from_; ++i) edges_[i] = graph.edges_of(node_[i]);
        first_order_step(graph, walks_, stream_, coming_, from_, to_, 0);
      } else {
        biased_step(step);
      }
      std::copy_n(node_, kTogether, before_);
      std::copy_n(coming_, kTogether, node_);
      std::copy_n(edges_, kTogether, of_before_);
    }
  }

 private:
  void biased_step(int64_t step) {
    const WalkGraph& graph = rule_.graph;
    int64_t waiting = 0;
    for (int64_t i = 0; i < to_ - from_; ++i) {
      const int64_t v = node_[i];
      const NodeEdges edges = edges_[i] = graph.edges_of(v);
      const int64_t degree = edges.high - edges.low;
      if (edges.total == 0 || degree == 1) {
        take(i, step, edges.total == 0 ? -1 : edges.low);
        continue;
      }
      const uint64_t key =
          fold(fold(stream_[i], static_cast<uint64_t>(step)), static_cast<uint64_t>(v));
      pending_[waiting++] = {i, key, edges, std::max(kAttempts, degree), -1};
    }
    for (uint64_t attempt = 0; waiting > 0; ++attempt) {
      for (int64_t j = 0; j < waiting; ++j) {
        Pending& one = pending_[j];
        const auto sum = static_cast<int64_t>(
            bounded(one.key, 2 * attempt, static_cast<uint64_t>(one.edges.total)));
        one.place = graph.locate(node_[one.walk], one.edges, sum);
        graph.prefetch_edge(one.place);
      }
      int64_t still = 0;
      for (int64_t j = 0; j < waiting; ++j) {
        const Pending one = pending_[j];
        const int64_t i = one.walk, x = graph.end_of(one.place);
        const auto word = static_cast<int64_t>(draw(one.key, 2 * attempt + 1) >> 2);
        if (rule_.accepts(word, before_[i], of_before_[i], x)) {
          take(i, step, one.place);
        } else if (static_cast<int64_t>(attempt) + 1 == one.attempts) {
          take(i, step,
               rule_.exact(one.key, one.attempts, node_[i], one.edges, before_[i], of_before_[i]));
        } else {
          pending_[still++] = one;
        }
      }
      waiting = still;
    }
  }

  void take(int64_t i, int64_t step, int64_t position) {
    if (position >= 0) coming_[i] = rule_.graph.end_of(position);
    walks_.write(from_ + i, step, coming_[i], position);
    prefetch_ends(rule_.graph.begin, coming_[i]);
  }

  const SecondOrder& rule_;
  const Walks& walks_;
  const int64_t from_, to_;
  int64_t node_[kTogether] = {}, before_[kTogether] = {}, coming_[kTogether] = {};
  NodeEdges edges_[kTogether], of_before_[kTogether];  // of `node_` and of `before_`
  uint64_t stream_[kTogether] = {};
  Pending pending_[kTogether];
};

int64_t checked_odds(int64_t odds, const char* name) {
  check(odds > 0 && odds <= kSure, std::string(name) + " must be from 1 to 2**62");
  return odds;
}

std::tuple<Tensor, Tensor> random_walk_biased(Tensor indptr, Tensor indices,
                                              std::optional<Tensor> weight_prefix,
                                              std::optional<Tensor> sorted, Tensor start,
                                              std::optional<Tensor> walk, int64_t length,
                                              int64_t key, int64_t back, int64_t near, int64_t far,
                                              bool positions, int64_t num_threads) {
  const WalkGraph graph(indptr, indices, weight_prefix);
  Walks walks(start, walk, length, key);
  walks.check_start(graph);
  SecondOrder rule{graph,
                   {},
                   {checked_odds(back, "back"), checked_odds(near, "near"),
                    checked_odds(far, "far"), std::min(near, far), std::max(near, far)}};
  if (sorted) {
    rule.sorted = int_column(*sorted, "sorted");
    check(sorted->numel() == graph.num_entries, "sorted must have as many entries as indices");
  }
  Tensor nodes = pool_empty({walks.count, length + 1}, ScalarType::Long);
  Tensor taken = pool_empty({positions ? walks.count : 0, length}, ScalarType::Long);
  if (walks.count == 0) return {nodes, taken};
  walks.nodes = static_cast<int64_t*>(nodes.mutable_data_ptr());
  if (positions) walks.positions = static_cast<int64_t*>(taken.mutable_data_ptr());
  walks.for_each_group(num_threads,
                       [&](int64_t from, int64_t to) { Group(rule, walks, from, to).walk(); });
  return {nodes, taken};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "random_walk_biased(Tensor indptr, Tensor indices, Tensor? weight_prefix, Tensor? sorted, "
      "Tensor start, Tensor? walk, int length, int key, int back, int near, int far, "
      "bool positions, int num_threads) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("random_walk_biased", TORCH_BOX(&pyg_scale::random_walk_biased));
}
