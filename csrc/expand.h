// One hop over one edge type: draw in-edges of frontier rows, then read the neighbours.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "buffer.h"
#include "graph_view.h"
#include "keys.h"
#include "parts.h"
#include "pick.h"
#include "prefetch.h"
#include "source_draws.h"

namespace pyg_scale {

struct HopOptions {
  uint64_t key;  // of the hop and the edge type
  int64_t num_neighbors;
  bool replace, last;
  bool by_node = false;    // a node's draws are the same for all seeds, if disjoint
  bool by_source = false;  // random numbers belong to the sources, see source_draws.h
  SourceNumbers numbers{};
  Weighting weighting = Weighting::kNone;
};

// Rows of a node type, of which some are expanded.
struct Rows {
  const int64_t* node;
  const int64_t* seed;       // position of the seed to which each belongs; null if not disjoint
  const int64_t* seed_time;  // of each seed position; null without times
  const int64_t* place = nullptr;   // where the in-edges of each row are; null: at its node
  const int64_t* latest = nullptr;  // the time of each row's seed, instead of seed_time
  // The time that edges must be after: of each row if `latest` is, else of each seed position.
  const int64_t* after = nullptr;

  int64_t at(int64_t row) const { return place ? place[row] : node[row]; }
};

// The sampled in-edges of consecutive rows. Memory that a thread uses again and again.
class alignas(64) Expansion {  // not two threads on one cache line
 public:
  // Rows per block, so that what is prefetched for a block is still in cache when it is read.
  static constexpr int64_t kBlockEdges = 512;

  static int64_t block_rows(int64_t num_neighbors) {
    if (num_neighbors < 0) return 16;
    return std::clamp<int64_t>(kBlockEdges / std::max<int64_t>(num_neighbors, 1), 16, 256);
  }

  void clear() {
    clear_numbered();
    edge_.clear();
    weight_.clear();
  }

  // The edges but for their ids and weights, once their neighbours have numbers.
  void clear_numbered() {
    position_.clear();
    neighbor_.clear();
    count_.clear();
    seed_.clear();
  }

  // Until it is called again, ids and weights are appended to these buffers, so that nobody has to
  // copy them there.
  void swap(Buffer<int64_t>& edge, Buffer<float>& weight) {
    edge_.swap(edge);
    weight_.swap(weight);
  }

  int64_t num_edges() const { return neighbor_.size(); }
  const int64_t* neighbor() const { return neighbor_.data(); }
  const int64_t* edge() const { return edge_.data(); }
  const Buffer<int64_t>& count() const { return count_; }  // edges of each row
  const int64_t* seed() const { return seed_.data(); }     // of each row, if disjoint
  const Buffer<float>& weight() const { return weight_; }  // of each edge, if there are any

  // Samples in-edges of the rows [begin, end) and appends them. Rows up to `stop` come next.
  void expand(const EdgeView& view, const HopOptions& hop, const Rows& rows, int64_t begin,
              int64_t end, int64_t stop) {
    const int64_t from = neighbor_.size();
    position_.clear();
    share_.clear();
    if (!take_rows(view, hop, rows, begin, end, stop)) {
      if (view.parts) {
        hop.by_source ? expand_rows<true, true>(view, hop, rows, begin, end, stop)
                      : expand_rows<true, false>(view, hop, rows, begin, end, stop);
        read_parts(view, end - begin);
      } else {
        hop.by_source ? expand_rows<false, true>(view, hop, rows, begin, end, stop)
                      : expand_rows<false, false>(view, hop, rows, begin, end, stop);
        read(view);
      }
    }
    if (hop.weighting != Weighting::kNone) weigh(view, hop.weighting, rows, begin, end, from);
  }

  size_t bytes() const {
    return position_.bytes() + neighbor_.bytes() + edge_.bytes() + count_.bytes() + seed_.bytes() +
           taken_.bytes() + taken_id_.bytes() + held_.bytes() + row_.bytes() + picker_.bytes() +
           share_.bytes() + weight_.bytes() + source_picker_.bytes();
  }

 private:
  static constexpr int64_t kAhead = 16;  // rows; covers the latency of memory
  static constexpr int64_t kSoon = 8;    // rows whose pointers have come
  static constexpr int64_t kFirst = 12;  // rows whose page is looked up, for all their lines

