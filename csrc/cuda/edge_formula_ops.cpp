// edge_formula_compiled on a device, see pyg_scale/ops/edge_formula.py.

#include <algorithm>
#include <utility>

#include "edge_formula.h"
#include "tensors.h"

namespace pyg_scale::cuda {
namespace {

enum End : int64_t { kNeighbor, kOwn, kEdge };

std::vector<Tensor> edge_formula_compiled(Tensor indptr, Tensor indices, MaybeTensor edge_id,
                                          std::vector<Tensor> inputs, std::vector<int64_t> ends,
                                          std::string module, std::vector<double> numbers,
                                          int64_t width, int64_t reduced,
                                          std::vector<int64_t> kept) {
  check(!inputs.empty() && inputs.size() == ends.size() && inputs.size() <= kFormulaInputs,
        "inputs must be 1 to 16, and ends as many");
  check(numbers.size() <= kFormulaNumbers, "numbers must be 64 at most");
  check(reduced >= 0 && reduced <= kFormulaOuts && kept.size() <= kFormulaOuts,
        "at most 16 slots are reduced, and 16 kept");
  check(width > 0 && width <= (int64_t{1} << 24), "width must be from 1 to 2**24");
  const OnDevice device(inputs[0]);
  const ScalarType dtype = inputs[0].scalar_type();
  check(dtype == ScalarType::Float || dtype == ScalarType::Double,
        "inputs must be float32 or float64");
  EdgeFormula args{};
  FormulaShape shape{module.c_str(),
                     width,
                     static_cast<int32_t>(inputs.size()),
                     static_cast<int32_t>(reduced),
                     static_cast<int32_t>(kept.size()),
                     {},
                     {}};
  std::vector<Rows> rows;
  int64_t sources = -1;
  for (size_t k = 0; k < inputs.size(); ++k) {
    check(inputs[k].dim() == 2 && inputs[k].scalar_type() == dtype,
          "inputs must be matrices of one type");
    rows.emplace_back(device, inputs[k], "inputs");
    const Rows& made = rows.back();
    check(made.size > 0 && width % made.size == 0, "the columns of inputs must divide width");
    args.inputs[k] = made.matrix;
    shape.columns[k] = made.size;
    if (ends[k] == kNeighbor) sources = sources < 0 ? made.count : std::min(sources, made.count);
  }
  const Edges edges(device, indptr, indices, edge_id, std::max<int64_t>(sources, 0),
                    reduced * width);
  const Graph& graph = args.graph = edges.graph;
  for (size_t k = 0; k < inputs.size(); ++k) {
    check(ends[k] >= kNeighbor && ends[k] <= kEdge,
          "ends must be 0 (neighbor), 1 (own) or 2 (edge)");
    check(ends[k] == kNeighbor ||
              rows[k].count == (ends[k] == kOwn ? graph.num_rows : graph.num_edges),
          "inputs must have one row per destination (own) or per edge (edge)");
  }
  for (size_t k = 0; k < numbers.size(); ++k) {
    args.wide_numbers[k] = numbers[k];
    args.numbers[k] = static_cast<float>(numbers[k]);
  }
  std::vector<Tensor> out;
  for (int64_t k = 0; k < reduced; ++k) {
    out.push_back(empty_like(inputs[0], {graph.num_rows, width}, dtype));
    args.out[k] = data_of(out.back());
  }
  for (size_t k = 0; k < kept.size(); ++k) {
    check(kept[k] > 0 && width % kept[k] == 0, "the columns of kept slots must divide width");
    shape.kept_columns[k] = kept[k];
    out.push_back(empty_like(inputs[0], {graph.num_edges, kept[k]}, dtype));
    args.kept[k] = data_of(out.back());
  }
  Tensor partial = empty_like(inputs[0], {graph.num_slots() * reduced * width}, dtype);
  args.partial = data_of(partial);
  const auto type = static_cast<int32_t>(type_of(inputs[0], "inputs"));
  device.done(pyg_scale_cuda_edge_formula(&args, &shape, type, device.stream()), "edge_formula");
  return out;
}

}  // namespace
}  // namespace pyg_scale::cuda

PYG_SCALE_DEVICE_LIBRARY(m) {
  m.impl("edge_formula_compiled", TORCH_BOX(&pyg_scale::cuda::edge_formula_compiled));
}
