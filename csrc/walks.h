// What walks along edges have in common: the graph, and positions drawn among a node's edges.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "graph_view.h"
#include "keys.h"
#include "parallel.h"
#include "prefetch.h"

namespace pyg_scale {

constexpr int64_t kTogether = 32;  // walks that take a step at a time: covers memory's latency
constexpr int64_t kTaskSteps = 1 << 14;  // fewer are not worth a thread

[[noreturn, gnu::noinline, gnu::cold]] inline void fail_outside(const char* what, int64_t node,
                                                                int64_t num_nodes) {
  fail(std::string(what) + ": node " + std::to_string(node) + " is out of range, there are " +
       std::to_string(num_nodes));
}

[[noreturn, gnu::noinline, gnu::cold]] inline void fail_not_rising(int64_t node) {
  fail("weight_prefix must rise from 0 within a node, but does not at node " +
       std::to_string(node));
}

// The edges of a node: positions [low, high), and the sum of their weights (their number, if none
// has a weight).
struct NodeEdges {
  int64_t low = 0, high = 0, total = 0;
};

struct WalkGraph {
  WalkGraph(const Tensor& indptr, const Tensor& indices, const std::optional<Tensor>& weight_prefix)
      : num_nodes(num_pointed(indptr)),
        num_entries(indices.numel()),
        begin(int64_data(indptr, num_nodes + 1, "indptr")),
        neighbor(int_column(indices, "indices")),
        bytes(neighbor.stride * (neighbor.wide ? 8 : 4)) {
    if (weight_prefix) prefix = int64_data(*weight_prefix, num_entries, "weight_prefix");
    check(begin[0] == 0 && begin[num_nodes] == num_entries,
          "indptr must go from 0 to the number of entries of indices");
  }

  bool valid(int64_t v) const {
    return static_cast<uint64_t>(v) < static_cast<uint64_t>(num_nodes);
  }

  // The node at the end of an edge.
  int64_t end_of(int64_t position) const {
    const int64_t v = neighbor[position];
    if (!valid(v)) [[unlikely]]
      fail_outside("indices", v, num_nodes);
    return v;
  }

  NodeEdges edges_of(int64_t v) const {
    NodeEdges out{begin[v], begin[v + 1], 0};
    check_entries(v, out.low, out.high, num_entries);
    out.total = out.high - out.low;
    if (prefix && out.total > 0) {
      out.total = prefix[out.high - 1];
      if (out.total < 0) [[unlikely]]
        fail_not_rising(v);
    }
    return out;
  }

  // The weight of an edge of node v, as an integer.
  int64_t weight(int64_t v, const NodeEdges& edges, int64_t position) const {
    if (!prefix) return 1;
    const int64_t before = position > edges.low ? prefix[position - 1] : 0;
    if (before < 0 || prefix[position] < before) [[unlikely]]
      fail_not_rising(v);
    return prefix[position] - before;
  }

  // The first position of node v whose running sum exceeds `sum`.
  int64_t locate(int64_t v, const NodeEdges& edges, int64_t sum) const {
    if (!prefix) return edges.low + sum;
    const int64_t at = std::upper_bound(prefix + edges.low, prefix + edges.high, sum) - prefix;
    if (at == edges.high) [[unlikely]]
      fail_not_rising(v);
    return at;
  }

  PYG_SCALE_PREFETCH void prefetch_edge(int64_t position) const {
    prefetch_entry(static_cast<const char*>(neighbor.data), position * bytes);
  }

  int64_t num_nodes, num_entries;
  const int64_t* begin;
  IntColumn neighbor;
  const int64_t* prefix = nullptr;
  int64_t bytes;  // from a neighbour to the next one
};

// The walks of a call: where they begin, what they are numbered, and where they are written.
struct Walks {
  Walks(const Tensor& start, const std::optional<Tensor>& walk, int64_t length, int64_t key)
      : count(start.numel()),
        length(length),
        key(static_cast<uint64_t>(key)),
        first(int64_data(start, count, "start")),
        number(walk ? int64_data(*walk, count, "walk") : nullptr) {
    check_count(length, "length");
  }

  // Walks from `first`, of which walk `i` has number `i`.
  Walks(const int64_t* first, int64_t count, int64_t length, uint64_t key)
      : count(count), length(length), key(key), first(first), number(nullptr) {}

  void check_start(const WalkGraph& graph) const {
    for (int64_t i = 0; i < count; ++i) {
      if (!graph.valid(first[i])) [[unlikely]]
        fail_outside("start", first[i], graph.num_nodes);
    }
  }

  // The key of the draws of a walk; `fold` takes the step and the node.
  uint64_t key_of(int64_t i) const {
    return fold(key, static_cast<uint64_t>(number ? number[i] : i));
  }

