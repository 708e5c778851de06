// The sources of all in-edges of a hop, each once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "buffer.h"
#include "graph_view.h"
#include "relabel.h"

namespace pyg_scale {

// Sources in the order of their first edges. Its memory serves one hop after the other.
struct HopSources {
  Buffer<uint32_t> place;  // of the source of each edge
  Buffer<int64_t> source;  // by place

  int64_t size() const { return source.size(); }
  size_t bytes() const { return place.bytes() + source.bytes() + table_.bytes(); }

  // Gives a place to each of `total` neighbours, which are below `num_nodes`.
  void number(const int64_t* neighbor, int64_t total, int64_t num_nodes) {
    constexpr int64_t kBlock = 4096;  // edges between two looks at how full the table is
    table_.begin(static_cast<uint64_t>(std::max<int64_t>(num_nodes, 1)));
    place.reserve(total);
    source.clear();
    for (int64_t begin = 0; begin < total; begin += kBlock) {
      const int64_t end = std::min(total, begin + kBlock), most = size() + end - begin;
      check(most < int64_t{1} << 32, "a hop has 2**32 sources or more");
      source.reserve(most + 1);
      table_.reserve(most);
      table_.use([&](auto& slots)
                     __attribute__((always_inline)) { find(slots, neighbor, begin, end); });
    }
  }

 private:
  static constexpr int64_t kAhead = 32;  // slots that are asked for before they are read

  template <typename Slots>
  PYG_SCALE_PREFETCH void find(Slots& slots, const int64_t* neighbor, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < std::min(begin + kAhead, end); ++i) {
      slots.prefetch(static_cast<uint64_t>(neighbor[i]));
    }
    int64_t next = size();
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) slots.prefetch(static_cast<uint64_t>(neighbor[i + kAhead]));
      const uint64_t at =
          slots.find_or_insert(static_cast<uint64_t>(neighbor[i]), static_cast<uint64_t>(next));
      source[next] = neighbor[i];
      next += at == static_cast<uint64_t>(next);
      place[i] = static_cast<uint32_t>(at);
    }
    source.set_size(next);
  }

  RelabelTable table_;
};

}  // namespace pyg_scale
