// edge_formula_compiled: a formula of numbers computed for every edge and reduced at its
// destination, see pyg_scale/ops/edge_formula.py.
//
// The code of a formula is generated (pyg_scale/ops/edge_formula_source.py): a struct F that loads
// the rows of a destination (Own) and of an edge (Edge), runs the steps on a number of each, and
// keeps what is wanted for every edge. A group of lanes has a unit (rows.cuh), each lane kCount
// columns of a tile. Rows of several edges are under way before the first step.
//
// Modules are compiled without contracted multiply-adds: the gradient of an extreme computes each
// number again, in another kernel, and asks which one it was.
#pragma once

#include "edge_formula.h"
#include "kernels.cuh"
#include "rows.cuh"

namespace pyg_scale::cuda {

// Steps ######################################################################################

template <typename A>
PYG_SCALE_DEVICE A larger(A a, A b) {  // of which one is NaN: NaN
  return a > b || a != a ? a : b;
}
template <typename A>
PYG_SCALE_DEVICE A smaller(A a, A b) {
  return a < b || a != a ? a : b;
}
template <typename A>
PYG_SCALE_DEVICE A sign_of(A a) {
  return a > A{0} ? A{1} : (a < A{0} ? A{-1} : A{0});
}
PYG_SCALE_DEVICE float absolute(float a) { return ::fabsf(a); }
PYG_SCALE_DEVICE double absolute(double a) { return ::fabs(a); }
PYG_SCALE_DEVICE float root(float a) { return ::sqrtf(a); }
PYG_SCALE_DEVICE double root(double a) { return ::sqrt(a); }
PYG_SCALE_DEVICE float hyperbolic_tangent(float a) { return ::tanhf(a); }
PYG_SCALE_DEVICE double hyperbolic_tangent(double a) { return ::tanh(a); }
PYG_SCALE_DEVICE float log_of_one_and(float a) { return ::log1pf(a); }
PYG_SCALE_DEVICE double log_of_one_and(double a) { return ::log1p(a); }

template <typename A>
PYG_SCALE_DEVICE A sigmoid(A a) {
  return A{1} / (A{1} + exponential(-a));
}
template <typename A>
PYG_SCALE_DEVICE A softplus(A a) {  // from 20 on as in torch
  return a > A{20} ? a : (a > A{0} ? a : A{0}) + log_of_one_and(exponential(-absolute(a)));
}

// A number of an instruction.
template <typename A>
PYG_SCALE_DEVICE A number(const EdgeFormula& args, int k);
template <>
PYG_SCALE_DEVICE float number<float>(const EdgeFormula& args, int k) {
  return args.numbers[k];
}
template <>
PYG_SCALE_DEVICE double number<double>(const EdgeFormula& args, int k) {
  return args.wide_numbers[k];
}

// Rows #######################################################################################

// kCount places of a row, from `place` on. Each number of a row is that of kEach places.
template <int kCount, int kEach, typename T>
PYG_SCALE_DEVICE Pack<T, kCount> places(const Matrix& matrix, int64_t row, int64_t place) {
  const T* from = static_cast<const T*>(matrix.data) + row * matrix.stride;
  Pack<T, kCount> out;
  if constexpr (kEach == 1) {
    out = load<kCount>(from + place);
  } else if constexpr (kEach % kCount == 0) {
    const T value = load<1>(from + place / kEach).values[0];
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.values[i] = value;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out.values[i] = load<1>(from + (place + i) / kEach).values[0];
    }
  }
  return out;
}

// The columns of a lane, [first, first + kCount) if it has any, else it reads the first ones.
struct Columns {
  int64_t tile, first, column;
  bool has;

  PYG_SCALE_DEVICE Columns(const EdgeFormula& args, int64_t tile, int64_t width, int64_t place)
      : tile(tile), first(tile * args.tile + place), has(place < args.tile && first < width) {
    column = has ? first : 0;
  }
};

// Keeps all places of an edge.
template <int kWidth, typename T, int kCount>
PYG_SCALE_DEVICE void keep_places(void* to, int64_t id, const Columns& mine, bool there,
                                  const T (&values)[kCount]) {
  if (!there || !mine.has) return;
  Pack<T, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.values[i] = values[i];
  *reinterpret_cast<Pack<T, kCount>*>(static_cast<T*>(to) + id * kWidth + mine.first) = pack;
}

// Keeps for an edge the sums of kEach places each, which are those of neighbouring lanes.
template <int kWidth, int kEach, typename T, int kCount>
PYG_SCALE_DEVICE void keep_sums(const EdgeFormula& args, const Lanes& group, void* kept, int64_t id,
                                const Columns& mine, bool there, const T (&values)[kCount]) {
  // Of other widths kernels are compiled, but not launched (edge_formula_launch.cpp).
  constexpr int kLanes = kEach / kCount > 0 ? kEach / kCount : 1;
  T sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += mine.has ? values[i] : T{0};
  T* to = static_cast<T*>(kept) + id * (kWidth / kEach);
  if (!args.serial) {  // a tile has all lanes of its sums
    const int place = group.lane % kLanes;
#pragma unroll
    for (int step = 1; step < kLanes && step < kWarp; step *= 2) {
      const T other = __shfl_down_sync(kAllLanes, sum, step);
      if (place + step < kLanes) sum += other;
    }
    if (there && mine.has && place == 0) to[mine.first / kEach] = sum;
    return;
  }
  // What a tile adds to a sum follows on what the same lane has written for the tile before.
  const int64_t begin = mine.tile * args.tile;
  const int64_t end = begin + args.tile < kWidth ? begin + args.tile : kWidth;
  for (int64_t at = begin / kEach; at * kEach < end; ++at) {
    T part[1] = {mine.has && mine.first / kEach == at ? sum : T{0}};
    group.sum(part);
    if (there && group.lane == 0) to[at] = at * kEach < begin ? to[at] + part[0] : part[0];
  }
}

