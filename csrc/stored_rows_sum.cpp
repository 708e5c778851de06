// stored_rows_sum: rows of features added up by destination, as they are read
// from where a store holds them (the meaning is in pyg_scale/ops/stored_rows.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "aggregate_sum.h"
#include "stored_rows.h"

namespace pyg_scale {
namespace {

Tensor stored_sum(Tensor indptr, Tensor indices, MaybeTensor edge_id, Tensor rows, MaybeTensor rest,
                  MaybeTensor scale, MaybeTensor zero, ScalarType dtype, MaybeTensor weight,
                  bool mean) {
  const CsrEdges edges(indptr, indices, edge_id);
  const StoredArguments given(rows, rest, scale, zero, dtype);
  const int64_t columns = given.form.columns;
  const EdgeWeights weights(weight, edges, dtype, columns);
  Tensor out = pool_empty({edges.rows, columns}, dtype);
  given.visit([&](auto one, const auto& source) {
    sum_rows<decltype(one)>(edges, source, weights, mean, out);
  });
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "stored_sum(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor rows, Tensor? rest, "
      "Tensor? scale, Tensor? zero, ScalarType dtype, Tensor? weight, bool mean) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("stored_sum", TORCH_BOX(&pyg_scale::stored_sum));
}
