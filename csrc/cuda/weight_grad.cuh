// csr_weight_grad: for every edge and head the product of the gradient of its row and the features
// that it brings, see pyg_scale/ops/aggregate_rules.py.
//
// A group of lanes has a unit (rows.cuh) and a head, and adds up products of columns by shuffles.
#pragma once

#include "rows.cuh"

namespace pyg_scale::cuda {

constexpr int kProductsAhead = 4;

template <typename T, int kCount>
PYG_SCALE_DEVICE void weight_grad_kernel(const WeightGrad& args, int lanes) {
  using A = AccumulatorOf<T>;
  const Graph& graph = args.graph;
  const Lanes group(lanes);
  const int64_t item = group.group(), channels = args.size / args.heads;
  const int64_t index = item / args.heads, head = item % args.heads;
  Unit unit;
  // All lanes of a group go on or return together, as sums need every one of them.
  if (index >= graph.num_units() || !unit_of(graph, index, unit)) return;
  const T* x = static_cast<const T*>(args.x.data) + head * channels;
  const T* grad =
      static_cast<const T*>(args.grad.data) + unit.row * args.grad.stride + head * channels;
  const int32_t* chosen = args.arg ? args.arg + unit.row * args.size + head * channels : nullptr;
  const int64_t degree = unit.row_end - unit.row_begin;
  const A factor = args.mean ? A{1} / static_cast<A>(degree) : A{1};
  A* out = static_cast<A*>(args.out);
  for (int64_t first = unit.begin; first < unit.end; first += kProductsAhead) {
    A sums[kProductsAhead] = {};
    int64_t sent[kProductsAhead], id[kProductsAhead];
    sources(graph, first, unit.end, sent);
    edge_ids(graph, first, unit.end, id);
#pragma unroll
    for (int k = 0; k < kProductsAhead; ++k) {
      const int64_t e = first + k;
      if (e >= unit.end) continue;
      const T* from = x + sent[k] * args.x.stride;
      const int64_t here = e - unit.row_begin;
      for (int64_t c = group.lane * kCount; c < channels; c += lanes * kCount) {
        const auto left = load<kCount>(grad + c), right = load<kCount>(from + c);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const A product = widen(left.values[i]) * widen(right.values[i]);
          sums[k] += !chosen || chosen[c + i] == here ? product : A{0};
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kProductsAhead; ++k) {
      const A sum = group.sum(sums[k]);
      if (group.lane == 0 && first + k < unit.end) {
        out[id[k] * args.heads + head] = sum * factor;
      }
    }
  }
}

}  // namespace pyg_scale::cuda
