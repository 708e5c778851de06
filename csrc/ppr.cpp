// ppr: nodes of the largest personalised PageRank, see pyg_scale/ops/ppr.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>

#include "buffer.h"
#include "graph_view.h"
#include "parallel.h"
#include "pool.h"
#include "prefetch.h"
#include "relabel.h"

namespace pyg_scale {
namespace {

constexpr int64_t kOne = int64_t{1} << 62;  // the mass of a seed
constexpr int64_t kAhead = 16;              // neighbours; covers the latency of memory

// A node that mass has reached.
struct Reached {
  int64_t node, score, mass;
  int64_t limit;  // it pushes from this mass on
  bool waits;     // for its turn to push
};

struct Rule {
  int64_t num_nodes, num_entries;
  const int64_t* begin;
  IntColumn neighbor;
  uint64_t alpha;  // of 2^62
  int64_t eps;     // of 2^62

  int64_t limit_of(int64_t degree) const {
    const unsigned __int128 limit =
        static_cast<unsigned __int128>(eps) * static_cast<uint64_t>(std::max<int64_t>(1, degree));
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    return limit > kMost ? kMost : static_cast<int64_t>(limit);
  }
};

// Pushes mass from one seed after another. One per thread; what it holds is only memory.
class Pusher {
 public:
  explicit Pusher(const Rule& rule) : rule_(rule) {}

  void from(int64_t seed) {
    table_.begin(static_cast<uint64_t>(rule_.num_nodes));
    reached_.clear();
    turn_[0].clear();
    Reached& first = reached_[row_of(seed)];
    first.mass = kOne;
    first.waits = true;
    turn_[0].push(0);
    for (int now = 0; turn_[now].size(); now = 1 - now) {
      turn_[1 - now].clear();
      for (int64_t i = 0; i < turn_[now].size(); ++i) push(turn_[now][i], turn_[1 - now]);
    }
  }

  // Writes the `k` nodes of [low, high) with the largest scores, larger than 0, and their scores.
  void best(int64_t low, int64_t high, int64_t k, int64_t* node, int64_t* score) {
    found_.clear();
    found_.reserve(reached_.size());
    for (int64_t i = 0; i < reached_.size(); ++i) {
      const Reached& one = reached_[i];
      if (one.score > 0 && one.node >= low && one.node < high) found_.push({one.score, one.node});
    }
    const int64_t count = std::min(k, found_.size());
    std::partial_sort(found_.data(), found_.data() + count, found_.data() + found_.size(),
                      [](const Found& a, const Found& b) {
                        return a.score != b.score ? a.score > b.score : a.node < b.node;
                      });
    for (int64_t i = 0; i < k; ++i) {
      node[i] = i < count ? found_[i].node : -1;
      score[i] = i < count ? found_[i].score : 0;
    }
  }

 private:
  struct Found {
    int64_t score, node;
  };

  int64_t row_of(int64_t node) {
    const int64_t next = reached_.size();
    table_.reserve(next + 1);
    const auto key = static_cast<uint64_t>(node), fresh = static_cast<uint64_t>(next);
    const auto row = static_cast<int64_t>(table_.find_or_insert(key, fresh));
    if (row == next) {
      const int64_t low = rule_.begin[node], high = rule_.begin[node + 1];
      check_entries(node, low, high, rule_.num_entries);
      reached_.push({node, 0, 0, rule_.limit_of(high - low), false});
    }
    return row;
  }

  void push(int64_t row, Buffer<int64_t>& next) {
    Reached& from = reached_[row];
    const int64_t low = rule_.begin[from.node], high = rule_.begin[from.node + 1];
    const int64_t mass = from.mass, degree = high - low;
    from.mass = 0;
    from.waits = false;
    if (degree == 0) {
      from.score += mass;
      return;
    }
    const auto part = static_cast<int64_t>(
        static_cast<unsigned __int128>(static_cast<uint64_t>(mass)) * rule_.alpha >> 62);
    const int64_t rest = mass - std::max<int64_t>(1, part), share = rest / degree;
    from.score += mass - share * degree;  // `from` may move from here on
    if (share == 0) return;
    for (int64_t e = low; e < high; ++e) {
      if (e + kAhead < high) table_.prefetch(static_cast<uint64_t>(rule_.neighbor[e + kAhead]));
      const int64_t v = rule_.neighbor[e];
      if (v < 0 || v >= rule_.num_nodes) [[unlikely]]
        fail_missing("indices: neighbour", v, rule_.num_nodes);
      Reached& to = reached_[row_of(v)];
      to.mass += share;
      if (to.mass >= to.limit && !to.waits) {
        to.waits = true;
        next.push(static_cast<int64_t>(&to - reached_.data()));
      }
    }
  }

  const Rule& rule_;
  RelabelTable table_;
  Buffer<Reached> reached_;
  Buffer<int64_t> turn_[2];  // rows that push now, and after them
  Buffer<Found> found_;
};

std::tuple<Tensor, Tensor> ppr(Tensor indptr, Tensor indices, Tensor seed, Tensor bounds,
                               int64_t alpha, int64_t eps, int64_t k, int64_t num_threads) {
  const int64_t num_nodes = num_pointed(indptr), count = seed.numel();
  const int64_t num_ranges = num_pointed(bounds, "bounds");
  const Rule rule{num_nodes,
                  indices.numel(),
                  int64_data(indptr, num_nodes + 1, "indptr"),
                  int_column(indices, "indices"),
                  static_cast<uint64_t>(alpha),
                  eps};
  check(rule.begin[0] == 0 && rule.begin[num_nodes] == rule.num_entries,
        "indptr must go from 0 to the number of entries of indices");
  check(alpha >= kOne >> 16 && alpha < kOne, "alpha must be from 2**46 to 2**62 - 1");
  check(eps >= 1 << 12 && eps <= kOne, "eps must be from 2**12 to 2**62");
  check_count(k, "k");
  const int64_t* start = int64_data(seed, count, "seed");
  const int64_t* bound = int64_data(bounds, num_ranges + 1, "bounds");
  check_each_within(start, count, "seed: node", num_nodes);
  Tensor nodes = pool_empty({count, num_ranges, k}, ScalarType::Long);
  Tensor scores = pool_empty({count, num_ranges, k}, ScalarType::Long);
  if (nodes.numel() == 0) return {nodes, scores};
  int64_t *node = nodes.mutable_data_ptr<int64_t>(), *score = scores.mutable_data_ptr<int64_t>();
  std::atomic<int64_t> next{0};
  for_each_task(std::min(usable_threads(num_threads), count), [&](int64_t) {
    Pusher pusher(rule);
    for (int64_t i = next++; i < count; i = next++) {
      pusher.from(start[i]);
      for (int64_t r = 0; r < num_ranges; ++r) {
        const int64_t at = (i * num_ranges + r) * k;
        pusher.best(bound[r], bound[r + 1], k, node + at, score + at);
      }
    }
  });
  return {nodes, scores};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "ppr(Tensor indptr, Tensor indices, Tensor seed, Tensor bounds, int alpha, int eps, int k, "
      "int num_threads) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("ppr", TORCH_BOX(&pyg_scale::ppr));
}
