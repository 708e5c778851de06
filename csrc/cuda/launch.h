// Launching: what the kernels of a file are called, and their grids.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include "abi.h"
#include "driver.h"

namespace pyg_scale::cuda {

inline int64_t bytes_of(Type type) {
  return type == Type::kDouble ? 8 : type == Type::kFloat ? 4 : 2;
}
inline Type accumulator_of(Type type) { return type == Type::kDouble ? type : Type::kFloat; }
// The name of a type in device code, and at the end of kernels' names.
inline const char* name_of(Type type) {
  constexpr const char* kNames[] = {"float", "double", "Bfloat16", "Half"};
  return kNames[static_cast<int32_t>(type)];
}

// Whether rows can be read in loads of `count` numbers.
inline bool loads_of(int64_t count, const Matrix& matrix, Type type) {
  const auto bytes = static_cast<uintptr_t>(count * bytes_of(type));
  const bool aligned = reinterpret_cast<uintptr_t>(matrix.data) % bytes == 0;
  return !matrix.data || (aligned && matrix.stride % count == 0);
}

// The numbers of the widest load that suits rows of so many columns in every matrix.
inline int64_t widest(int64_t columns, Type type, std::initializer_list<Matrix> matrices) {
  int64_t count = kLoadBytes / bytes_of(type);
  const auto suits = [&](const Matrix& matrix) { return loads_of(count, matrix, type); };
  while (columns % count || !std::all_of(matrices.begin(), matrices.end(), suits)) count /= 2;
  return count;
}

// How many lanes share one head of `loads` loads: the least power of two, 32 at most.
inline int lanes_for(int64_t loads) {
  int lanes = 1;
  while (lanes < loads && lanes < kWarp) lanes *= 2;
  return lanes;
}

inline int64_t ceil_div(int64_t count, int64_t each) { return (count + each - 1) / each; }

// Blocks, and how many groups of lanes share a row.
struct Grid {
  int64_t blocks, tiles;
  int lanes;  // of a group
};

inline Grid grid_of(int64_t groups, int lanes, int64_t tiles = 1) {
  return {ceil_div(groups, kBlockThreads / lanes), tiles, lanes};
}

// A grid in which lanes share the loads of a row, each lane up to `held` of them. The fewest groups
// read the same indices; among those the fewest lanes are idle.
inline Grid over_loads(int64_t groups, int64_t loads, int64_t held = 1) {
  if (loads <= kWarp) return grid_of(groups, lanes_for(loads));
  const auto tiles = [&](int lanes) { return ceil_div(loads, lanes * held); };
  const auto slots = [&](int lanes) { return ceil_div(loads, lanes) * lanes; };
  int best = kWarp;
  for (int lanes = kWarp / 2; lanes >= 8; lanes /= 2) {
    if (tiles(lanes) <= tiles(best) && slots(lanes) < slots(best)) best = lanes;
  }
  return grid_of(groups, best, tiles(best));
}

// Kernels that run one after the other. After a failure, no more are launched.
class Launches {
 public:
  Launches(const char* file, Type type, const Stream& stream, int64_t count)
      : file_(file), type_(type), stream_(stream), count_(count) {}

  // A kernel of the file, for the type and the width of loads.
  template <typename Args>
  void over_widths(const std::string& kernel, const Grid& grid, const Args& args) {
    const std::string bytes = std::to_string(count_ * bytes_of(type_));
    run(file_, kernel, type_, std::string("_").append(bytes), grid, args);
  }
  // A kernel that has only one width.
  template <typename Args>
  void add(const std::string& kernel, const Grid& grid, const Args& args) {
    run(file_, kernel, type_, "", grid, args);
  }
  // Adds up the partial sums of a graph's long rows.
  void fold(Type type, const Graph& graph, int64_t size, void* out, void* partial) {
    const Sum args{graph, {}, nullptr, 1, size, false, out, partial};
    if (size) run("sum", "sum_fold", type, "", over_loads(graph.num_chunks(), size), args);
  }
  int64_t count() const { return count_; }  // numbers of a load
  int result() const { return result_; }

 private:
  template <typename Args>
  void run(const char* file, const std::string& kernel, Type type, const std::string& suffix,
           const Grid& grid, const Args& args) {
    if (result_) return;
    const char* name = name_of(type);
    result_ = launch(stream_, {file, name}, kernel + "_" + name + suffix, grid.blocks, grid.tiles,
                     &args, grid.lanes);
  }

  const char* file_;
  Type type_;
  Stream stream_;
  int64_t count_;
  int result_ = 0;
};

}  // namespace pyg_scale::cuda
