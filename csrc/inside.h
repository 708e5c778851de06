// The edges of some nodes whose other ends are among these nodes, too.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "buffer.h"
#include "graph_view.h"
#include "prefetch.h"
#include "vectors.h"

namespace pyg_scale {

// A set of nodes, a bit each: for a graph of any size small, and so in a cache near by. Its members
// have places, ascending.
class Chosen {
 public:
  explicit Chosen(int64_t num_nodes) : size_(num_nodes / 64 + 1) {
    bits_.reserve(size_);
    first_.reserve(size_);
    std::fill_n(bits_.data(), size_, uint64_t{0});
  }

  void add(int64_t v) { bits_[v >> 6] |= uint64_t{1} << (v & 63); }

  // Gives the members their places. Returns how many there are.
  int64_t number() {
    int64_t count = 0;
    for (int64_t w = 0; w < size_; ++w) {
      first_[w] = count;
      count += std::popcount(bits_[w]);
    }
    return count;
  }

  void write(int64_t* node) const {
    for (int64_t w = 0; w < size_; ++w) {
      for (uint64_t left = bits_[w]; left; left &= left - 1) {
        *node++ = w * 64 + std::countr_zero(left);
      }
    }
  }

  PYG_SCALE_INLINE bool has(int64_t v) const { return bits_[v >> 6] >> (v & 63) & 1; }

  // Of a member.
  PYG_SCALE_INLINE int64_t place(int64_t v) const {
    const uint64_t before = bits_[v >> 6] & ((uint64_t{1} << (v & 63)) - 1);
    return first_[v >> 6] + std::popcount(before);
  }

 private:
  int64_t size_;
  Buffer<uint64_t> bits_;
  Buffer<int64_t> first_;  // the place of the first member of each word
};

// The edges of a graph, grouped by one end.
struct EdgeTable {
  int64_t num_nodes, num_edges;
  const int64_t* pointer;
  IntColumn target;
  IntColumn id;  // of the type and stride of `target`; absent: an edge's position
};

// What was found of an edge: its other end, and its id. Narrow if all numbers are.
template <typename S>
struct FoundEdge {
  S other, edge;
};

// The edges that were found, node by node: memory that a thread uses again.
template <typename S>
struct FoundEdges {
  Buffer<FoundEdge<S>> edges;
  Buffer<int64_t> degree;

  int64_t size() const { return edges.size(); }

  // Writes the place of each edge's own node, that of its other end, and its id.
  template <typename Place>
  void write(const Place& place, int64_t* own, int64_t* other, int64_t* id) const {
    dispatch(Write{}, this, &place, own, other, id);
  }

  // A batch of unusual size keeps no memory.
  void clear() {
    constexpr size_t kKeptBytes = size_t{1} << 26;
    edges.clear();
    degree.clear();
    if (edges.bytes() > kKeptBytes) edges.release();
  }

 private:
  struct Write {
    template <typename Place>
    PYG_SCALE_INLINE void operator()(const FoundEdges* found, const Place* place, int64_t* own,
                                     int64_t* other, int64_t* id) const {
      constexpr int64_t kUsual = 16;  // are written for every node; the next one writes over them
      const FoundEdge<S>* edges = found->edges.data();
      const int64_t size = found->size();
      for (int64_t i = 0, at = 0; i < found->degree.size(); ++i) {
        const int64_t end = at + found->degree[i];
        if (at + kUsual <= size) {
          for (int64_t j = 0; j < kUsual; ++j) own[at + j] = i;
          at += kUsual;
        }
        for (; at < end; ++at) own[at] = i;
        at = end;
      }
      for (int64_t at = 0; at < size; ++at) {
        other[at] = (*place)(edges[at].other);
        id[at] = edges[at].edge;
      }
    }
  };
};

// The edges of nodes in any order. Columns lie `kStride` apart.
template <typename T, int kStride>
struct FindInside {
  static constexpr int64_t kAhead = 16;  // nodes whose pointers are asked for
  static constexpr int64_t kSoon = 8;    // nodes whose edges are
  static constexpr int64_t kMost = 64;   // of the edges of a node, so many

