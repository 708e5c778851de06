// refine_partition: moves nodes between parts, see pyg_scale/ops/refine_partition.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

#include "adjacency.h"
#include "connections.h"
#include "keys.h"
#include "part_loads.h"

namespace pyg_scale {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::min();
constexpr int kRepairRounds = 8;

struct Move {
  int64_t part = -1;
  int64_t gain = kNone;
};

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

template <typename T>
class Refinement {
 public:
  Refinement(const Adjacency<T>& graph, PartLoads& loads, int32_t* assignment, uint64_t key)
      : graph_(graph),
        loads_(loads),
        part_(assignment),
        key_(key),
        connections_(graph, assignment, loads.parts()),
        current_(static_cast<size_t>(graph.num_nodes), kNone),
        locked_(static_cast<size_t>(graph.num_nodes), 0) {}

  // Brings the parts within their bounds, as cheaply as it finds.
  void repair() {
    for (int round = 0; round < kRepairRounds && excess() > 0; ++round) {
      start();
      const bool any = loads_.any_too_empty();
      for (int64_t v = 0; v < graph_.num_nodes; ++v) {
        if (any || loads_.too_full(v, part_[v])) offer(v, to_repair(v).gain);
      }
      int64_t moved = 0;
      while (!queue_.empty() && excess_ > 0) {
        const Candidate top = queue_.top();
        queue_.pop();
        if (locked_[top.node] || current_[top.node] != top.gain) continue;
        const Move move = to_repair(top.node);
        if (move.gain < top.gain) {
          offer(top.node, move.gain);
          continue;
        }
        excess_ += loads_.growth(top.node, part_[top.node], move.part);
        apply(top.node, move.part);
        ++moved;
        graph_.for_each(top.node, [&](int64_t u, int64_t) {
          if (!locked_[u] && (any || loads_.too_full(u, part_[u]))) offer(u, to_repair(u).gain);
        });
      }
      if (moved == 0) break;
    }
  }

  // One pass; returns by how much the cut fell. Each node moves once at most. Moves after the best
  // moment are undone.
  int64_t pass(int64_t patience) {
    start();
    for (int64_t v = 0; v < graph_.num_nodes; ++v) offer(v, best_gain(v));
    std::vector<std::pair<int64_t, int32_t>> moves;  // and where each node came from
    int64_t total = 0, best = 0, best_size = 0;
    while (!queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      const int64_t v = top.node;
      if (locked_[v] || current_[v] != top.gain) continue;
      const Move move = allowed(v);
      if (move.gain < top.gain) {
        offer(v, move.gain);
        continue;
      }
      moves.emplace_back(v, part_[v]);
      apply(v, move.part);
      total += move.gain;
      const auto size = static_cast<int64_t>(moves.size());
      if (total > best) {
        best = total;
        best_size = size;
      } else if (size - best_size > patience) {
        break;
      }
      graph_.for_each(v, [&](int64_t u, int64_t) {
        if (!locked_[u]) offer(u, best_gain(u));
      });
    }
    for (auto size = static_cast<int64_t>(moves.size()); size > best_size; --size) {
      apply(moves[size - 1].first, moves[size - 1].second);
    }
    return best;
  }

 private:
  int64_t excess() { return excess_ = loads_.excess(); }

  void start() {
    queue_ = {};
    std::fill(current_.begin(), current_.end(), kNone);
    std::fill(locked_.begin(), locked_.end(), 0);
  }

  // Puts v into the queue, or takes it out, if its gain differs from the one in the queue.
  void offer(int64_t v, int64_t gain) {
    if (gain == current_[v]) return;
    current_[v] = gain;
    if (gain == kNone) return;
    const auto id = static_cast<uint64_t>(v);
    queue_.push({gain, fold(key_, id) >> 1, v});
  }

  void apply(int64_t v, int64_t to) {
    const int64_t from = part_[v];
    loads_.move(v, from, to);
    part_[v] = static_cast<int32_t>(to);
    locked_[v] = 1;
    graph_.for_each(v, [&](int64_t u, int64_t w) { connections_.move(u, from, to, w); });
  }

