// csr_sum: rows of features added up by destination, see pyg_scale/ops/aggregate.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "aggregate_sum.h"

namespace pyg_scale {
namespace {

Tensor csr_sum(Tensor indptr, Tensor indices, MaybeTensor edge_id, MaybeTensor, MaybeTensor,
               MaybeTensor, Tensor x, MaybeTensor weight, bool mean) {
  const CsrEdges edges(indptr, indices, edge_id);
  x = matrix(x, "x");
  const EdgeWeights weights(weight, edges, x.scalar_type(), x.size(1));
  Tensor out = pool_empty({edges.rows, x.size(1)}, x.scalar_type());
  visit(x.scalar_type(), "x", [&](auto one) {
    using T = decltype(one);
    sum_rows<T>(edges, rows_of<T>(x), weights, mean, out);
  });
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "csr_sum(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor? t_indptr, "
      "Tensor? t_indices, Tensor? t_position, Tensor x, Tensor? weight, bool mean) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) { m.impl("csr_sum", TORCH_BOX(&pyg_scale::csr_sum)); }