// Kernels ####################################################################################

// Edges that are read at a time, if each takes so many registers.
PYG_SCALE_BOTH constexpr int rows_ahead(int registers) {
  return registers <= 16 ? 4 : registers <= 32 ? 2 : 1;
}

template <typename F, typename A>
PYG_SCALE_DEVICE A reduced(A total, A value) {
  if constexpr (F::kReduce == 0) return total + value;
  if constexpr (F::kReduce == 1) return larger(value, total);
  return smaller(value, total);
}

template <typename F, int kCount>
PYG_SCALE_DEVICE void formula_tile(const EdgeFormula& args, const Lanes& group, const Work& work,
                                   const Columns& mine) {
  using A = typename F::Number;
  constexpr int kAhead = rows_ahead(F::kPacks * kCount * static_cast<int>(sizeof(A)) / 4);
  const Graph& graph = args.graph;
  const Unit& unit = work.unit;
  typename F::template Own<kCount> own;
  own.read(args, unit.row, mine.column);
  A total[F::kReduced > 0 ? F::kReduced : 1][kCount];
#pragma unroll
  for (int r = 0; r < F::kReduced; ++r) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const A least = minus_infinity<A>();
      total[r][i] = F::kReduce == 0 ? A{0} : (F::kReduce == 1 ? least : -least);
    }
  }
  const int64_t bound = F::kCollective ? work.longest : unit.end - unit.begin;
  for (int64_t done = 0; done < bound; done += kAhead) {
    const int64_t at = unit.begin + done;
    int64_t source[kAhead] = {}, id[kAhead] = {};
    if (F::kReadsSources) sources(graph, at, unit.end, source);
    if (F::kReadsIds) edge_ids(graph, at, unit.end, id);
    // Edges beyond the end have row 0, which nobody uses: loads without a condition go together.
    typename F::template Edge<kCount> edge[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) edge[k].read(args, source[k], id[k], mine.column);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const bool there = at + k < unit.end;
      if (!F::kCollective && !there) continue;
      A values[F::kOuts][kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) F::run(args, own, edge[k], i, values);
#pragma unroll
      for (int r = 0; r < F::kReduced; ++r) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const A next = reduced<F>(total[r][i], values[r][i]);
          total[r][i] = there ? next : total[r][i];
        }
      }
      F::keep(args, group, id[k], mine, there, values);
    }
  }
  if (!work.any || !mine.has) return;
#pragma unroll
  for (int r = 0; r < F::kReduced; ++r) {
    Pack<A, kCount> pack;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      pack.values[i] = unit.begin < unit.end ? total[r][i] : A{0};
    }
    A* to = unit.slot < 0
                ? static_cast<A*>(args.out[r]) + unit.row * F::kWidth
                : static_cast<A*>(args.partial) + (unit.slot * F::kReduced + r) * F::kWidth;
    *reinterpret_cast<Pack<A, kCount>*>(to + mine.first) = pack;
  }
}

template <typename F, int kCount>
PYG_SCALE_DEVICE void formula_kernel(const EdgeFormula& args, int lanes) {
  const Lanes group(lanes);
  const Work work(args.graph, group.group());
  if (!F::kCollective && !work.any) return;
  for (int64_t tile = blockIdx.y; tile < args.tiles; tile += gridDim.y) {
    formula_tile<F, kCount>(args, group, work, Columns(args, tile, F::kWidth, group.lane * kCount));
  }
}

// Long rows: a thread reduces a column of a row's pieces, in their order.
template <typename F>
PYG_SCALE_DEVICE void formula_fold_kernel(const EdgeFormula& args, int lanes) {
  using A = typename F::Number;
  constexpr int64_t kSize = static_cast<int64_t>(F::kReduced) * F::kWidth;
  const Lanes group(lanes);
  const int64_t chunk = group.group();
  const int64_t column = static_cast<int64_t>(blockIdx.y) * lanes + group.lane;
  Slots slots;
  if (chunk >= args.graph.num_chunks() || column >= kSize) return;
  if (!slots_of(args.graph, chunk, slots)) return;
  const A* partial = static_cast<const A*>(args.partial) + column;
  A total = partial[slots.first * kSize];
  for (int64_t slot = slots.second; slot <= slots.last; slot += 2) {
    total = reduced<F>(total, partial[slot * kSize]);
  }
  A* out = static_cast<A*>(args.out[column / F::kWidth]);
  out[slots.row.row * F::kWidth + column % F::kWidth] = total;
}

}  // namespace pyg_scale::cuda

// The kernels of a formula, for loads of so many bytes.
#define PYG_SCALE_FORMULA_OF(name, F, bytes)                                                  \
  PYG_SCALE_KERNEL(name##_##bytes, EdgeFormula, formula_kernel<F, bytes / sizeof(F::Number)>) \
  PYG_SCALE_KERNEL(name##_fold_##bytes, EdgeFormula, formula_fold_kernel<F>)
#define PYG_SCALE_FORMULA(name, F, bytes) PYG_SCALE_FORMULA_OF(name, F, bytes)