  template <bool kParts, bool kBySource>
  void expand_rows(const EdgeView& view, const HopOptions& hop, const Rows& rows, int64_t begin,
                   int64_t end, int64_t stop) {
    if constexpr (kParts) {
      held_.clear();
      for (int64_t row = begin; row < end; ++row) view.places->prefetch(rows.node[row]);
      for (int64_t row = begin; row < end; ++row) {
        const Held here = held(view, rows.node[row]);
        prefetch_ends(here.view->indptr, here.place);
        held_.push(here);
      }
    }
    for (int64_t row = begin; row < end; ++row) {
      const EdgeView* in = &view;
      int64_t v;
      if constexpr (kParts) {
        in = held_[row - begin].view;
        v = held_[row - begin].place;
      } else {
        if (row + kAhead < stop) prefetch_ends(view.indptr, rows.at(row + kAhead));
        if (kBySource && row + kSoon < stop) prefetch_begin(view, rows.at(row + kSoon));
        v = rows.at(row);
      }
      const int64_t first = in->indptr[v];
      Candidates c{first, in->indptr[v + 1]};
      check_entries(v, c.begin, c.end, in->num_edges);
      uint64_t key = fold(hop.key, static_cast<uint64_t>(rows.node[row]));
      if (rows.seed) {
        if (!hop.by_node) key = fold(key, static_cast<uint64_t>(rows.seed[row]));
        seed_.push(rows.seed[row]);
        if (view.temporal()) {
          const int64_t when = rows.latest ? rows.latest[row] : rows.seed_time[rows.seed[row]];
          c.end = first + in->until(first, c.end, when);
          if (rows.after) {
            const int64_t since = rows.latest ? rows.after[row] : rows.after[rows.seed[row]];
            c.begin = first + in->until(first, c.end, since);
          }
          if (hop.last && hop.num_neighbors >= 0) {
            c.begin = std::max(c.begin, c.end - hop.num_neighbors);
          }
        }
      }
      const int64_t size = position_.size();
      const int64_t n = kBySource ? pick_by_source(view, *in, hop, c, first)
                                  : pick(view, *in, hop, c, first, key);
      position_.set_size(size + n);
      count_.push(n);
    }
  }

  // Inlined: where GCC 12 passes two numbers in registers, it stores them one by one and loads them
  // as one, for which the processor waits.
  PYG_SCALE_INLINE int64_t pick(const EdgeView& view, const EdgeView& in, const HopOptions& hop,
                                Candidates c, int64_t first, uint64_t key) {
    const int64_t size = position_.size();
    position_.reserve(size + Picker::most(c.size(), hop.num_neighbors, hop.replace));
    int64_t* out = position_.data() + size;
    const int64_t n =
        view.weight_prefix
            ? picker_.weighted(key, c, first, in.weight_prefix, hop.num_neighbors, hop.replace, out)
            : picker_.uniform(key, c, hop.num_neighbors, hop.replace, out);
    prefetch(in, out, n);
    return n;
  }

  int64_t pick_by_source(const EdgeView& view, const EdgeView& in, const HopOptions& hop,
                         Candidates c, int64_t first) {
    const int64_t size = position_.size(), k = hop.num_neighbors;
    position_.reserve(size + c.size());
    int64_t* out = position_.data() + size;
    if (!view.weight_prefix) {
      double share;
      const int64_t n = source_picker_.uniform(hop.numbers, in.indices, c, k, out, &share);
      share_.push(share);
      return n;
    }
    share_.reserve(size + c.size());
    const int64_t n = source_picker_.weighted(hop.numbers, in.indices, c, first, in.weight_prefix,
                                              k, out, share_.data() + size);
    share_.set_size(size + n);
    return n;
  }

  // Takes in-edges by the numbers of their sources, and reads them at once. Returns false, and does
  // nothing, where that is not possible.
  bool take_rows(const EdgeView& view, const HopOptions& hop, const Rows& rows, int64_t begin,
                 int64_t end, int64_t stop) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (!hop.by_source || view.parts || view.weight_prefix || rows.seed || !has_avx2()) {
      return false;
    }
    const NarrowEdges edges = NarrowEdges::of(view);
    if (!edges.source) return false;
    taken_.clear();
    taken_id_.clear();
    const int64_t from = edge_.size();
    if (has_avx512()) {
      edges.pairs ? take_sixteens<true>(view, edges, hop, rows, begin, end, stop)
                  : take_sixteens<false>(view, edges, hop, rows, begin, end, stop);
    } else {
      edges.pairs ? take_eights<true>(view, edges, hop, rows, begin, end, stop)
                  : take_eights<false>(view, edges, hop, rows, begin, end, stop);
    }
    if (!edges.pairs && edges.id) ids_of(edges.id, edge_.data() + from, edge_.size() - from);
    return true;
#else
    return false;
#endif
  }

#if defined(__x86_64__) && defined(__GNUC__)
  template <bool kPairs>
  [[gnu::target("avx512f,popcnt")]] void take_sixteens(const EdgeView& view, NarrowEdges edges,
                                                       const HopOptions& hop, const Rows& rows,
                                                       int64_t begin, int64_t end, int64_t stop) {
    const SourceNumbers numbers = hop.numbers;  // what is written might else change it
    for (int64_t row = begin; row < end; ++row) {
      const Candidates c = next_row(view, edges, rows, row, stop);
      const Room<kPairs> room = room_for<kPairs>(c);
      double share;
      const int64_t n = SourcePicker::take_by_sixteens<kPairs>(numbers, edges, c, hop.num_neighbors,
                                                               room.source, room.id, &share);
      took<kPairs>(n, share);
    }
    check_taken(view);
    widen(taken_, neighbor_);
    if constexpr (kPairs) widen(taken_id_, edge_);
  }

