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
  const int64_t head = item % args.heads;
  const Work work(graph, item / args.heads);
  const Unit& unit = work.unit;
  const T* x = static_cast<const T*>(args.x.data) + head * channels;
  const T* grad =
      static_cast<const T*>(args.grad.data) + unit.row * args.grad.stride + head * channels;
  const int32_t* chosen = args.arg ? args.arg + unit.row * args.size + head * channels : nullptr;
  const int64_t degree = unit.row_end - unit.row_begin;
  const A factor = args.mean && degree ? A{1} / static_cast<A>(degree) : A{1};
  A* out = static_cast<A*>(args.out);
  for (int64_t done = 0; done < work.longest; done += kProductsAhead) {
    const int64_t first = unit.begin + done;
    A sums[kProductsAhead] = {};
    int64_t sent[kProductsAhead], id[kProductsAhead];
    sources(graph, first, unit.end, sent);
    edge_ids(graph, first, unit.end, id);
    // Edges beyond the end have row 0, which nobody uses: loads without a condition go together.
    const int64_t end = first < unit.end ? channels : 0;
    for (int64_t c = group.lane * kCount; c < end; c += lanes * kCount) {
      const auto left = load<kCount>(grad + c);
      Pack<T, kCount> right[kProductsAhead];
      int32_t best[kCount] = {};
      if (chosen) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) best[i] = chosen[c + i];
      }
#pragma unroll
      for (int k = 0; k < kProductsAhead; ++k) {
        right[k] = load<kCount>(x + sent[k] * args.x.stride + c);
      }
#pragma unroll
      for (int k = 0; k < kProductsAhead; ++k) {
        const int64_t here = first + k - unit.row_begin;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const A product = widen(left.values[i]) * widen(right[k].values[i]);
          sums[k] += !chosen || best[i] == here ? product : A{0};
        }
      }
    }
    group.sum(sums);
#pragma unroll
    for (int k = 0; k < kProductsAhead; ++k) {
      if (group.lane == 0 && first + k < unit.end) {
        out[id[k] * args.heads + head] = sums[k] * factor;
      }
    }
  }
}

}  // namespace pyg_scale::cuda