  void write(int64_t i, int64_t step, int64_t node, int64_t position) const {
    nodes[i * (length + 1) + step + 1] = node;
    if (positions) positions[i * length + step] = position;
  }

  // Calls f(from, to) for groups of walks, on several threads if that is worth it.
  template <typename F>
  void for_each_group(int64_t num_threads, const F& f) const {
    const int64_t together = (count + kTogether - 1) / kTogether;
    const int64_t steps = std::max<int64_t>(1, length) * kTogether;
    const int64_t grain = std::max<int64_t>(1, kTaskSteps / steps);  // groups of a task
    const int64_t tasks = num_threads > 1 ? (together + grain - 1) / grain : 1;
    const auto run = [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        f(group * kTogether, std::min((group + 1) * kTogether, count));
      }
    };
    if (tasks < 2) {
      run(0, together);
    } else {
      for_each_task(
          tasks, [&](int64_t task) { run(task * grain, std::min((task + 1) * grain, together)); });
    }
  }

  int64_t count, length;
  uint64_t key;
  const int64_t *first, *number;  // `number`: none if each walk has that of its position
  int64_t* nodes = nullptr;       // [count, length + 1]
  int64_t* positions = nullptr;   // [count, length], or none
};

// One step of the walks `from` to `to - 1`, each along any of its node's edges.
inline void first_order_step(const WalkGraph& graph, const Walks& walks, const uint64_t* stream,
                             int64_t* node, int64_t from, int64_t to, int64_t step) {
  NodeEdges edges[kTogether];
  int64_t place[kTogether], sum[kTogether];
  const int64_t n = to - from;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t v = node[i], low = graph.begin[v], high = graph.begin[v + 1];
    check_entries(v, low, high, graph.num_entries);
    edges[i] = {low, high, high - low};
    if (graph.prefix) {
      if (high > low) __builtin_prefetch(graph.prefix + high - 1);
      continue;
    }
    place[i] = -1;
    if (high > low) {
      const uint64_t key =
          fold(fold(stream[i], static_cast<uint64_t>(step)), static_cast<uint64_t>(v));
      place[i] = low + static_cast<int64_t>(bounded(key, 0, static_cast<uint64_t>(high - low)));
      graph.prefetch_edge(place[i]);
    }
  }
  if (graph.prefix) {
    int64_t left[kTogether];  // positions among which each one's is, from place[i] on
    bool searching = false;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t v = node[i];
      edges[i] = graph.edges_of(v);
      place[i] = -1;
      left[i] = 0;
      if (edges[i].total == 0) continue;
      const uint64_t key =
          fold(fold(stream[i], static_cast<uint64_t>(step)), static_cast<uint64_t>(v));
      sum[i] = static_cast<int64_t>(bounded(key, 0, static_cast<uint64_t>(edges[i].total)));
      place[i] = edges[i].low;
      left[i] = edges[i].high - edges[i].low;
      searching |= left[i] > 1;
      __builtin_prefetch(graph.prefix + place[i] + left[i] / 2 - (left[i] > 1));
    }
    while (searching) {  // all at once, one comparison each
      searching = false;
      for (int64_t i = 0; i < n; ++i) {
        if (left[i] < 2) continue;
        const int64_t half = left[i] / 2;
        place[i] += graph.prefix[place[i] + half - 1] <= sum[i] ? half : 0;
        left[i] -= half;
        searching |= left[i] > 1;
        __builtin_prefetch(graph.prefix + place[i] + left[i] / 2 - (left[i] > 1));
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      if (place[i] < 0) continue;
      if (graph.prefix[place[i]] <= sum[i]) [[unlikely]]
        fail_not_rising(node[i]);
      graph.prefetch_edge(place[i]);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    if (place[i] >= 0) node[i] = graph.end_of(place[i]);
    walks.write(from + i, step, node[i], place[i]);
    prefetch_ends(graph.begin, node[i]);
  }
}

// All steps of all walks, each along any of its node's edges.
inline void walk_first_order(const WalkGraph& graph, const Walks& walks, int64_t num_threads) {
  walks.for_each_group(num_threads, [&](int64_t from, int64_t to) {
    int64_t node[kTogether];
    uint64_t stream[kTogether];
    for (int64_t i = to; i < std::min(to + kTogether, walks.count); ++i) {
      prefetch_ends(graph.begin, walks.first[i]);  // of the walks that come next
    }
    for (int64_t i = from; i < to; ++i) {
      node[i - from] = walks.nodes[i * (walks.length + 1)] = walks.first[i];
      stream[i - from] = walks.key_of(i);
    }
    for (int64_t step = 0; step < walks.length; ++step) {
      first_order_step(graph, walks, stream, node, from, to, step);
    }
  });
}

}  // namespace pyg_scale