  template <bool kPairs>
  [[gnu::target("avx2,bmi,popcnt")]] void take_eights(const EdgeView& view, NarrowEdges edges,
                                                      const HopOptions& hop, const Rows& rows,
                                                      int64_t begin, int64_t end, int64_t stop) {
    const SourceNumbers numbers = hop.numbers;  // what is written might else change it
    find_rows<kPairs>(view, rows, begin, end, stop);
    EdgesAhead<kPairs> ahead(edges, row_.data());
    for (int64_t row = begin; row < end; ++row) {
      const Candidates c = row_[row - begin];
      const Room<kPairs> room = room_for<kPairs>(c);
      double share;
      const int64_t n = SourcePicker::take_by_eights<kPairs>(numbers, edges, c, hop.num_neighbors,
                                                             room.source, room.id, &share, ahead);
      took<kPairs>(n, share);
    }
    check_taken(view);
    widen(taken_, neighbor_);
    if constexpr (kPairs) widen(taken_id_, edge_);
  }

  // The in-edges of rows [begin, end); and, not checked, those of rows after them, up to `stop`,
  // that are asked for meanwhile.
  template <bool kPairs>
  void find_rows(const EdgeView& view, const Rows& rows, int64_t begin, int64_t end, int64_t stop) {
    constexpr int64_t kFar = 32;  // rows; covers the latency of memory
    const int64_t n = std::min(end + EdgesAhead<kPairs>::kSteps, stop) - begin;
    row_.reserve(n + 1);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = begin + i;
      if (row + kFar < stop) prefetch_ends(view.indptr, rows.at(row + kFar));
      const int64_t v = rows.at(row);
      row_[i] = {view.indptr[v], view.indptr[v + 1]};
      if (row < end) check_entries(v, row_[i].begin, row_[i].end, view.num_edges);
    }
    row_[n] = EdgesAhead<kPairs>::after_all(n ? row_[n - 1] : Candidates{0, 0});
  }

  // Where the edges of a row are written. Positions may need 64 bits, ids of pairs have 32.
  template <bool kPairs>
  struct Room {
    int32_t* source;
    NarrowEdges::Id<kPairs>* id;
  };

  // Room for all candidates of a row.
  template <bool kPairs>
  PYG_SCALE_INLINE Room<kPairs> room_for(Candidates c) {
    auto& ids = ids_taken<kPairs>();
    const int64_t more = c.size() + SourcePicker::kRoom;
    taken_.reserve(taken_.size() + more);
    ids.reserve(ids.size() + more);
    return {taken_.data() + taken_.size(), ids.data() + ids.size()};
  }

  template <bool kPairs>
  PYG_SCALE_INLINE void took(int64_t n, double share) {
    auto& ids = ids_taken<kPairs>();
    taken_.set_size(taken_.size() + n);
    ids.set_size(ids.size() + n);
    count_.push(n);
    share_.push(share);
  }

  template <bool kPairs>
  PYG_SCALE_INLINE auto& ids_taken() {
    if constexpr (kPairs) {
      return taken_id_;
    } else {
      return edge_;
    }
  }

  // The neighbours of the block at hand, as numbers of 32 bits: many at a time, unlike wide ones.
  PYG_SCALE_INLINE void check_taken(const EdgeView& view) const {
    uint32_t largest = 0;
    for (int64_t i = 0; i < taken_.size(); ++i) {
      largest = std::max(largest, static_cast<uint32_t>(taken_[i]));
    }
    constexpr int64_t kNegative = int64_t{1} << 31;
    if (taken_.size() && largest >= std::min(view.num_neighbors, kNegative)) [[unlikely]]
      fail_neighbor(view, static_cast<int32_t>(largest));
  }

  // Appends the numbers of the block at hand.
  PYG_SCALE_INLINE static void widen(const Buffer<int32_t>& from, Buffer<int64_t>& to) {
    const int64_t n = from.size(), size = to.size();
    to.reserve(size + n);
    std::copy_n(from.data(), n, to.data() + size);
    to.set_size(size + n);
  }

  // The ids at some positions, in their place.
  static void ids_of(const int32_t* id, int64_t* position, int64_t n) {
    constexpr int64_t kFar = 32;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kFar < n) __builtin_prefetch(id + position[i + kFar]);
      position[i] = id[position[i]];
    }
  }

  // The in-edges of a row.
  PYG_SCALE_PREFETCH Candidates next_row(const EdgeView& view, const NarrowEdges& edges,
                                         const Rows& rows, int64_t row, int64_t stop) {
    if (row % kPagesAtOnce == 0) {
      const int64_t first = row + kFirst, next = first + kPagesAtOnce;
      for (int64_t i = first; i < std::min(next, stop); ++i) {
        edges.prefetch(view.indptr[rows.at(i)]);
      }
      for (int64_t i = next; i < std::min(next + kPagesAtOnce, stop); ++i) {
        prefetch_ends(view.indptr, rows.at(i));
      }
    }
    if (row + kSoon < stop) prefetch_begin(view, rows.at(row + kSoon));
    const int64_t v = rows.at(row);
    const Candidates c{view.indptr[v], view.indptr[v + 1]};
    check_entries(v, c.begin, c.end, view.num_edges);
    return c;
  }
