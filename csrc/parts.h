// In-edges that lie in several parts: which part holds a node, and where in it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "graph_view.h"
#include "prefetch.h"

namespace pyg_scale {

// The partition book of a node type (see pyg_scale.store.directory.PartitionBook).
struct Places {
  const uint8_t* narrow = nullptr;   // the part of each node, if there are no more than 256
  const int32_t* wide = nullptr;     // else
  IntColumn local;                   // its place in the part
  const int64_t* offsets = nullptr;  // [num_parts + 1], if parts are ranges of nodes
  int64_t num_parts = 0;

  void set_offsets(const Tensor& tensor) {
    num_parts = tensor.numel() - 1;
    check(num_parts > 0,
          "offsets must hold one number more than there are parts, which is at least 2");
    offsets = int64_data(tensor, num_parts + 1, "offsets");
    check(offsets[0] == 0 && std::is_sorted(offsets, offsets + num_parts + 1),
          "offsets must rise from 0");
  }

  int64_t part(int64_t v) const {
    if (narrow) return narrow[v];
    if (wide) return wide[v];
    return std::upper_bound(offsets + 1, offsets + num_parts, v) - (offsets + 1);
  }

  int64_t at(int64_t v, int64_t part) const { return local.data ? local[v] : v - offsets[part]; }

  // Into the second-level cache: the first one cannot wait for as many lines as are under way.
  PYG_SCALE_PREFETCH void prefetch(int64_t v) const {
    if (narrow) __builtin_prefetch(narrow + v, 0, 2);
    if (local.data) {
      __builtin_prefetch(static_cast<const char*>(local.data) + v * (local.wide ? 8 : 4), 0, 2);
    }
  }
};

// The place of a node's in-edges: the view that holds them, and the place in that view.
struct Held {
  const EdgeView* view;
  int64_t place;
};

inline Held held(const EdgeView& view, int64_t v) {
  if (!view.parts) return {&view, v};
  const int64_t part = view.places->part(v);
  if (part < 0 || part >= view.places->num_parts) [[unlikely]] {
    fail("the partition book has part " + std::to_string(part));
  }
  const EdgeView& in = view.parts[part];
  const int64_t place = view.places->at(v, part);
  if (place < 0 || place >= in.num_expanded) [[unlikely]] {
    fail("the partition book says that node " + std::to_string(v) + " is number " +
         std::to_string(place) + " of part " + std::to_string(part) + ", which has " +
         std::to_string(in.num_expanded) + " nodes");
  }
  return {&in, place};
}

// The books of all node types; `part` and `local` are empty where parts are ranges.
inline std::vector<Places> places_of(const std::vector<Tensor>& part,
                                     const std::vector<Tensor>& local,
                                     const std::vector<Tensor>& offsets,
                                     const std::vector<int64_t>& num_nodes) {
  std::vector<Places> out(num_nodes.size());
  check(part.size() == out.size() && local.size() == out.size() && offsets.size() == out.size(),
        "a graph in parts needs a book for each node type");
  for (size_t t = 0; t < out.size(); ++t) {
    Places& places = out[t];
    places.set_offsets(offsets[t]);
    if (!part[t].numel()) continue;
    check(part[t].is_cpu() && part[t].dim() == 1 && part[t].is_contiguous() &&
              part[t].numel() == num_nodes[t] && local[t].numel() == num_nodes[t] &&
              local[t].is_contiguous(),
          "a partition book must have one entry per node");
    const ScalarType type = part[t].scalar_type();
    check(type == ScalarType::Byte || type == ScalarType::Int, "part must be uint8 or int32");
    if (type == ScalarType::Byte) {
      places.narrow = part[t].const_data_ptr<uint8_t>();
    } else {
      places.wide = part[t].const_data_ptr<int32_t>();
    }
    places.local = int_column(local[t], "local");
  }
  return out;
}

// A view of several parts: `common` holds for all of them.
inline EdgeView over_parts(EdgeView common, const EdgeView* parts, const Places& places) {
  common.parts = parts;
  common.places = &places;
  common.indptr = nullptr;
  const EdgeView* with_edges = nullptr;
  for (int64_t p = 0; p < places.num_parts; ++p) {
    // a part without edges has no columns
    if (parts[p].num_edges) {
      check(!with_edges || (!with_edges->time == !parts[p].time &&
                            !with_edges->weight_prefix == !parts[p].weight_prefix),
            "edge_time and weight_prefix must be there for all parts with edges, or for none");
      with_edges = parts + p;
    }
    if (parts[p].time) common.time = parts[p].time;
    if (parts[p].weight_prefix) common.weight_prefix = parts[p].weight_prefix;
  }
  return common;
}

}  // namespace pyg_scale
