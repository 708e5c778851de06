// edge_sum: features added up along edges in any order, see pyg_scale/ops/edge_sum.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "buffer.h"
#include "graph_view.h"
#include "pool.h"
#include "vectors.h"

namespace pyg_scale {
namespace {

enum Norm : int64_t { kSum, kMean, kGcn };

struct Edges {
  const int64_t* from;
  const int64_t* to;
  const int64_t* receiver;  // `to`, or `from` in the transpose
  int64_t count, stride;    // a stride of 0 repeats one edge
};

void check_nodes(const int64_t* ids, int64_t stride, int64_t count, int64_t rows) {
  for (int64_t e = 0; e < count; ++e) {
    const int64_t id = ids[e * stride];
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(rows)) [[unlikely]] {
      fail("edge_index: edge " + std::to_string(e) + " has node " + std::to_string(id) +
           ", but there are " + std::to_string(rows));
    }
  }
}

// Of each node that receives: its degree, at least 1; for GCN 1 / sqrt(degree), where every node
// has one self-loop.
template <typename T>
void factors(const Edges& edges, Norm norm, int64_t num_nodes, T* factor) {
  std::fill_n(factor, num_nodes, norm == kGcn ? T{1} : T{0});
  for (int64_t i = 0; i < edges.count; ++i) {
    const int64_t e = i * edges.stride;
    if (norm != kGcn || edges.from[e] != edges.to[e]) factor[edges.receiver[e]] += T{1};
  }
  for (int64_t v = 0; v < num_nodes; ++v) {
    factor[v] = norm == kGcn ? T{1} / std::sqrt(factor[v]) : std::max(factor[v], T{1});
  }
}

template <typename T>
void sum_edges(const Edges& edges, Norm norm, bool transposed, const T* x, int64_t num_src,
               int64_t num_dst, int64_t size, T* out) {
  std::fill_n(out, num_dst * size, T{0});
  Buffer<T> held;
  T* factor = nullptr;
  if (norm != kSum) {
    const int64_t receivers = transposed ? num_src : num_dst;
    held.reserve(receivers);
    factor = held.data();
    factors(edges, norm, receivers, factor);
    if (norm == kMean && transposed) {
      for (int64_t v = 0; v < receivers; ++v) factor[v] = T{1} / factor[v];
    }
  }
  for (int64_t e = 0; e < edges.count; ++e) {
    const int64_t from = edges.from[e * edges.stride], to = edges.to[e * edges.stride];
    if (norm == kGcn) {
      if (from != to) add_scaled(out + to * size, x + from * size, factor[from] * factor[to], size);
    } else if (norm == kMean && transposed) {
      add_scaled(out + to * size, x + from * size, factor[from], size);
    } else {
      add(out + to * size, x + from * size, size);
    }
  }
  for (int64_t v = 0; norm == kGcn && v < num_dst; ++v) {
    add_scaled(out + v * size, x + v * size, factor[v] * factor[v], size);
  }
  if (norm == kMean && !transposed) {
    for (int64_t v = 0; v < num_dst; ++v) {
      for (int64_t c = 0; c < size; ++c) out[v * size + c] /= factor[v];
    }
  }
}

template <typename T>
Tensor sum_of(const Tensor& x, const Edges& edges, Norm norm, bool transposed, int64_t num_dst) {
  Tensor out = pool_empty({num_dst, x.size(1)}, x.scalar_type());
  const auto* from = x.numel() ? static_cast<const T*>(x.const_data_ptr()) : nullptr;
  if (out.numel()) {
    sum_edges(edges, norm, transposed, from, x.size(0), num_dst, x.size(1),
              static_cast<T*>(out.mutable_data_ptr()));
  }
  return out;
}

Tensor edge_sum(Tensor x, Tensor edge_index, int64_t num_dst, int64_t norm, bool transposed) {
  const bool wide = x.scalar_type() == ScalarType::Double;
  check(x.is_cpu() && x.dim() == 2 && x.is_contiguous() &&
            (wide || x.scalar_type() == ScalarType::Float),
        "x must be a contiguous 2-D float32 or float64 tensor on the CPU");
  check(edge_index.is_cpu() && edge_index.dim() == 2 && edge_index.size(0) == 2 &&
            edge_index.scalar_type() == ScalarType::Long,
        "edge_index must be an int64 tensor [2, num_edges] on the CPU");
  check(norm >= kSum && norm <= kGcn, "norm must be 0 (sum), 1 (mean) or 2 (gcn)");
  check_count(num_dst, "num_dst");
  check(x.size(1) == 0 || num_dst < (int64_t{1} << 59) / x.size(1), "num_dst is too large");
  const int64_t num_src = x.size(0), count = edge_index.size(1);
  check(norm != kGcn || num_src == num_dst, "norm 2 (gcn) needs as many destinations as sources");
  Edges edges{};
  edges.count = count;
  if (count) {
    const auto* ids = edge_index.const_data_ptr<int64_t>();
    const auto* other = ids + edge_index.stride(0);
    edges.from = transposed ? other : ids;
    edges.to = transposed ? ids : other;
    edges.receiver = other;
    edges.stride = edge_index.stride(1);
    check_nodes(edges.from, edges.stride, count, num_src);
    check_nodes(edges.to, edges.stride, count, num_dst);
  }
  const auto rule = static_cast<Norm>(norm);
  return wide ? sum_of<double>(x, edges, rule, transposed, num_dst)
              : sum_of<float>(x, edges, rule, transposed, num_dst);
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("edge_sum(Tensor x, Tensor edge_index, int num_dst, int norm, bool transposed) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("edge_sum", TORCH_BOX(&pyg_scale::edge_sum));
}
