// both_directions: edges and their opposites, each pair of nodes once (the meaning is in
// pyg_scale/ops/both_directions.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include "buffer.h"
#include "graph_view.h"
#include "pool.h"

namespace pyg_scale {
namespace {

struct InEdge {
  int64_t edge, source;
};

// The edges into each node, by (id, source), without those that have a source again. Memory that a
// thread uses again.
class Pairs {
 public:
  // Returns how many there are.
  int64_t find(const IntColumn& row, const IntColumn& col, const int64_t* edge, int64_t m,
               const int64_t* first, int64_t n) {
    num_nodes_ = n;
    for (int64_t v = 0; v < n; ++v) check_node(first[v], "first");
    end_.reserve(n + 1);
    std::fill_n(end_.data(), n + 1, 0);
    for (int64_t e = 0; e < m; ++e) {
      check_node(row[e], "row");
      check_node(col[e], "col");
      ++end_[row[e] + 1];
      ++end_[col[e] + 1];
    }
    for (int64_t v = 0; v < n; ++v) end_[v + 1] += end_[v];
    // Each is now where a node's next edge goes, and at last where they end.
    in_.reserve(2 * m);
    for (int64_t e = 0; e < m; ++e) {
      in_[end_[col[e]]++] = {edge[e], row[e]};
      in_[end_[row[e]]++] = {edge[e], first[col[e]]};
    }
    seen_.reserve(n);
    std::fill_n(seen_.data(), n, -1);
    int64_t kept = 0;
    for (int64_t v = 0, begin = 0; v < n; ++v) {
      const int64_t end = end_[v];
      std::sort(in_.data() + begin, in_.data() + end, [](const InEdge& a, const InEdge& b) {
        return a.edge != b.edge ? a.edge < b.edge : a.source < b.source;
      });
      for (int64_t i = begin; i < end; ++i) {
        const InEdge own = in_[i];
        if (seen_[own.source] == v) continue;
        seen_[own.source] = v;
        in_[kept++] = own;
      }
      begin = end;
      end_[v] = kept;
    }
    return kept;
  }

  template <typename T>
  void write(T* row, T* col, int64_t* edge) const {
    for (int64_t v = 0, i = 0; v < num_nodes_; ++v) {
      for (; i < end_[v]; ++i) {
        row[i] = static_cast<T>(in_[i].source);
        col[i] = static_cast<T>(v);
        edge[i] = in_[i].edge;
      }
    }
  }

  // A batch of unusual size keeps no memory.
  void clear() {
    constexpr size_t kKeptBytes = size_t{1} << 26;
    if (in_.bytes() + end_.bytes() + seen_.bytes() <= kKeptBytes) return;
    in_.release();
    end_.release();
    seen_.release();
  }

 private:
  void check_node(int64_t v, const char* name) const {
    if (static_cast<uint64_t>(v) >= static_cast<uint64_t>(num_nodes_)) [[unlikely]]
      fail_missing((std::string(name) + ": node").c_str(), v, num_nodes_);
  }

  int64_t num_nodes_ = 0;
  Buffer<InEdge> in_;
  Buffer<int64_t> end_;   // where the edges into each node end
  Buffer<int64_t> seen_;  // the node that had each source last
};

std::tuple<Tensor, Tensor> both_directions(Tensor row, Tensor col, Tensor edge, Tensor first) {
  const int64_t m = row.numel(), n = first.numel();
  check(col.numel() == m, "col must have as many entries as row");
  const IntColumn source = int_column(row, "row"), target = int_column(col, "col");
  check(source.wide == target.wide, "row and col must have one dtype");
  auto& pairs = kept_by_thread<Pairs, struct BothDirections>();
  const int64_t size =
      pairs.find(source, target, int64_data(edge, m, "edge"), m, int64_data(first, n, "first"), n);
  const ScalarType dtype = source.wide ? ScalarType::Long : ScalarType::Int;
  Tensor ends = pool_empty({2, size}, dtype), ids = pool_empty({size}, ScalarType::Long);
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  if (source.wide) {
    auto* to = ends.mutable_data_ptr<int64_t>();
    pairs.write(to, to + size, id);
  } else {
    auto* to = ends.mutable_data_ptr<int32_t>();
    pairs.write(to, to + size, id);
  }
  pairs.clear();
  return {ends, ids};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "both_directions(Tensor row, Tensor col, Tensor edge, Tensor first) -> (Tensor ends, Tensor "
      "edge)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("both_directions", TORCH_BOX(&pyg_scale::both_directions));
}
