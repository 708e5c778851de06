// What the host hands to the kernels of edge_formula_compiled, see abi.h.
#pragma once

#include "abi.h"

namespace pyg_scale::cuda {

// What depends on the formula alone is in the generated code of its kernel.
constexpr int kFormulaInputs = 16, kFormulaOuts = 16, kFormulaNumbers = 64;

struct EdgeFormula {
  Graph graph;
  Matrix inputs[kFormulaInputs];
  float numbers[kFormulaNumbers];        // of instructions,
  double wide_numbers[kFormulaNumbers];  // and the same for float64
  int64_t tile, tiles;                   // columns of a group of lanes, and how many such tiles
  bool serial;               // a group computes all tiles, as a sum of columns goes beyond one
  void* out[kFormulaOuts];   // [num_rows, width] each
  void* kept[kFormulaOuts];  // [num_edges, columns] each, by id
  void* partial;             // [num_slots, reduced slots, width]
};

// What the host knows of the formula. `name` is that of its module.
struct FormulaShape {
  const char* name;
  int64_t width;
  int32_t inputs, reduced, kept;
  int64_t columns[kFormulaInputs], kept_columns[kFormulaOuts];
};

}  // namespace pyg_scale::cuda

#if !defined(__CUDACC__)  // of the host
extern "C" {
int pyg_scale_cuda_edge_formula(const pyg_scale::cuda::EdgeFormula* args,
                                const pyg_scale::cuda::FormulaShape* shape, int32_t type,
                                pyg_scale::cuda::Stream stream);
}
#endif
