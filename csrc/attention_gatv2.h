// What gatv2_attention and its gradient are handed, and its logits.
#pragma once

#include "attention.h"

namespace pyg_scale {

template <typename T>
struct Gatv2Rows {
  using A = AccumulatorOf<T>;
  Rows<T> src, dst, edge;  // edge.data is null if there are no edge features
  const A* att;
  A slope;

  // att · leaky(src + dst + edge) of one head
  PYG_SCALE_INLINE A logit(const T* from, const A* to, const T* of_edge, const A* of_att,
                           int64_t channels) const {
    Vector<A> sum{};
    int64_t c = 0;
    for (; c + kLanes<A> <= channels; c += kLanes<A>) {
      Vector<A> both = load(from + c) + load(to + c);
      if (of_edge) both += load(of_edge + c);
      sum += leaky<A>(both, slope) * load(of_att + c);
    }
    A out = add_lanes<A>(sum);
    for (; c < channels; ++c) {
      const A both = widen(from[c]) + to[c] + (of_edge ? widen(of_edge[c]) : A{0});
      out += (both > 0 ? both : both * slope) * of_att[c];
    }
    return out;
  }
};

struct Gatv2Input {
  Gatv2Input(const CsrEdges& edges, const Tensor& x_src, const Tensor& x_dst, const Tensor& given,
             const MaybeTensor& x_edge)
      : src(with_rows(x_src, "x_src")), dst(with_rows(x_dst, "x_dst")) {
    check(src.dim() == 3, "x_src must be of shape [num_src, heads, channels]");
    check_heads(dst, src, edges.rows, "x_dst");
    att = dense(given, accumulator_type(src.scalar_type()), src.size(1) * src.size(2), "att");
    has_edge = x_edge.has_value();
    if (has_edge) {
      edge = with_rows(*x_edge, "x_edge");
      check_heads(edge, src, edges.edges, "x_edge");
    }
  }

  template <typename T>
  Gatv2Rows<T> rows(double slope) const {
    using A = AccumulatorOf<T>;
    return {rows_of<T>(src), rows_of<T>(dst), has_edge ? rows_of<T>(edge) : Rows<T>{},
            const_data_of<A>(att), static_cast<A>(slope)};
  }

  Tensor src, dst, att, edge;
  bool has_edge;
};

}  // namespace pyg_scale