#endif

  // What the edges of the block weigh. They are those from number `from` on.
  void weigh(const EdgeView& view, Weighting weighting, const Rows& rows, int64_t begin,
             int64_t end, int64_t from) {
    const int64_t n = neighbor_.size() - from;
    // Rows are short, and differ in length: some numbers too many cost less than counting them.
    constexpr int64_t kAtOnce = 8;
    const int64_t size = weight_.size();
    weight_.reserve(size + n + kAtOnce);
    float* weight = weight_.data() + size;
    const int64_t* neighbor = neighbor_.data() + from;
    const int64_t* count = count_.data() + count_.size() - (end - begin);
    const bool by_row = !view.weight_prefix;  // all edges of a row have its share
    int64_t i = 0;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t stop = i + count[row - begin];
      const int64_t degree = weighting == Weighting::kSum ? 1 : degree_of(view, rows, row, begin);
      const bool is_mean = weighting == Weighting::kMean;
      double value = by_row ? weight_of(share_[row - begin], is_mean, degree) : 0;
      if (by_row && weighting != Weighting::kGcn) {
        for (; i < stop; i += kAtOnce) {
          std::fill_n(weight + i, kAtOnce, static_cast<float>(value));
        }
        i = stop;
      }
      for (; i < stop; ++i) {
        if (!by_row) value = weight_of(share_[i], is_mean, degree);
        if (weighting != Weighting::kGcn) {
          weight[i] = static_cast<float>(value);
          continue;
        }
        const Held there = held(view, neighbor[i]);
        const int64_t *pointer = there.view->indptr + there.place, theirs = pointer[1] - pointer[0];
        const double root = std::sqrt(static_cast<double>(degree) * static_cast<double>(theirs));
        weight[i] = theirs > 0 ? static_cast<float>(value / root) : 0;
      }
    }
    weight_.set_size(size + n);
  }

  static double weight_of(double share, bool is_mean, int64_t degree) {
    return is_mean ? kCertain / share / static_cast<double>(degree) : kCertain / share;
  }

  int64_t degree_of(const EdgeView& view, const Rows& rows, int64_t row, int64_t begin) const {
    const Held here = view.parts ? held_[row - begin] : Held{&view, rows.at(row)};
    return here.view->indptr[here.place + 1] - here.view->indptr[here.place];
  }

  // The beginning of a node's in-edges. They begin anywhere in a line, so that lines are counted
  // from where theirs begins. Who reads a line's worth at a time reaches beyond the last one.
  PYG_SCALE_PREFETCH static void prefetch_begin(const EdgeView& view, int64_t node) {
    constexpr uintptr_t kLine = 64, kMost = NarrowEdges::kStart;
    const int64_t width = view.indices.stride * (view.indices.wide ? 8 : 4);
    const auto data = reinterpret_cast<uintptr_t>(view.indices.data);
    const uintptr_t first = data + static_cast<uintptr_t>(view.indptr[node] * width);
    const uintptr_t end = data + static_cast<uintptr_t>(view.indptr[node + 1] * width);
    if (end <= first) return;
    const uintptr_t bytes = end - first, reach = bytes <= kLine ? kLine : 2 * kLine;
    const uintptr_t stop = first + std::clamp(bytes, reach, kMost);
    for (uintptr_t at = first / kLine * kLine; at < stop; at += kLine) {
      __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
    }
  }

  PYG_SCALE_PREFETCH static void prefetch(const EdgeView& view, const int64_t* position,
                                          int64_t n) {
    const int64_t stride = view.indices.stride * (view.indices.wide ? 8 : 4);
    const char* data = static_cast<const char*>(view.indices.data);
    // With more than this from one node, memory is read in order.
    for (int64_t i = 0; i < std::min<int64_t>(n, 64); ++i) {
      __builtin_prefetch(data + position[i] * stride, 0, 2);
    }
  }

  // The neighbours and edge ids of the positions.
  void read(const EdgeView& view) {
    const int64_t n = position_.size(), from = neighbor_.size(), size = edge_.size();
    neighbor_.reserve(from + n);
    edge_.reserve(size + n);
    int64_t *neighbor = neighbor_.data() + from, *edge = edge_.data() + size;
    const IntColumn& id = view.edge_id;
    if (view.indices.wide) {
      read_column<int64_t>(view.indices, n, neighbor);
    } else {
      read_column<int32_t>(view.indices, n, neighbor);
    }
    if (!id.data) {
      std::copy_n(position_.data(), n, edge);
    } else if (id.wide) {
      read_column<int64_t>(id, n, edge);
    } else {
      read_column<int32_t>(id, n, edge);
    }
    check_neighbors(view, neighbor, n);
    neighbor_.set_size(from + n);
    edge_.set_size(size + n);
  }

  // The same for rows whose in-edges are in several parts.
  void read_parts(const EdgeView& view, int64_t num_rows) {
    const int64_t n = position_.size(), from = neighbor_.size(), size = edge_.size();
    neighbor_.reserve(from + n);
    edge_.reserve(size + n);
    int64_t *neighbor = neighbor_.data() + from, *edge = edge_.data() + size;
    const int64_t* count = count_.data() + count_.size() - num_rows;
    int64_t i = 0;
    for (int64_t row = 0; row < num_rows; ++row) {
      const EdgeView& in = *held_[row].view;
      const int64_t stop = i + count[row];
      const bool narrow = !in.indices.wide && in.edge_id.data && !in.edge_id.wide &&
                          in.indices.stride == 1 && in.edge_id.stride == 1;
      if (narrow) {  // as parts usually are
        const auto* indices = static_cast<const int32_t*>(in.indices.data);
        const auto* id = static_cast<const int32_t*>(in.edge_id.data);
        for (; i < stop; ++i) {
          neighbor[i] = indices[position_[i]];
          edge[i] = id[position_[i]];
        }
      }
      for (; i < stop; ++i) {
        neighbor[i] = in.indices[position_[i]];
        edge[i] = in.edge_id.data ? in.edge_id[position_[i]] : position_[i];
      }
    }
    check_neighbors(view, neighbor, n);
    neighbor_.set_size(from + n);
    edge_.set_size(size + n);
  }

  static void check_neighbors(const EdgeView& view, const int64_t* neighbor, int64_t n) {
    uint64_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      largest = std::max(largest, static_cast<uint64_t>(neighbor[i]));
    }
    if (n && largest >= static_cast<uint64_t>(view.num_neighbors)) [[unlikely]]
      fail_neighbor(view, static_cast<int64_t>(largest));
  }

  [[noreturn, gnu::noinline, gnu::cold]] static void fail_neighbor(const EdgeView& view,
                                                                   int64_t neighbor) {
    fail("indices: neighbour " + std::to_string(neighbor) + " is not a node; there are " +
         std::to_string(view.num_neighbors));
  }

  template <typename T>
  void read_column(const IntColumn& column, int64_t n, int64_t* out) const {
    const T* data = static_cast<const T*>(column.data);
    const int64_t* position = position_.data();
    for (int64_t i = 0; i < n; ++i) out[i] = data[position[i] * column.stride];
  }

  Buffer<int64_t> position_;          // of the block at hand
  Buffer<int32_t> taken_, taken_id_;  // neighbours and ids of the block, before they are widened
  Buffer<int64_t> neighbor_, edge_, count_, seed_;
  Buffer<Held> held_;       // of each row of the block, if there are parts
  Buffer<Candidates> row_;  // in-edges of each row of the block and of some that follow
  Picker picker_;
  // Of 2^32, with which the edges of each row of the block were taken; by weight, each edge.
  Buffer<double> share_;
  Buffer<float> weight_;  // of each edge
  SourcePicker source_picker_;
};

}  // namespace pyg_scale
