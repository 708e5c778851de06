// All edges of the graph among the sampled nodes, instead of the sampled ones.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "expand.h"
#include "graph_view.h"
#include "node_list.h"
#include "parts.h"

namespace pyg_scale {

// The edges of a batch, of one edge type: the edges into row i of the expanded type are
// colptr[i] to colptr[i + 1] - 1.
struct EdgeList {
  Buffer<uint32_t> row;  // of the neighbour
  Buffer<int64_t> edge;
  Buffer<int64_t> colptr;
  Buffer<float> weight;  // empty if edges weigh nothing
  // Where in colptr the rows begin anew, each time from 0; none if they never do.
  std::vector<int64_t> first_rows;

  void begin() {
    weight.clear();
    first_rows.clear();
    row.clear();
    edge.clear();
    colptr.clear();
    colptr.push(0);
  }

  size_t bytes() const { return row.bytes() + edge.bytes() + colptr.bytes() + weight.bytes(); }
};

// Finds the in-edges of every sampled row whose neighbours were sampled as well (for the same
// seed if disjoint; no edge beyond the times of its seed), in order of (row, edge id).
class Induced {
 public:
  void edges(const EdgeView& view, const NodeList& expanded, const NodeList& neighbors,
             const int64_t* seed_time, const int64_t* after, bool strict, EdgeList& out) {
    out.begin();
    out.colptr.reserve(expanded.size() + 1);
    const bool apart = expanded.seed() && neighbors.seed();
    if (apart) mark(neighbors);
    for (int64_t i = 0; i < expanded.size(); ++i) {
      const int64_t v = expanded.node()[i], seed = expanded.seed() ? expanded.seed()[i] : 0;
      const Held here = held(view, v);
      const EdgeView& in = *here.view;
      int64_t begin = in.indptr[here.place];
      int64_t end = in.indptr[here.place + 1];
      check_entries(here.place, begin, end, in.num_edges);
      // Nodes were already chosen by their times, so only times of edges are checked, unless
      // nodes come by ways that have other limits.
      const bool of_edges = in.time && !view.times_of_neighbors;
      if (view.temporal() && seed_time && (of_edges || after || strict)) {
        end = begin + in.until(begin, end, seed_time[seed]);
        if (after) begin += in.until(begin, end, after[seed]);
      }
      if (i + kAhead < expanded.size()) {
        const Held coming = held(view, expanded.node()[i + kAhead]);
        __builtin_prefetch(coming.view->indptr + coming.place);
      }
      const int64_t from = out.row.size();
      for (int64_t position = begin; position < end; position += kBlock) {
        const int64_t stop = std::min(end, position + kBlock);
        if (!apart) {
          probe<false>(in.indices, in, neighbors, seed, position, stop, out);
        } else if (in.indices.wide) {
          probe<true>(Strided<int64_t>(in.indices), in, neighbors, seed, position, stop, out);
        } else {
          probe<true>(Strided<int32_t>(in.indices), in, neighbors, seed, position, stop, out);
        }
      }
      sort_by_edge(out, from);
      out.colptr.push(out.row.size());
    }
  }

  size_t bytes() const { return pairs_.bytes() + marks_.bytes(); }

 private:
  static constexpr int64_t kAhead = 8;
  static constexpr int64_t kBlock = 64;  // table slots that are prefetched together
  static constexpr uint64_t kSpread = 0x9E3779B97F4A7C15ull;

  // Notes the nodes of each seed in a few bits per node, small enough for a cache near by. Most
  // in-edges come from nodes of other seeds, and are then known for that without the table.
  void mark(const NodeList& nodes) {
    const int64_t n = nodes.size();
    num_seeds_ = n ? *std::max_element(nodes.seed(), nodes.seed() + n) + 1 : 0;
    const int64_t each = std::clamp<int64_t>(n / std::max<int64_t>(num_seeds_, 1), 8, 1024);
    const uint64_t bits = std::bit_ceil(static_cast<uint64_t>(each) * 64);
    shift_ = 64 - std::countr_zero(bits);
    words_ = static_cast<int64_t>(bits / 64);
    marks_.reserve(num_seeds_ * words_);
    std::fill_n(marks_.data(), num_seeds_ * words_, uint64_t{0});
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t bit = bit_of(nodes.node()[i]);
      marks_[nodes.seed()[i] * words_ + static_cast<int64_t>(bit >> 6)] |= uint64_t{1}
                                                                           << (bit & 63);
    }
  }

  uint64_t bit_of(int64_t node) const { return (static_cast<uint64_t>(node) * kSpread) >> shift_; }

  // A column whose type is known, so that looking at a node takes no branch.
  template <typename T>
  struct Strided {
    explicit Strided(const IntColumn& column)
        : data(static_cast<const T*>(column.data)), stride(column.stride) {}
    int64_t operator[](int64_t i) const { return data[i * stride]; }
    const T* data;
    int64_t stride;
  };

  template <bool kMarked, typename Nodes>
  void probe(const Nodes& nodes, const EdgeView& view, const NodeList& neighbors, int64_t seed,
             int64_t begin, int64_t end, EdgeList& out) const {
    uint64_t keys[kBlock];
    int64_t positions[kBlock], count = 0;
    if (kMarked && seed >= num_seeds_) return;  // it has no nodes of this type
    const uint64_t* marks = kMarked ? marks_.data() + seed * words_ : nullptr;
    const int shift = shift_;
    for (int64_t p = begin; p < end; ++p) {
      positions[count] = p;
      if constexpr (kMarked) {
        const uint64_t bit = (static_cast<uint64_t>(nodes[p]) * kSpread) >> shift;
        count += static_cast<int64_t>(marks[bit >> 6] >> (bit & 63) & 1);
      } else {
        ++count;
      }
    }
    if (count == 0) return;
    for (int64_t i = 0; i < count; ++i) keys[i] = neighbors.identity(nodes[positions[i]], seed);
    neighbors.table().look([&](const auto& slots) __attribute__((always_inline)) {
      for (int64_t i = 0; i < count; ++i) slots.prefetch(keys[i]);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = slots.find(keys[i]);
        if (row < 0) continue;
        out.row.push(static_cast<uint32_t>(row));
        out.edge.push(view.edge_id.data ? view.edge_id[positions[i]] : positions[i]);
      }
    });
  }

  // Temporal neighbourhoods are in order of time.
  void sort_by_edge(EdgeList& list, int64_t from) {
    const int64_t n = list.edge.size() - from;
    uint32_t* row = list.row.data() + from;
    int64_t* edge = list.edge.data() + from;
    if (std::is_sorted(edge, edge + n)) return;
    pairs_.reserve(n);
    for (int64_t i = 0; i < n; ++i) pairs_[i] = {edge[i], row[i]};
    std::sort(pairs_.data(), pairs_.data() + n,
              [](const Pair& a, const Pair& b) { return a.edge < b.edge; });
    for (int64_t i = 0; i < n; ++i) {
      edge[i] = pairs_[i].edge;
      row[i] = pairs_[i].row;
    }
  }

  struct Pair {
    int64_t edge;
    uint32_t row;
  };
  Buffer<Pair> pairs_;
  Buffer<uint64_t> marks_;  // words_ of each seed
  int64_t num_seeds_ = 0, words_ = 0;
  int shift_ = 0;
};

}  // namespace pyg_scale
