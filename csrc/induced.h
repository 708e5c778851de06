// All edges of the graph among the sampled nodes, instead of the sampled ones.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

#include "buffer.h"
#include "eights.h"
#include "expand.h"
#include "graph_view.h"
#include "instructions.h"
#include "node_list.h"
#include "parts.h"
#include "prefetch.h"

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
    num_candidates_ = num_groups_ = first_edge_ = 0;
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
        prefetch_ends(coming.view->indptr, coming.place);
      }
      if (i + kSoon < expanded.size()) {
        const Held coming = held(view, expanded.node()[i + kSoon]);
        const int64_t* pointer = coming.view->indptr + coming.place;
        const IntColumn& indices = coming.view->indices;
        prefetch_entries(indices.data, indices.stride * (indices.wide ? 8 : 4), pointer[0],
                         pointer[1]);
      }
      for (int64_t position = begin; position < end; position += kBlock) {
        const int64_t stop = std::min(end, position + kBlock);
        in.indices.wide ? probe<int64_t>(in.indices, apart, neighbors, seed, position, stop)
                        : probe<int32_t>(in.indices, apart, neighbors, seed, position, stop);
        if (num_candidates_ >= kMany) end_group(&in, false, neighbors, out);
      }
      end_group(&in, true, neighbors, out);
    }
    find(neighbors, out);
  }

  size_t bytes() const { return pairs_.bytes() + marks_.bytes(); }

 private:
  static constexpr int64_t kAhead = 16;                    // nodes whose pointers are asked for
  static constexpr int64_t kSoon = 8;                      // nodes whose edges are
  static constexpr int64_t kBlock = 64;                    // edges that are probed together
  static constexpr int64_t kMany = 256, kManyGroups = 64;  // candidates and groups of a look-up
  static constexpr uint32_t kSpread = 0x9E3779B1;          // 2^32 / golden ratio, odd

  // Notes the nodes of each seed in a few bits per node, small enough for a cache near by. Most
  // in-edges come from nodes of other seeds, and are then known for that without the table.
  void mark(const NodeList& nodes) {
    const int64_t n = nodes.size();
    num_seeds_ = n ? *std::max_element(nodes.seed(), nodes.seed() + n) + 1 : 0;
    const int64_t each = std::clamp<int64_t>(n / std::max<int64_t>(num_seeds_, 1), 8, 1024);
    const uint32_t bits = std::bit_ceil(static_cast<uint32_t>(each) * 64);
    shift_ = 32 - std::countr_zero(bits);
    words_ = bits / 32;
    marks_.reserve(num_seeds_ * words_);
    std::fill_n(marks_.data(), num_seeds_ * words_, uint32_t{0});
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bit = bit_of(nodes.node()[i], shift_);
      marks_[nodes.seed()[i] * words_ + (bit >> 5)] |= uint32_t{1} << (bit & 31);
    }
  }

  static uint32_t bit_of(int64_t node, int shift) {
    return (static_cast<uint32_t>(node) * kSpread) >> shift;
  }

#if defined(__x86_64__) && defined(__GNUC__)
  // The numbers of the neighbours that have a mark.
  template <int kStride>
  struct MarkedOfEight {
    const int32_t* neighbor;
    const uint32_t* marks;
    int shift;

    [[gnu::target("avx2"), gnu::always_inline]] inline uint32_t take(int64_t from, uint32_t these,
                                                                     int32_t* out) const {
      const __m256i spread = _mm256_set1_epi32(static_cast<int32_t>(kSpread));
      const __m256i bit = _mm256_srl_epi32(
          _mm256_mullo_epi32(load_eight<kStride>(neighbor + from * kStride), spread),
          _mm_cvtsi32_si128(shift));
      const __m256i number = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int32_t>(from)),
                                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
      const uint32_t has = bits_of_eight(marks, bit) & these;
      store_those(out, number, has);
      return has;
    }
  };
