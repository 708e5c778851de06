// induced_edges: all edges among some nodes (the meaning is in pyg_scale/ops/induced_edges.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <tuple>

#include "buffer.h"
#include "graph_view.h"
#include "pool.h"
#include "prefetch.h"

namespace pyg_scale {
namespace {

// Not std::popcount: without an instruction for it, that is a call.
inline int64_t count_bits(uint64_t word) {
  word -= (word >> 1) & 0x5555555555555555;
  word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333);
  word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f;
  return static_cast<int64_t>((word * 0x0101010101010101) >> 56);
}

// Which of 64 nodes were chosen, and the place of the first of them.
struct Word {
  uint64_t chosen;
  int64_t first;
};

// The set of chosen nodes: for a graph of any size small, and so in a cache near by.
class Chosen {
 public:
  Chosen(int64_t num_nodes, const int64_t* drawn, int64_t count) : size_(num_nodes / 64 + 1) {
    words_.reserve(size_);
    std::fill_n(words_.data(), size_, Word{0, 0});
    check_each_within(drawn, count, "drawn: node", num_nodes);
    for (int64_t i = 0; i < count; ++i) {
      words_[drawn[i] >> 6].chosen |= uint64_t{1} << (drawn[i] & 63);
    }
    for (int64_t w = 0; w < size_; ++w) {
      words_[w].first = count_;
      count_ += count_bits(words_[w].chosen);
    }
  }

  int64_t count() const { return count_; }

  void write(int64_t* node) const {
    for (int64_t w = 0; w < size_; ++w) {
      for (uint64_t left = words_[w].chosen; left; left &= left - 1) {
        *node++ = w * 64 + std::countr_zero(left);
      }
    }
  }

  bool has(int64_t v) const { return words_[v >> 6].chosen >> (v & 63) & 1; }

  // Of a node that was chosen.
  int64_t place(int64_t v) const {
    const Word& word = words_[v >> 6];
    return word.first + count_bits(word.chosen & ((uint64_t{1} << (v & 63)) - 1));
  }

 private:
  Buffer<Word> words_;
  int64_t size_, count_ = 0;
};

// The edges of a batch, other ends and positions: memory that a thread uses again.
struct Edges {
  Buffer<int64_t> other, edge, degree;
};

constexpr int64_t kAhead = 16;  // nodes whose pointers are asked for
constexpr int64_t kSoon = 8;    // nodes whose edges are
constexpr int64_t kIds = 24;    // edges whose ids are

PYG_SCALE_PREFETCH void prefetch_edges(const int64_t* pointer, const int64_t* target, int64_t v,
                                       int64_t num_edges) {
  const int64_t from = std::clamp<int64_t>(pointer[v], 0, num_edges);
  const int64_t to = std::clamp<int64_t>(pointer[v + 1], from, num_edges);
  for (int64_t e = from; e < std::min(to, from + 64); e += 8) __builtin_prefetch(target + e);
}

std::tuple<Tensor, Tensor, Tensor> induced_edges(Tensor indptr, Tensor index, Tensor edge_id,
                                                 Tensor drawn) {
  const int64_t num_nodes = num_pointed(indptr), num_edges = index.numel();
  const int64_t* pointer = int64_data(indptr, num_nodes + 1, "indptr");
  const int64_t* target = int64_data(index, num_edges, "index");
  const int64_t* id = int64_data(edge_id, num_edges, "edge_id");
  const Chosen chosen(num_nodes, int64_data(drawn, drawn.numel(), "drawn"), drawn.numel());
  const int64_t count = chosen.count();
  Tensor nodes = pool_empty({count}, ScalarType::Long);
  int64_t* node = nodes.mutable_data_ptr<int64_t>();
  chosen.write(node);
  thread_local Edges kept;
  Edges& edges = kept;
  edges.degree.reserve(count);
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(pointer + node[i + kAhead]);
    if (i + kSoon < count) prefetch_edges(pointer, target, node[i + kSoon], num_edges);
    const int64_t from = pointer[node[i]], to = pointer[node[i] + 1], before = found;
    check_entries(node[i], from, to, num_edges);
    for (Buffer<int64_t>* each : {&edges.other, &edges.edge}) {
      each->set_size(found);
      each->reserve(found + to - from);
    }
    int64_t *other = edges.other.data(), *edge = edges.edge.data();
    for (int64_t e = from; e < to; ++e) {
      const int64_t u = target[e];
      if (static_cast<uint64_t>(u) >= static_cast<uint64_t>(num_nodes)) [[unlikely]]
        fail_missing("index: node", u, num_nodes);
      other[found] = u;
      edge[found] = e;
      found += chosen.has(u);
    }
    edges.degree[i] = found - before;
  }
  Tensor ends = pool_empty({2, found}, ScalarType::Long);
  Tensor ids = pool_empty({found}, ScalarType::Long);
  int64_t *own = ends.mutable_data_ptr<int64_t>(), *next = own;
  for (int64_t i = 0; i < count; ++i) next = std::fill_n(next, edges.degree[i], i);
  const int64_t *other = edges.other.data(), *edge = edges.edge.data();
  int64_t *place = own + found, *to = ids.mutable_data_ptr<int64_t>();
  for (int64_t at = 0; at < found; ++at) {
    if (at + kIds < found) __builtin_prefetch(id + edge[at + kIds]);
    place[at] = chosen.place(other[at]);
    to[at] = id[edge[at]];
  }
  constexpr size_t kKeptBytes = size_t{1} << 26;  // a batch of unusual size keeps no memory
  for (Buffer<int64_t>* each : {&edges.other, &edges.edge, &edges.degree}) {
    each->clear();
    if (each->bytes() > kKeptBytes) each->release();
  }
  return {nodes, ends, ids};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "induced_edges(Tensor indptr, Tensor index, Tensor edge_id, Tensor drawn) -> (Tensor node, "
      "Tensor ends, Tensor edge)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("induced_edges", TORCH_BOX(&pyg_scale::induced_edges));
}
