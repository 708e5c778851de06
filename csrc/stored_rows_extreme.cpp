// stored_rows_extreme: the largest or smallest entries of rows by destination, as they are read
// from where a store holds them (the meaning is in pyg_scale/ops/stored_rows.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "aggregate_extreme.h"
#include "stored_rows.h"

namespace pyg_scale {
namespace {

Tensor stored_extreme(Tensor indptr, Tensor indices, MaybeTensor edge_id, Tensor rows,
                      MaybeTensor rest, MaybeTensor scale, MaybeTensor zero, ScalarType dtype,
                      MaybeTensor weight, bool minimum) {
  const CsrEdges edges(indptr, indices, edge_id);
  const StoredArguments given(rows, rest, scale, zero, dtype);
  const int64_t columns = given.form.columns;
  const EdgeWeights weights(weight, edges, dtype, columns);
  Tensor out = pool_empty({edges.rows, columns}, dtype);
  Tensor arg = pool_empty({edges.rows, columns}, ScalarType::Int);
  given.visit([&](auto one, const auto& source) {
    extreme_rows<decltype(one)>(edges, source, weights, minimum, out, arg);
  });
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "stored_extreme(Tensor indptr, Tensor indices, Tensor? edge_id, Tensor rows, Tensor? rest, "
      "Tensor? scale, Tensor? zero, ScalarType dtype, Tensor? weight, bool minimum) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m) {
  m.impl("stored_extreme", TORCH_BOX(&pyg_scale::stored_extreme));
}