#endif

  // The numbers of those of `n` neighbours that have a mark, at most kBlock. Returns how many.
  template <typename T>
  int64_t marked(const T* neighbor, int64_t stride, int64_t n, const uint32_t* marks,
                 int32_t* out) const {
#if defined(__x86_64__) && defined(__GNUC__)
    if constexpr (std::is_same_v<T, int32_t>) {
      uint64_t taken[kBlock / 64 + 2];
      if (n >= 8 && has_avx2()) {
        if (stride == 1)
          return take_eights(n, MarkedOfEight<1>{neighbor, marks, shift_}, out, taken);
        if (stride == 2)
          return take_eights(n, MarkedOfEight<2>{neighbor, marks, shift_}, out, taken);
      }
    }
#endif
    const int shift = shift_;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bit = bit_of(static_cast<int64_t>(neighbor[i * stride]), shift);
      out[count] = static_cast<int32_t>(i);
      count += marks[bit >> 5] >> (bit & 31) & 1;
    }
    return count;
  }

  // Notes the edges at [begin, end) whose neighbours may be in the table, and asks for their slots.
  template <typename T>
  void probe(const IntColumn& nodes, bool apart, const NodeList& neighbors, int64_t seed,
             int64_t begin, int64_t end) {
    if (apart && seed >= num_seeds_) return;  // it has no nodes of this type
    const T* neighbor = static_cast<const T*>(nodes.data) + begin * nodes.stride;
    int32_t number[kBlock + 8];
    int64_t count = end - begin;
    if (apart) {
      count = marked(neighbor, nodes.stride, count, marks_.data() + seed * words_, number);
    } else {
      std::iota(number, number + count, 0);
    }
    if (count == 0) return;
    uint64_t* const keys = key_ + num_candidates_;
    int64_t* const positions = position_ + num_candidates_;
    for (int64_t i = 0; i < count; ++i) {
      positions[i] = begin + number[i];
      keys[i] = neighbors.identity(static_cast<int64_t>(neighbor[number[i] * nodes.stride]), seed);
    }
    neighbors.table().look([&](const auto& slots) __attribute__((always_inline)) {
      for (int64_t i = 0; i < count; ++i) slots.prefetch(keys[i]);
    });
    num_candidates_ += count;
  }

  // The candidates since the last group are of one node, `last` if they are all that it has left.
  void end_group(const EdgeView* view, bool last, const NodeList& neighbors, EdgeList& out) {
    group_[num_groups_++] = {view, num_candidates_, last};
    if (num_candidates_ >= kMany || num_groups_ == kManyGroups) find(neighbors, out);
  }

  // Looks all candidates up. Those of many nodes wait for that, so that their slots are there.
  void find(const NodeList& neighbors, EdgeList& out) {
    neighbors.table().look([&](const auto& slots) __attribute__((always_inline)) {
      for (int64_t g = 0, i = 0; g < num_groups_; ++g) {
        const Group& group = group_[g];
        for (; i < group.end; ++i) {
          const int64_t row = slots.find(key_[i]);
          if (row < 0) continue;
          const IntColumn& id = group.view->edge_id;
          out.row.push(static_cast<uint32_t>(row));
          out.edge.push(id.data ? id[position_[i]] : position_[i]);
        }
        if (!group.last) continue;
        sort_by_edge(out, first_edge_);
        out.colptr.push(out.row.size());
        first_edge_ = out.row.size();
      }
    });
    num_candidates_ = num_groups_ = 0;
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

  // Candidates of a node: edges of which the neighbour may be in the table.
  struct Group {
    const EdgeView* view;
    int64_t end;  // of its candidates
    bool last;    // of its node
  };
  Group group_[kManyGroups];
  uint64_t key_[kMany + kBlock];
  int64_t position_[kMany + kBlock];
  int64_t num_groups_ = 0, num_candidates_ = 0;
  int64_t first_edge_ = 0;  // of the node whose edges are being found

  Buffer<Pair> pairs_;
  Buffer<uint32_t> marks_;  // words_ of each seed
  int64_t num_seeds_ = 0, words_ = 0;
  int shift_ = 0;
};

}  // namespace pyg_scale
