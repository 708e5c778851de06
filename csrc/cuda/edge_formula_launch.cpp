// Launches the kernels of a formula, which are in a module of their own.

#include <numeric>

#include "edge_formula.h"
#include "launch.h"

namespace pyg_scale::cuda {
namespace {

// The numbers of the widest load that suits the rows of inputs that have all columns, and sums of
// places that are kept.
int64_t widest_of(const EdgeFormula& args, const FormulaShape& shape, Type type) {
  int64_t count = kLoadBytes / bytes_of(type);
  const auto suits = [&] {
    if (shape.width % count) return false;
    for (int k = 0; k < shape.inputs; ++k) {
      const bool whole = shape.columns[k] == shape.width;
      if (whole && !loads_of(count, args.inputs[k], type)) return false;
    }
    for (int k = 0; k < shape.kept; ++k) {
      const bool whole = shape.kept_columns[k] == shape.width;
      if (!whole && shape.width / shape.kept_columns[k] % count) return false;
    }
    return true;
  };
  while (!suits()) count /= 2;
  return count;
}

}  // namespace
}  // namespace pyg_scale::cuda

using namespace pyg_scale::cuda;

extern "C" int pyg_scale_cuda_edge_formula(const EdgeFormula* given, const FormulaShape* shape,
                                           int32_t type, Stream stream) {
  const Graph& graph = given->graph;
  if (graph.num_rows == 0 || shape->reduced + shape->kept == 0) return 0;
  const Type of = static_cast<Type>(type);
  EdgeFormula args = *given;
  const int64_t count = widest_of(args, *shape, of);
  const int lanes = lanes_for(shape->width / count);
  int64_t tile = lanes * count;  // columns
  args.serial = false;
  if (tile >= shape->width) {
    tile = shape->width;
  } else {  // a tile has whole sums, if one can
    int64_t unit = count;
    for (int k = 0; k < shape->kept; ++k) {
      const int64_t each = shape->width / shape->kept_columns[k];
      if (each > 1 && unit <= tile) unit = std::lcm(unit, each);
    }
    args.serial = unit > tile;
    if (!args.serial) tile = tile / unit * unit;
  }
  args.tile = tile;
  args.tiles = ceil_div(shape->width, tile);
  const std::string bytes = std::to_string(count * bytes_of(of)), name = shape->name;
  const Source source{shape->name, bytes.c_str()};
  const auto run = [&](const std::string& kernel, const Grid& grid) {
    return launch(stream, source, kernel + bytes, grid.blocks, grid.tiles, &args, grid.lanes);
  };
  const int code = run(name + "_", grid_of(graph.num_units(), lanes, args.serial ? 1 : args.tiles));
  if (code || shape->reduced == 0) return code;
  return run(name + "_fold_", over_loads(graph.num_chunks(), shape->reduced * shape->width));
}
