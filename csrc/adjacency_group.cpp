// csr_group, csr_group_padded: an edge list grouped by destination and by source, see
// pyg_scale/ops/adjacency.py.
//
// One thread and one pass for each order: for graphs too small to be worth more than one op.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>

#include "csr_edges.h"

namespace pyg_scale {
namespace {

template <typename T>
struct Ends {
  const T *from, *to;
  int64_t count, stride;
  bool loops;        // are left out
  int64_t loops_to;  // or lead to this destination, if it is not negative
  int64_t source(int64_t e) const { return static_cast<int64_t>(from[e * stride]); }
  int64_t target(int64_t e) const {
    return loops_to >= 0 && is_loop(e) ? loops_to : static_cast<int64_t>(to[e * stride]);
  }
  bool is_loop(int64_t e) const { return from[e * stride] == to[e * stride]; }
  bool is_out(int64_t e) const { return loops && is_loop(e); }
};

// Turns the numbers of edges in counts[1], ... into the positions of the first edges.
inline void begin_from(int64_t* counts, int64_t size) {
  int64_t before = 0;
  for (int64_t v = 1; v <= size; ++v) {
    const int64_t degree = counts[v];
    counts[v] = before;
    before += degree;
  }
}

template <typename T>
void check_nodes(const T* ids, int64_t stride, int64_t count, int64_t rows) {
  for (int64_t e = 0; e < count; ++e) {
    const auto id = static_cast<int64_t>(ids[e * stride]);
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(rows)) [[unlikely]] {
      fail("edge_index: edge " + std::to_string(e) + " has node " + std::to_string(id) +
           ", but there are " + std::to_string(rows));
    }
  }
}

// Returns the number of edges without those left out. Each node has its number of in-edges, a loop
// counted, in indptr[1], ...
template <typename T>
int64_t count_edges(const Ends<T>& edges, int64_t num_dst, int64_t num_loops, int64_t* indptr) {
  std::fill_n(indptr, num_dst + 1, int64_t{0});
  std::fill_n(indptr + 1, num_loops, int64_t{1});
  int64_t kept = 0;
  for (int64_t e = 0; e < edges.count; ++e) {
    const int64_t stays = edges.is_out(e) ? 0 : 1;
    indptr[1 + edges.target(e)] += stays;
    kept += stays;
  }
  return kept;
}

template <typename T>
void place(const Ends<T>& edges, int64_t num_dst, int64_t num_loops, int64_t* indptr,
           int32_t* indices, int32_t* edge_id) {
  begin_from(indptr, num_dst);
  int64_t* cursor = indptr + 1;
  int32_t id = 0;
  for (int64_t e = 0; e < edges.count; ++e) {
    if (edges.is_out(e)) continue;
    const int64_t at = cursor[edges.target(e)]++;
    indices[at] = static_cast<int32_t>(edges.source(e));
    edge_id[at] = id++;
  }
  for (int64_t v = 0; v < num_loops; ++v) {
    const int64_t at = cursor[v]++;
    indices[at] = static_cast<int32_t>(v);
    edge_id[at] = id++;
  }
}

void transpose(const int64_t* indptr, const int32_t* indices, int64_t num_src, int64_t num_dst,
               int64_t* pointers, int32_t* rows, int32_t* position) {
  std::fill_n(pointers, num_src + 1, int64_t{0});
  int64_t* cursor = pointers + 1;
  for (int64_t e = 0; e < indptr[num_dst]; ++e) ++cursor[indices[e]];
  begin_from(pointers, num_src);
  for (int64_t row = 0; row < num_dst; ++row) {
    for (int64_t e = indptr[row]; e < indptr[row + 1]; ++e) {
      const int64_t at = cursor[indices[e]]++;
      rows[at] = static_cast<int32_t>(row);
      position[at] = static_cast<int32_t>(e);
    }
  }
}

using Groups = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <typename T>
Groups group(Ends<T> edges, int64_t num_src, int64_t num_dst, int64_t num_loops, bool padded,
             bool by_source) {
  check_nodes(edges.from, edges.stride, edges.count, num_src);
  check_nodes(edges.to, edges.stride, edges.count, num_dst);
  edges.loops = num_loops >= 0 && !padded;
  edges.loops_to = num_loops >= 0 && padded ? num_dst++ : -1;
  num_loops = std::max<int64_t>(num_loops, 0);
  Tensor indptr = pool_empty({num_dst + 1}, ScalarType::Long);
  auto* pointers = data_of<int64_t>(indptr);
  const int64_t size = count_edges(edges, num_dst, num_loops, pointers) + num_loops;
  check(size <= std::numeric_limits<int32_t>::max(), "there are more than 2**31 - 1 edges");
  Tensor indices = pool_empty({size}, ScalarType::Int),
         edge_id = pool_empty({size}, ScalarType::Int);
  place(edges, num_dst, num_loops, pointers, data_of<int32_t>(indices), data_of<int32_t>(edge_id));
  Tensor t_indptr = pool_empty({by_source ? num_src + 1 : 0}, ScalarType::Long);
  Tensor t_indices = pool_empty({by_source ? size : 0}, ScalarType::Int);
  Tensor t_position = pool_empty({by_source ? size : 0}, ScalarType::Int);
  if (by_source) {
    transpose(pointers, data_of<int32_t>(indices), num_src, num_dst, data_of<int64_t>(t_indptr),
              data_of<int32_t>(t_indices), data_of<int32_t>(t_position));
  }
  return {indptr, indices, edge_id, t_indptr, t_indices, t_position};
}

Groups grouped(const Tensor& edge_index, int64_t num_src, int64_t num_dst, int64_t num_loops,
               bool padded, bool by_source) {
  const bool wide = edge_index.scalar_type() == ScalarType::Long;
  check(edge_index.is_cpu() && edge_index.dim() == 2 && edge_index.size(0) == 2 &&
            (wide || edge_index.scalar_type() == ScalarType::Int),
        "edge_index must be an int64 or int32 tensor [2, num_edges] on the CPU");
  check_count(num_src, "num_src");
  check_count(num_dst, "num_dst");
  check(std::max(num_src, num_dst) <= std::numeric_limits<int32_t>::max(),
        "num_src and num_dst must be below 2**31");
  check(num_loops >= -1 && num_loops <= std::min(num_src, num_dst),
        "num_loops must be from -1 to the smaller of num_src and num_dst");
  const auto run = [&](auto id) {
    using T = decltype(id);
    Ends<T> edges{};
    edges.count = edge_index.size(1);
    if (edges.count) {
      edges.from = static_cast<const T*>(edge_index.const_data_ptr());
      edges.to = edges.from + edge_index.stride(0);
      edges.stride = edge_index.stride(1);
    }
    return group(edges, num_src, num_dst, num_loops, padded, by_source);
  };
  return wide ? run(int64_t{}) : run(int32_t{});
}

Groups csr_group(Tensor edge_index, int64_t num_src, int64_t num_dst, int64_t num_loops,
                 bool by_source) {
  return grouped(edge_index, num_src, num_dst, num_loops, false, by_source);
}

Groups csr_group_padded(Tensor edge_index, int64_t num_src, int64_t num_dst, int64_t num_loops,
                        bool by_source) {
  return grouped(edge_index, num_src, num_dst, num_loops, true, by_source);
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "csr_group(Tensor edge_index, int num_src, int num_dst, int num_loops, bool by_source) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "csr_group_padded(Tensor edge_index, int num_src, int num_dst, int num_loops, "
      "bool by_source) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("csr_group", TORCH_BOX(&pyg_scale::csr_group));
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("csr_group_padded", TORCH_BOX(&pyg_scale::csr_group_padded));
}
