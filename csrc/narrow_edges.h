// In-edges whose sources have 32 bits, which are read many at a time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "graph_view.h"
#include "pick.h"
#include "prefetch.h"

namespace pyg_scale {

// Sources of 32 bits, and the ids of their edges: in pairs with them, in a column of their own, or
// none, if an id is the position.
struct NarrowEdges {
  // The bytes of a node that are asked for before it is its turn; the rest while they are read.
  static constexpr int64_t kStart = 4096;

  // A type for ids that lie beside their sources, or else for positions.
  template <bool kPairs>
  using Id = std::conditional_t<kPairs, int32_t, int64_t>;

  const int32_t* source = nullptr;
  const int32_t* id = nullptr;
  bool pairs = false;

  // Asks for the line of an edge. Its position has not been checked yet.
  PYG_SCALE_PREFETCH void prefetch(int64_t position) const {
    prefetch_entry<0, 2>(source, position * (pairs ? 2 : 1));
  }

  // Those of a graph; without a source if it stores them in another way.
  static NarrowEdges of(const EdgeView& view) {
    const IntColumn &source = view.indices, &id = view.edge_id;
    const auto* first = static_cast<const int32_t*>(source.data);
    const auto* other = static_cast<const int32_t*>(id.data);
    if (source.wide || (other && (id.wide || id.stride != source.stride))) return {};
    if (source.stride == 1) return {first, other, false};
    return source.stride == 2 && other == first + 1 ? NarrowEdges{first, other, true}
                                                    : NarrowEdges{};
  }
};

// Asks for the edges of rows while those of rows before them are read. A reader makes a step for
// each eight edges and one for the rest of a row, so that as many lines are on their way whatever
// the lengths of rows. What it asks for may not have been checked yet.
template <bool kPairs>
class EdgesAhead {
 public:
  static constexpr int64_t kSteps = 32;  // between asking and reading

  // After the last of the rows stands what `after_all` makes of it.
  EdgesAhead(const NarrowEdges& edges, const Candidates* rows)
      : source_(edges.source), row_(rows), at_(first_of(*rows)), end_(end_of(*rows)) {
    for (int64_t i = 0; i < kSteps; ++i) step();
  }

  // Edges without end, so that no row follows.
  static Candidates after_all(Candidates last) { return {last.end, -1}; }

  PYG_SCALE_PREFETCH void step() {
    prefetch_entry<0, 2>(source_, static_cast<int64_t>(at_ * (kPairs ? 2 : 1)));
    at_ += kSize;
    const bool next = at_ > end_;
    row_ += next;
    const uint64_t first = first_of(*row_), end = end_of(*row_);
    at_ = next ? first : at_;
    end_ = next ? end : end_;
  }

 private:
  static constexpr int64_t kSize = 8;

  static uint64_t first_of(const Candidates& row) { return static_cast<uint64_t>(row.begin); }
  static uint64_t end_of(const Candidates& row) { return static_cast<uint64_t>(row.end); }

  const int32_t* source_;
  const Candidates* row_;
  uint64_t at_, end_;
};

}  // namespace pyg_scale
