// gatv2_attention, see pyg_scale/ops/attention.py; its gradient is in attention_gatv2_grad.cpp.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention_gatv2.h"

namespace pyg_scale {
namespace {

template <typename T>
struct Gatv2Logits {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges;
  Gatv2Rows<T> in;
  Heads shape;

  int64_t numbers() const { return shape.size(); }
  PYG_SCALE_INLINE const A* begin(int64_t row, A* scratch) const {
    return widened(in.dst[row], shape.size(), scratch);
  }

  PYG_SCALE_INLINE void look_ahead(int64_t e, int64_t limit) const {
    const int64_t coming = e + in.src.ahead();
    if (coming >= limit) return;
    in.src.prefetch(edges.indices[coming]);
    if (in.edge.data) in.edge.prefetch(edges.id(coming));
  }

  PYG_SCALE_INLINE void of(const A* of_row, int64_t e, A* to, int64_t stride) const {
    const T* from = in.src[edges.indices[e]];
    const T* of_edge = in.edge.data ? in.edge[edges.id(e)] : nullptr;
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t c = h * shape.channels;
      to[h * stride] = in.logit(from + c, of_row + c, of_edge ? of_edge + c : nullptr, in.att + c,
                                shape.channels);
    }
  }

  PYG_SCALE_INLINE void finish(A*, int64_t) const {}

  PYG_SCALE_INLINE void add_value(int64_t e, const A* weights, int64_t stride, A* sum) const {
    const T* from = in.src[edges.indices[e]];
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t c = h * shape.channels;
      add_scaled(sum + c, from + c, weights[h * stride], shape.channels);
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> gatv2_attention(Tensor indptr, Tensor indices,
                                                   MaybeTensor edge_id, MaybeTensor, MaybeTensor,
                                                   MaybeTensor, Tensor x_src, Tensor x_dst,
                                                   Tensor att, MaybeTensor x_edge, double slope,
                                                   double dropout, MaybeTensor seed,
                                                   bool need_weights) {
  const CsrEdges edges(indptr, indices, edge_id);
  const Gatv2Input in(edges, x_src, x_dst, att, x_edge);
  const Heads shape(in.src);
  const ScalarType dtype = accumulator_type(in.src.scalar_type());
  Tensor out = pool_empty({edges.rows, shape.heads, shape.channels}, in.src.scalar_type());
  Tensor lse = pool_empty({edges.rows, shape.heads}, dtype);
  Tensor weights = pool_empty({need_weights ? edges.edges : 0, shape.heads}, dtype);
  visit(in.src.scalar_type(), "x_src", [&](auto one) {
    using T = decltype(one);
    using A = AccumulatorOf<T>;
    const Gatv2Logits<T> logits{edges, in.rows<T>(slope), shape};
    attend(
        AttentionForward<T, Gatv2Logits<T>>{edges, logits, shape, Dropout(seed, dropout),
                                            data_of<T>(out), data_of<A>(lse), data_of<A>(weights)},
        in.src.size(0));
  });
  return {out, lse, weights};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "gatv2_attention(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor? t_indptr, "
      "Tensor? t_indices, Tensor? t_position, Tensor x_src, Tensor x_dst, Tensor att, "
      "Tensor? x_edge, float negative_slope, float dropout, Tensor? seed, bool need_weights) "
      "-> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("gatv2_attention", TORCH_BOX(&pyg_scale::gatv2_attention));
}
