// csr_sum, csr_extreme, csr_extreme_grad and csr_weight_grad on a device, see
// pyg_scale/ops/aggregate_rules.py.

#include <tuple>
#include <utility>

#include "tensors.h"

namespace pyg_scale::cuda {
namespace {

// Weights of edges, [num_edges, heads].
struct Weights {
  Weights(const OnDevice& device, const MaybeTensor& given, const Tensor& x, int64_t num_edges,
          int64_t size) {
    if (!given) return;
    check(given->dim() == 2 && given->size(1) > 0 && size % given->size(1) == 0,
          "weight must have a column for each head");
    heads = given->size(1);
    tensor = dense(device, *given, accumulator_type(x), num_edges * heads, "weight");
    data = data_of(std::as_const(tensor));
  }
  Tensor tensor;
  int64_t heads = 1;
  const void* data = nullptr;
};

Tensor csr_sum(Tensor indptr, Tensor indices, MaybeTensor edge_id, MaybeTensor, MaybeTensor,
               MaybeTensor, Tensor x, MaybeTensor weight, bool mean) {
  const OnDevice device(x);
  check(x.dim() == 2, "x must be a matrix");
  const Rows rows(device, x, "x");
  const Edges edges(device, indptr, indices, edge_id, rows.count, rows.size);
  const Weights weights(device, weight, x, edges.graph.num_edges, rows.size);
  Tensor out = empty_like(x, {edges.graph.num_rows, rows.size}, x.scalar_type());
  Tensor partial = empty_like(x, {edges.graph.num_slots() * rows.size}, accumulator_type(x));
  const Sum args{edges.graph, rows.matrix, weights.data, weights.heads,
                 rows.size,   mean,        data_of(out), data_of(partial)};
  device.done(pyg_scale_cuda_sum(&args, static_cast<int32_t>(type_of(x, "x")), device.stream()),
              "csr_sum");
  return out;
}

std::tuple<Tensor, Tensor> csr_extreme(Tensor indptr, Tensor indices, MaybeTensor edge_id,
                                       MaybeTensor, MaybeTensor, MaybeTensor, Tensor x,
                                       MaybeTensor weight, bool minimum) {
  const OnDevice device(x);
  check(x.dim() == 2, "x must be a matrix");
  const Rows rows(device, x, "x");
  const Edges edges(device, indptr, indices, edge_id, rows.count, rows.size);
  const Graph& graph = edges.graph;
  const Weights weights(device, weight, x, graph.num_edges, rows.size);
  Tensor out = empty_like(x, {graph.num_rows, rows.size}, x.scalar_type());
  Tensor arg = empty_like(x, {graph.num_rows, rows.size}, ScalarType::Int);
  Tensor partial = empty_like(x, {graph.num_slots() * rows.size}, accumulator_type(x));
  Tensor partial_arg = empty_like(x, {graph.num_slots() * rows.size}, ScalarType::Int);
  const Extreme args{graph,
                     rows.matrix,
                     weights.data,
                     weights.heads,
                     rows.size,
                     minimum,
                     data_of(out),
                     data_of<int32_t>(arg),
                     data_of(partial),
                     data_of<int32_t>(partial_arg)};
  device.done(pyg_scale_cuda_extreme(&args, static_cast<int32_t>(type_of(x, "x")), device.stream()),
              "csr_extreme");
  return {out, arg};
}

Tensor csr_extreme_grad(Tensor t_indptr, Tensor t_indices, Tensor t_position, Tensor indptr,
                        MaybeTensor edge_id, Tensor arg, Tensor grad, MaybeTensor weight) {
  const OnDevice device(grad);
  check(grad.dim() == 2, "grad must be a matrix");
  const Rows rows(device, grad, "grad");
  const Edges edges(device, t_indptr, t_indices, t_position, rows.count, rows.size);
  const Graph& graph = edges.graph;
  const Weights weights(device, weight, grad, graph.num_edges, rows.size);
  const Tensor chosen = dense(device, arg, ScalarType::Int, rows.count * rows.size, "arg");
  const Tensor pointers = integers(device, indptr, rows.count + 1, "indptr");
  check(pointers.scalar_type() == ScalarType::Long, "indptr must be int64");
  Column ids{nullptr, false};
  Tensor kept;
  if (edge_id) {
    kept = integers(device, *edge_id, graph.num_edges, "edge_id");
    ids = column_of(kept);
  }
  Tensor out = empty_like(grad, {graph.num_rows, rows.size}, grad.scalar_type());
  Tensor partial = empty_like(grad, {graph.num_slots() * rows.size}, accumulator_type(grad));
  const ExtremeGrad args{graph,
                         data_of<int64_t>(pointers),
                         ids,
                         rows.matrix,
                         data_of<int32_t>(chosen),
                         weights.data,
                         weights.heads,
                         rows.size,
                         data_of(out),
                         data_of(partial)};
  device.done(pyg_scale_cuda_extreme_grad(&args, static_cast<int32_t>(type_of(grad, "grad")),
                                          device.stream()),
              "csr_extreme_grad");
  return out;
}

Tensor csr_weight_grad(Tensor indptr, Tensor indices, MaybeTensor edge_id, Tensor x, Tensor grad,
                       MaybeTensor arg, int64_t heads, bool mean) {
  const OnDevice device(x);
  check(x.dim() == 2 && grad.dim() == 2, "x and grad must be matrices");
  const Rows rows(device, x, "x"), of_rows(device, grad, "grad");
  const Edges edges(device, indptr, indices, edge_id, rows.count, rows.size);
  const Graph& graph = edges.graph;
  check(of_rows.size == rows.size && of_rows.count == graph.num_rows &&
            grad.scalar_type() == x.scalar_type(),
        "grad must be a matrix like x, with one row per destination");
  check(heads > 0 && rows.size % heads == 0, "the columns of x must be shared by the heads");
  Tensor chosen;
  if (arg) chosen = dense(device, *arg, ScalarType::Int, graph.num_rows * rows.size, "arg");
  Tensor out = empty_like(x, {graph.num_edges, heads}, accumulator_type(x));
  const WeightGrad args{
      graph, rows.matrix, of_rows.matrix, arg ? data_of<int32_t>(std::as_const(chosen)) : nullptr,
      heads, rows.size,   mean,           data_of(out)};
  device.done(
      pyg_scale_cuda_weight_grad(&args, static_cast<int32_t>(type_of(x, "x")), device.stream()),
      "csr_weight_grad");
  return out;
}

}  // namespace
}  // namespace pyg_scale::cuda

PYG_SCALE_DEVICE_LIBRARY(m) {
  m.impl("csr_sum", TORCH_BOX(&pyg_scale::cuda::csr_sum));
  m.impl("csr_extreme", TORCH_BOX(&pyg_scale::cuda::csr_extreme));
  m.impl("csr_extreme_grad", TORCH_BOX(&pyg_scale::cuda::csr_extreme_grad));
  m.impl("csr_weight_grad", TORCH_BOX(&pyg_scale::cuda::csr_weight_grad));
}
