// cluster_nodes: small clusters of nodes that hang together, see pyg_scale/ops/cluster_nodes.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "adjacency.h"
#include "keys.h"

namespace pyg_scale {
namespace {

template <typename T>
class Clustering {
 public:
  Clustering(const Adjacency<T>& graph, const int64_t* weights, int64_t columns,
             const int64_t* limit, const IntColumn& group, uint64_t key)
      : graph_(graph),
        weights_(weights),
        columns_(columns),
        limit_(limit),
        group_(group),
        key_(key),
        cluster_(static_cast<size_t>(graph.num_nodes)),
        size_(static_cast<size_t>(graph.num_nodes), 1),
        held_(weights, weights + graph.num_nodes * columns),
        joined_(static_cast<size_t>(graph.num_nodes), 0) {
    for (int64_t v = 0; v < graph.num_nodes; ++v) cluster_[v] = static_cast<int32_t>(v);
  }

  // Lets every node join the cluster that it is joined to the most; returns how many moved.
  int64_t round(const int64_t* order) {
    int64_t moved = 0;
    for (int64_t i = 0; i < graph_.num_nodes; ++i) {
      const int64_t v = order[i], mine = cluster_[v];
      const int64_t best = favourite(v, true);
      if (best == mine) continue;
      for (int64_t c = 0; c < columns_; ++c) {
        held_[mine * columns_ + c] -= weights_[v * columns_ + c];
        held_[best * columns_ + c] += weights_[v * columns_ + c];
      }
      --size_[mine];
      ++size_[best];
      cluster_[v] = static_cast<int32_t>(best);
      ++moved;
    }
    return moved;
  }

  // Nodes that are still alone join others that would have liked the same cluster.
  void gather_singles(const int64_t* order) {
    const int64_t size = graph_.num_nodes;
    std::vector<int64_t> waiting(static_cast<size_t>(size), -1);  // by cluster: who wants it
    std::unordered_map<int64_t, int64_t> isolated;                // by group: who wants none
    for (int64_t i = 0; i < size; ++i) {
      const int64_t v = order[i];
      if (size_[cluster_[v]] != 1) continue;
      const int64_t wish = favourite(v, false), group = group_.data ? group_[v] : 0;
      int64_t* slot;
      if (wish != cluster_[v]) {
        slot = &waiting[wish];
      } else {
        slot = &isolated.try_emplace(group, -1).first->second;
      }
      if (*slot < 0 || !fits(v, *slot)) {
        *slot = cluster_[v];
        continue;
      }
      const int64_t mine = cluster_[v];
      for (int64_t c = 0; c < columns_; ++c) {
        held_[*slot * columns_ + c] += weights_[v * columns_ + c];
      }
      size_[mine] = 0;
      ++size_[*slot];
      cluster_[v] = static_cast<int32_t>(*slot);
    }
  }

  // The clusters numbered in the order of their first nodes.
  int64_t number(int64_t* out) const {
    std::vector<int64_t> name(cluster_.size(), -1);
    int64_t count = 0;
    for (int64_t v = 0; v < graph_.num_nodes; ++v) {
      int64_t& mine = name[cluster_[v]];
      if (mine < 0) mine = count++;
      out[v] = mine;
    }
    return count;
  }

 private:
  bool fits(int64_t v, int64_t cluster) const {
    for (int64_t c = 0; c < columns_; ++c) {
      const int64_t w = weights_[v * columns_ + c];
      if (w && held_[cluster * columns_ + c] + w > limit_[c]) return false;
    }
    return true;
  }

  // The cluster to which v is joined the most. Its own wins ties; a hash decides other ties.
  int64_t favourite(int64_t v, bool with_room) {
    touched_.clear();
    const int64_t group = group_.data ? group_[v] : 0;
    graph_.for_each(v, [&](int64_t u, int64_t w) {
      if (u == v || (group_.data && group_[u] != group)) return;
      const int64_t cluster = cluster_[u];
      if (joined_[cluster] == 0) touched_.push_back(cluster);
      joined_[cluster] += w;
    });
    const int64_t mine = cluster_[v];
    const uint64_t key = fold(key_, static_cast<uint64_t>(v));
    const auto hash = [&](int64_t c) { return fold(key, static_cast<uint64_t>(c)) >> 1; };
    int64_t best = mine, most = joined_[mine];
    uint64_t lowest = 0;  // the hash of the best, once there was a tie
    bool hashed = false;
    for (const int64_t cluster : touched_) {
      const int64_t w = joined_[cluster];
      joined_[cluster] = 0;
      if (cluster == mine || w < most || (w == most && best == mine)) continue;
      uint64_t own = 0;
      if (w == most) {
        if (!hashed) lowest = hash(best);
        hashed = true;
        own = hash(cluster);
        if (own > lowest || (own == lowest && cluster > best)) continue;
      }
      if (with_room && !fits(v, cluster)) continue;
      hashed = w == most;
      lowest = own;
      best = cluster;
      most = w;
    }
    return best;
  }

  const Adjacency<T>& graph_;
  const int64_t* weights_;
  int64_t columns_;
  const int64_t* limit_;
  IntColumn group_;
  uint64_t key_;
  std::vector<int32_t> cluster_, size_;
  std::vector<int64_t> held_, joined_, touched_;
};

Tensor cluster_nodes(Tensor indptr, Tensor indices, Tensor edge_weights, Tensor node_weights,
                     Tensor limit, Tensor group, Tensor order, int64_t rounds, int64_t key) {
  const int64_t num_nodes = num_pointed(indptr), columns = limit.numel();
  const int64_t* weights = int64_matrix(node_weights, num_nodes, columns, "node_weights");
  const int64_t* most = int64_data(limit, columns, "limit");
  const int64_t* visit = int64_data(order, num_nodes, "order");
  IntColumn groups = int_column(group, "group");
  check(num_nodes < (int64_t{1} << 31), "there must be fewer than 2**31 nodes");
  check(rounds >= 0 && rounds <= kMostRounds, "rounds must be from 0 to 10000");
  checked_sum(weights, num_nodes * columns, "node_weights");
  check(group.numel() == 0 || group.numel() == num_nodes, "group must have one number a node");
  if (group.numel() == 0) groups.data = nullptr;
  for (int64_t v = 0; v < num_nodes; ++v) {
    check(visit[v] >= 0 && visit[v] < num_nodes, "order must be of nodes");
    check(!groups.data || groups[v] >= 0, "group must not be negative");
  }
  Tensor out = torch::stable::empty({num_nodes}, ScalarType::Long);
  if (num_nodes == 0) return out;
  with_adjacency(indptr, indices, edge_weights, [&](const auto& graph) {
    Clustering clustering(graph, weights, columns, most, groups, static_cast<uint64_t>(key));
    for (int64_t i = 0; i < rounds; ++i) {
      if (clustering.round(visit) * 50 < num_nodes) break;
    }
    clustering.gather_singles(visit);
    clustering.number(out.mutable_data_ptr<int64_t>());
  });
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "cluster_nodes(Tensor indptr, Tensor indices, Tensor edge_weights, Tensor node_weights, "
      "Tensor limit, Tensor group, Tensor order, int rounds, int key) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("cluster_nodes", TORCH_BOX(&pyg_scale::cluster_nodes));
}
