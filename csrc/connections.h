// How strongly each node is joined to each part, kept up to date while nodes move.
#pragma once

#include <algorithm>
#include <cstdint>

#include "adjacency.h"
#include "buffer.h"

namespace pyg_scale {

// A node with at least as many edges as there are parts has a number for every part. Any other node
// has a list of the parts that it is joined to, in no order.
class Connections {
 public:
  template <typename T>
  Connections(const Adjacency<T>& graph, const int32_t* assignment, int64_t parts) : parts_(parts) {
    const int64_t size = graph.num_nodes;
    begin_.reserve(size + 1);
    begin_.set_size(size + 1);
    begin_[0] = 0;
    for (int64_t v = 0; v < size; ++v) {
      begin_[v + 1] = begin_[v] + std::min(graph.degree(v), parts);
    }
    weight_.reserve(begin_[size]);
    part_.reserve(begin_[size]);
    std::fill_n(weight_.data(), begin_[size], 0);
    std::fill_n(part_.data(), begin_[size], -1);
    for (int64_t v = 0; v < size; ++v) {
      graph.for_each(v, [&](int64_t u, int64_t w) { add(v, assignment[u], w); });
    }
  }

  int64_t get(int64_t v, int64_t part) const {
    if (dense(v)) return weight_[begin_[v] + part];
    for (int64_t i = begin_[v]; i < begin_[v + 1]; ++i) {
      if (part_[i] == part) return weight_[i];
    }
    return 0;
  }

  // A neighbour of v goes from one part to another.
  void move(int64_t v, int64_t from, int64_t to, int64_t w) {
    add(v, from, -w);
    add(v, to, w);
  }

  // Calls f(part, weight) for every part that v is joined to.
  template <typename F>
  void for_each(int64_t v, const F& f) const {
    const int64_t first = begin_[v], last = begin_[v + 1];
    const bool all = dense(v);
    for (int64_t i = first; i < last; ++i) {
      if (weight_[i] > 0) f(all ? i - first : int64_t{part_[i]}, weight_[i]);
    }
  }

 private:
  bool dense(int64_t v) const { return begin_[v + 1] - begin_[v] == parts_; }

  void add(int64_t v, int64_t part, int64_t w) {
    if (dense(v)) {
      weight_[begin_[v] + part] += w;
      return;
    }
    int64_t free = -1;
    for (int64_t i = begin_[v]; i < begin_[v + 1]; ++i) {
      if (part_[i] == part) {
        if ((weight_[i] += w) == 0) part_[i] = -1;
        return;
      }
      if (part_[i] < 0 && free < 0) free = i;
    }
    if (w == 0) return;
    if (free < 0) fail("the graph is not symmetric: give each edge in both directions");
    part_[free] = static_cast<int32_t>(part);
    weight_[free] = w;
  }

  int64_t parts_;
  Buffer<int64_t> begin_, weight_;
  Buffer<int32_t> part_;
};

}  // namespace pyg_scale