  // Keeps the better move. Of equally good parts, the first one when counting from v wins.
  void consider(Move& best, int64_t v, int64_t part, int64_t gain) const {
    const int64_t parts = loads_.parts();
    if (gain > best.gain || (gain == best.gain && (part + v) % parts < (best.part + v) % parts)) {
      best = {part, gain};
    }
  }

  // The largest gain of any move to a part that v is joined to, whether there is room or not.
  int64_t best_gain(int64_t v) const {
    int64_t most = kNone;
    const int64_t mine = part_[v];
    connections_.for_each(v, [&](int64_t part, int64_t weight) {
      if (part != mine) most = std::max(most, weight);
    });
    return most == kNone ? kNone : most - connections_.get(v, mine);
  }

  Move allowed(int64_t v) const {
    Move best;
    const int64_t mine = part_[v], inside = connections_.get(v, mine);
    connections_.for_each(v, [&](int64_t part, int64_t weight) {
      if (part != mine && weight - inside >= best.gain && loads_.growth(v, mine, part) <= 0) {
        consider(best, v, part, weight - inside);
      }
    });
    return best;
  }

  Move to_repair(int64_t v) const {
    Move best;
    const int64_t mine = part_[v], inside = connections_.get(v, mine);
    for (int64_t part = 0; part < loads_.parts(); ++part) {
      if (part != mine && loads_.growth(v, mine, part) < 0) {
        consider(best, v, part, connections_.get(v, part) - inside);
      }
    }
    return best;
  }

  const Adjacency<T>& graph_;
  PartLoads& loads_;
  int32_t* part_;
  uint64_t key_;
  Connections connections_;
  std::priority_queue<Candidate> queue_;
  std::vector<int64_t> current_;  // the gain with which a node is in the queue
  std::vector<char> locked_;
  int64_t excess_ = 0;
};

Tensor refine_partition(Tensor indptr, Tensor indices, Tensor edge_weights, Tensor node_weights,
                        Tensor assignment, Tensor capacity, Tensor minimum, int64_t passes,
                        int64_t patience, int64_t key) {
  const int64_t num_nodes = num_pointed(indptr);
  check(node_weights.dim() == 2 && capacity.dim() == 2,
        "node_weights and capacity must have two dimensions");
  const int64_t columns = node_weights.size(1), parts = capacity.size(0);
  const int64_t* weights = int64_matrix(node_weights, num_nodes, columns, "node_weights");
  const int64_t* most = int64_matrix(capacity, parts, columns, "capacity");
  const int64_t* least = int64_matrix(minimum, parts, columns, "minimum");
  check(passes >= 0 && passes <= kMostRounds, "passes must be from 0 to 10000");
  check(patience >= 0, "patience must not be negative");
  checked_sum(weights, num_nodes * columns, "node_weights");
  constexpr int64_t kLeast = -(int64_t{1} << 60);
  for (int64_t i = 0; i < parts * columns; ++i) {
    check(most[i] > kLeast && least[i] > kLeast, "capacity and minimum must be above -2**60");
  }
  check(assignment.numel() == num_nodes, "assignment must have one number a node");
  const IntColumn before = int_column(assignment, "assignment");
  Tensor out = torch::stable::empty({num_nodes}, ScalarType::Int);
  int32_t* part = num_nodes ? out.mutable_data_ptr<int32_t>() : nullptr;
  PartLoads loads(weights, num_nodes, columns, parts, most, least);
  check(loads.is_bounded(),
        "minimum (or a negative capacity) is too large: the excess needs more than 62 bits");
  for (int64_t v = 0; v < num_nodes; ++v) {
    check(before[v] >= 0 && before[v] < parts, "assignment must be from 0 to the number of parts");
    part[v] = static_cast<int32_t>(before[v]);
    loads.add(v, part[v]);
  }
  with_adjacency(indptr, indices, edge_weights, [&](const auto& graph) {
    Refinement refinement(graph, loads, part, static_cast<uint64_t>(key));
    refinement.repair();
    for (int64_t i = 0; i < passes; ++i) {
      if (refinement.pass(patience) == 0) break;
    }
  });
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "refine_partition(Tensor indptr, Tensor indices, Tensor edge_weights, Tensor node_weights, "
      "Tensor assignment, Tensor capacity, Tensor minimum, int passes, int patience, int key) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("refine_partition", TORCH_BOX(&pyg_scale::refine_partition));
}
