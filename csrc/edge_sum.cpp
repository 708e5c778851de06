// edge_sum: features added up along edges in any order, see pyg_scale/ops/edge_sum.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "buffer.h"
#include "graph_view.h"
#include "pool.h"
#include "vectors.h"

namespace pyg_scale {
namespace {

enum Norm : int64_t { kSum, kMean, kGcn, kSymmetric };

template <typename T>
struct Edges {
  const int64_t* from;
  const int64_t* to;
  const int64_t* receiver;  // `to`, or `from` in the transpose
  int64_t count, stride;    // a stride of 0 repeats one edge
  const T* weight;          // null: 1
  int64_t weight_stride;

  T weight_of(int64_t e) const { return weight ? weight[e * weight_stride] : T{1}; }
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

// The number of edges of each node that receives, at least 1.
template <typename T>
void count_edges(const Edges<T>& edges, int64_t num_nodes, T* count) {
  std::fill_n(count, num_nodes, T{0});
  for (int64_t e = 0; e < edges.count; ++e) count[edges.receiver[e * edges.stride]] += T{1};
  for (int64_t v = 0; v < num_nodes; ++v) count[v] = std::max(count[v], T{1});
}

// 1 / sqrt(degree) of each node, 0 for the degree 0. `loop`, if given, gets the weight of the loop
// of each node, which replaces those among the edges: that of the last one, or 1.
template <typename T>
void scales(const Edges<T>& edges, int64_t num_nodes, T* loop, T* scale) {
  if (loop) std::fill_n(loop, num_nodes, T{1});
  std::fill_n(scale, num_nodes, T{0});
  for (int64_t i = 0; i < edges.count; ++i) {
    const int64_t e = i * edges.stride, from = edges.from[e];
    if (loop && from == edges.to[e]) {
      loop[from] = edges.weight_of(i);
    } else {
      scale[edges.receiver[e]] += edges.weight_of(i);
    }
  }
  for (int64_t v = 0; v < num_nodes; ++v) {
    const T degree = loop ? scale[v] + loop[v] : scale[v];
    scale[v] = degree == T{0} ? T{0} : T{1} / std::sqrt(degree);
  }
}

template <typename T>
struct AddEdges {
  PYG_SCALE_INLINE void operator()(const Edges<T>* edges, const T* factor, const T* x, int64_t size,
                                   T* out) const {
    for (int64_t i = 0; i < edges->count; ++i) {
      const int64_t e = i * edges->stride, from = edges->from[e];
      T* row = out + edges->to[e] * size;
      if (factor) {
        add_scaled(row, x + from * size, factor[from] * edges->weight_of(i), size);
      } else if (edges->weight) {
        add_scaled(row, x + from * size, edges->weight_of(i), size);
      } else {
        add(row, x + from * size, size);
      }
    }
  }
};

template <typename T>
struct AddNormalized {
  PYG_SCALE_INLINE void operator()(const Edges<T>* edges, const T* loop, const T* scale, const T* x,
                                   int64_t size, int64_t num_nodes, T* out) const {
    for (int64_t i = 0; i < edges->count; ++i) {
      const int64_t e = i * edges->stride, from = edges->from[e], to = edges->to[e];
      if (loop && from == to) continue;
      add_scaled(out + to * size, x + from * size, scale[from] * scale[to] * edges->weight_of(i),
                 size);
    }
    for (int64_t v = 0; loop && v < num_nodes; ++v) {
      add_scaled(out + v * size, x + v * size, scale[v] * scale[v] * loop[v], size);
    }
  }
};

struct Rule {
  Norm norm;
  bool transposed;
  double own;
};

template <typename T>
void sum_edges(const Edges<T>& edges, const Rule& rule, const T* x, int64_t num_src,
               int64_t num_dst, int64_t size, T* out) {
  const auto [norm, transposed, of_itself] = rule;
  const auto own = static_cast<T>(of_itself);
  std::fill_n(out, num_dst * size, T{0});
  Buffer<T> held;
  if (norm == kSum) {
    dispatch(AddEdges<T>{}, &edges, static_cast<const T*>(nullptr), x, size, out);
  } else if (norm == kMean) {
    const int64_t receivers = transposed ? num_src : num_dst;
    held.reserve(receivers);
    T* count = held.data();
    count_edges(edges, receivers, count);
    if (transposed) {
      for (int64_t v = 0; v < receivers; ++v) count[v] = T{1} / count[v];
    }
    const T* factor = transposed ? count : nullptr;
    dispatch(AddEdges<T>{}, &edges, factor, x, size, out);
    for (int64_t v = 0; !transposed && v < num_dst; ++v) {
      for (int64_t c = 0; c < size; ++c) out[v * size + c] /= count[v];
    }
  } else {
    held.reserve(2 * num_dst);
    T* loop = norm == kGcn ? held.data() + num_dst : nullptr;
    scales(edges, num_dst, loop, held.data());
    const T *of_loops = loop, *scale = held.data();
    dispatch(AddNormalized<T>{}, &edges, of_loops, scale, x, size, num_dst, out);
  }
  for (int64_t v = 0; own != T{0} && v < num_dst; ++v) {
    add_scaled(out + v * size, x + v * size, own, size);
  }
}

template <typename T>
Tensor sum_of(const Tensor& x, const Tensor& edge_index, const std::optional<Tensor>& weight,
              int64_t num_dst, const Rule& rule) {
  const int64_t num_src = x.size(0), count = edge_index.size(1), size = x.size(1);
  Edges<T> edges{};
  edges.count = count;
  if (count) {
    const auto* ids = edge_index.const_data_ptr<int64_t>();
    const auto* other = ids + edge_index.stride(0);
    edges.from = rule.transposed ? other : ids;
    edges.to = rule.transposed ? ids : other;
    edges.receiver = other;
    edges.stride = edge_index.stride(1);
    check_nodes(edges.from, edges.stride, count, num_src);
    check_nodes(edges.to, edges.stride, count, num_dst);
    if (weight) {
      edges.weight = static_cast<const T*>(weight->const_data_ptr());
      edges.weight_stride = weight->stride(0);
    }
  }
  Tensor out = pool_empty({num_dst, size}, x.scalar_type());
  const auto* from = x.numel() ? static_cast<const T*>(x.const_data_ptr()) : nullptr;
  if (out.numel()) {
    sum_edges<T>(edges, rule, from, num_src, num_dst, size,
                 static_cast<T*>(out.mutable_data_ptr()));
  }
  return out;
}

Tensor edge_sum(Tensor x, Tensor edge_index, std::optional<Tensor> weight, int64_t num_dst,
                int64_t norm, double own, bool transposed) {
  const bool wide = x.scalar_type() == ScalarType::Double;
  check(x.is_cpu() && x.dim() == 2 && x.is_contiguous() &&
            (wide || x.scalar_type() == ScalarType::Float),
        "x must be a contiguous 2-D float32 or float64 tensor on the CPU");
  check(edge_index.is_cpu() && edge_index.dim() == 2 && edge_index.size(0) == 2 &&
            edge_index.scalar_type() == ScalarType::Long,
        "edge_index must be an int64 tensor [2, num_edges] on the CPU");
  check(norm >= kSum && norm <= kSymmetric,
        "norm must be 0 (sum), 1 (mean), 2 (gcn) or 3 (symmetric)");
  check_count(num_dst, "num_dst");
  check(x.size(1) == 0 || num_dst < (int64_t{1} << 59) / x.size(1), "num_dst is too large");
  check((norm < kGcn && own == 0) || x.size(0) == num_dst,
        "norms 2 (gcn) and 3 (symmetric), and own, need as many destinations as sources");
  check(
      !weight || (weight->is_cpu() && weight->dim() == 1 && weight->size(0) == edge_index.size(1) &&
                  weight->scalar_type() == x.scalar_type()),
      "weight must be a tensor [num_edges] of the type of x on the CPU");
  const Rule rule{static_cast<Norm>(norm), transposed, own};
  return wide ? sum_of<double>(x, edge_index, weight, num_dst, rule)
              : sum_of<float>(x, edge_index, weight, num_dst, rule);
}

template <typename T>
struct Dots {
  PYG_SCALE_INLINE void operator()(const Edges<T>* edges, const T* x, const T* grad, int64_t size,
                                   const T* count, T* out) const {
    for (int64_t i = 0; i < edges->count; ++i) {
      const int64_t e = i * edges->stride;
      out[i] = dot(x + edges->from[e] * size, grad + edges->to[e] * size, size);
      if (count) out[i] /= count[edges->receiver[e]];
    }
  }
};

template <typename T>
Tensor dots_of(const Tensor& x, const Tensor& grad, const Tensor& edge_index, bool mean,
               bool transposed) {
  Edges<T> edges{};
  edges.count = edge_index.size(1);
  Tensor out = pool_empty({edges.count}, x.scalar_type());
  if (!edges.count) return out;
  const auto* ids = edge_index.const_data_ptr<int64_t>();
  const auto* other = ids + edge_index.stride(0);
  edges.from = transposed ? other : ids;
  edges.to = transposed ? ids : other;
  edges.receiver = other;
  edges.stride = edge_index.stride(1);
  check_nodes(edges.from, edges.stride, edges.count, x.size(0));
  check_nodes(edges.to, edges.stride, edges.count, grad.size(0));
  Buffer<T> held;
  if (mean) {
    const int64_t receivers = (transposed ? x : grad).size(0);
    held.reserve(receivers);
    count_edges(edges, receivers, held.data());
  }
  const bool empty = x.size(1) == 0;
  dispatch(Dots<T>{}, &edges, empty ? nullptr : static_cast<const T*>(x.const_data_ptr()),
           empty ? nullptr : static_cast<const T*>(grad.const_data_ptr()), x.size(1),
           static_cast<const T*>(mean ? held.data() : nullptr),
           static_cast<T*>(out.mutable_data_ptr()));
  return out;
}

Tensor edge_sum_weight_grad(Tensor x, Tensor grad, Tensor edge_index, bool mean, bool transposed) {
  const bool wide = x.scalar_type() == ScalarType::Double;
  check(x.is_cpu() && x.dim() == 2 && x.is_contiguous() &&
            (wide || x.scalar_type() == ScalarType::Float),
        "x must be a contiguous 2-D float32 or float64 tensor on the CPU");
  check(grad.is_cpu() && grad.dim() == 2 && grad.is_contiguous() && grad.size(1) == x.size(1) &&
            grad.scalar_type() == x.scalar_type(),
        "grad must be a contiguous tensor on the CPU, of the type of x and with its columns");
  check(edge_index.is_cpu() && edge_index.dim() == 2 && edge_index.size(0) == 2 &&
            edge_index.scalar_type() == ScalarType::Long,
        "edge_index must be an int64 tensor [2, num_edges] on the CPU");
  return wide ? dots_of<double>(x, grad, edge_index, mean, transposed)
              : dots_of<float>(x, grad, edge_index, mean, transposed);
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "edge_sum(Tensor x, Tensor edge_index, Tensor? weight, int num_dst, int norm, float own, "
      "bool transposed) -> Tensor");
  m.def(
      "edge_sum_weight_grad(Tensor x, Tensor grad, Tensor edge_index, bool mean, bool transposed) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("edge_sum", TORCH_BOX(&pyg_scale::edge_sum));
  m.impl("edge_sum_weight_grad", TORCH_BOX(&pyg_scale::edge_sum_weight_grad));
}
