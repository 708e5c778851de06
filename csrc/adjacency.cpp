// csr_transpose: edges by destination grouped by source, see pyg_scale/ops/adjacency.py.
//
// Each thread has a range of sources: edges stay in their order without atomics.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "csr_edges.h"

namespace pyg_scale {
namespace {

constexpr int64_t kThreadEdges = 1 << 18;  // fewer are not worth a thread
constexpr int64_t kAhead = 16;

template <typename Index, typename Position>
void place(const int64_t* indptr, int64_t rows, const Index* col, int64_t from, int64_t to,
           int64_t* cursor, Index* row_out, Position* position) {
  const int64_t edges = indptr[rows];
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t e = indptr[row]; e < indptr[row + 1]; ++e) {
      if (e + kAhead < edges) {
        const auto coming = static_cast<int64_t>(col[e + kAhead]);
        __builtin_prefetch(cursor + coming, 1);
      }
      const auto source = static_cast<int64_t>(col[e]);
      if (source < from || source >= to) continue;
      const int64_t at = cursor[source]++;
      row_out[at] = static_cast<Index>(row);
      position[at] = static_cast<Position>(e);
    }
  }
}

template <typename Index, typename Position>
void transpose(const CsrEdges& edges, const Index* col, int64_t num_src, int64_t* pointers,
               Index* row, Position* position) {
  // pointers[v + 1] is where the next edge of v goes: first the beginning of its edges, at last
  // their end.
  int64_t* cursor = pointers + 1;
  std::fill_n(pointers, num_src + 1, 0);
  for (int64_t e = 0; e < edges.edges; ++e) {
    if (e + kAhead < edges.edges) __builtin_prefetch(cursor + col[e + kAhead], 1);
    ++cursor[col[e]];
  }
  const int64_t threads =
      std::clamp<int64_t>(edges.edges / kThreadEdges, 1, torch::stable::get_num_threads());
  std::vector<int64_t> bounds{0};
  int64_t before = 0;
  for (int64_t v = 0; v < num_src; ++v) {
    const int64_t degree = cursor[v];
    cursor[v] = before;
    before += degree;
    const auto task = static_cast<int64_t>(bounds.size());
    if (task < threads && before >= edges.edges / threads * task) bounds.push_back(v + 1);
  }
  bounds.push_back(num_src);
  take_turns(static_cast<int64_t>(bounds.size()) - 1, true, [&](int64_t i) {
    const auto task = static_cast<size_t>(i);
    place(edges.indptr, edges.rows, col, bounds[task], bounds[task + 1], cursor, row, position);
  });
}

std::tuple<Tensor, Tensor, Tensor> csr_transpose(Tensor indptr, Tensor indices, int64_t num_src) {
  check_count(num_src, "num_src");
  indices = torch::stable::contiguous(indices);
  const CsrEdges edges(indptr, indices, std::nullopt);
  const RowTasks tasks(edges.indptr, edges.rows, edges.edges, 1);  // looks at the pointers
  edges.check_range(0, edges.edges, num_src);
  const bool narrow = edges.edges <= std::numeric_limits<int32_t>::max();
  Tensor pointers = pool_empty({num_src + 1}, ScalarType::Long);
  Tensor row = pool_empty({edges.edges}, indices.scalar_type());
  Tensor position = pool_empty({edges.edges}, narrow ? ScalarType::Int : ScalarType::Long);
  int64_t* begin = data_of<int64_t>(pointers);
  const auto run = [&](auto index) {
    using Index = decltype(index);
    const Index* col = const_data_of<Index>(indices);
    narrow ? transpose(edges, col, num_src, begin, data_of<Index>(row), data_of<int32_t>(position))
           : transpose(edges, col, num_src, begin, data_of<Index>(row), data_of<int64_t>(position));
  };
  edges.indices.wide ? run(int64_t{}) : run(int32_t{});
  return {pointers, row, position};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("csr_transpose(Tensor indptr, Tensor indices, SymInt num_src) -> (Tensor, Tensor, Tensor)");
  // On CUDA only for a few edges, as long rows take the square of their length.
  m.def(
      "csr_transpose_few(Tensor indptr, Tensor indices, int num_src) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("csr_transpose", TORCH_BOX(&pyg_scale::csr_transpose));
  m.impl("csr_transpose_few", TORCH_BOX(&pyg_scale::csr_transpose));
}
