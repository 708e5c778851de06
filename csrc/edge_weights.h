// Weights of edges as aggregations are handed them, see pyg_scale/ops/aggregate.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "csr_edges.h"

namespace pyg_scale {

// A matrix, or a copy of it, with contiguous rows.
inline Tensor matrix(const Tensor& x, const char* name) {
  check(x.dim() == 2, std::string(name) + " must be a matrix");
  return with_rows(x, name);
}

// [edges, heads] by edge id, for rows of a type whose columns the heads share; or none.
struct EdgeWeights {
  EdgeWeights(const MaybeTensor& weight, const CsrEdges& edges, ScalarType dtype, int64_t columns)
      : given(weight.has_value()) {
    if (!given) return;
    heads = weight->dim() == 2 ? weight->size(1) : 0;
    check(heads > 0 && columns % heads == 0, "weight must have a column for each head");
    numbers = dense(*weight, accumulator_type(dtype), edges.edges * heads, "weight");
  }

  template <typename A>
  const A* data() const {
    return given ? const_data_of<A>(numbers) : nullptr;
  }

  bool given;
  int64_t heads = 1;

 private:
  Tensor numbers;
};

}  // namespace pyg_scale