  PYG_SCALE_INLINE void operator()(const EdgeTable* table, const Chosen* chosen,
                                   const int64_t* node, int64_t count, FoundEdges<T>* out) const {
    const int64_t *pointer = table->pointer, num_edges = table->num_edges;
    const auto num_nodes = static_cast<uint64_t>(table->num_nodes);
    const T* target = static_cast<const T*>(table->target.data);
    const T* id = static_cast<const T*>(table->id.data);
    out->clear();
    out->degree.reserve(count);
    out->degree.set_size(count);
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) __builtin_prefetch(pointer + node[i + kAhead]);
      if (i + kSoon < count) {
        const int64_t coming = node[i + kSoon];
        const int64_t from = std::clamp<int64_t>(pointer[coming], 0, num_edges);
        const int64_t to = std::clamp<int64_t>(pointer[coming + 1], from, num_edges);
        constexpr int64_t kLineEdges = 64 / static_cast<int64_t>(sizeof(T) * kStride);
        for (int64_t e = from; e < std::min(to, from + kMost); e += kLineEdges) {
          __builtin_prefetch(target + e * kStride);
          if (kStride == 1) __builtin_prefetch(id + e);
        }
      }
      const int64_t from = pointer[node[i]], to = pointer[node[i] + 1], before = found;
      check_entries(node[i], from, to, num_edges);
      out->edges.set_size(found);
      out->edges.reserve(found + to - from);
      FoundEdge<T>* edges = out->edges.data();
      for (int64_t e = from; e < to; ++e) {
        const T u = target[e * kStride];
        if (static_cast<uint64_t>(static_cast<int64_t>(u)) >= num_nodes) [[unlikely]]
          fail_missing("index: node", u, table->num_nodes);
        edges[found] = {u, id[e * kStride]};
        found += chosen->has(u);
      }
      out->degree[i] = found - before;
    }
    out->edges.set_size(found);
  }
};

// The edges of a range of nodes, appended. Their ids are their positions.
template <typename S>
struct FindInsideOfRange {
  PYG_SCALE_INLINE void operator()(const EdgeTable* table, const Chosen* chosen, int64_t begin,
                                   int64_t end, Buffer<int64_t>* before, FoundEdges<S>* out) const {
    const int64_t *pointer = table->pointer, num_edges = table->num_edges;
    const auto num_nodes = static_cast<uint64_t>(table->num_nodes);
    const auto* target = static_cast<const int64_t*>(table->target.data);
    for (int64_t v = begin; v < end; ++v) {
      check_entries(v, pointer[v], pointer[v + 1], num_edges);
    }
    const int64_t from = pointer[begin], to = pointer[end];
    int64_t found = out->edges.size();
    out->edges.reserve(found + to - from);
    before->reserve(to - from + 1);
    FoundEdge<S>* edges = out->edges.data();
    int64_t* found_before = before->data();  // each edge
    for (int64_t e = from; e < to; ++e) {
      const int64_t u = target[e];
      if (static_cast<uint64_t>(u) >= num_nodes) [[unlikely]]
        fail_missing("index: node", u, table->num_nodes);
      edges[found] = {static_cast<S>(u), static_cast<S>(e)};
      found_before[e - from] = found;
      found += chosen->has(u);
    }
    found_before[to - from] = found;
    out->edges.set_size(found);
    const int64_t rows = out->degree.size();
    out->degree.reserve(rows + end - begin);
    out->degree.set_size(rows + end - begin);
    for (int64_t v = begin; v < end; ++v) {
      out->degree[rows + v - begin] =
          found_before[pointer[v + 1] - from] - found_before[pointer[v] - from];
    }
  }
};

}  // namespace pyg_scale
