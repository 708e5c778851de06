// The largest or smallest row entries by destination, for rows of any form.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "csr_edges.h"
#include "edge_weights.h"

namespace pyg_scale {

// `T` is the type of the numbers, `Source` the rows: x[place] is one of them.
template <typename T, typename Source>
struct Extreme {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges;
  Source x;
  const A* weight;  // [edges, heads] by id, or null
  int64_t heads;
  A sign;  // -1: the smallest

  // The best of edges [begin, end), and its distance from the row's first edge; -1 if there is
  // none. Of equal ones the first is kept, and so is the first NaN.
  PYG_SCALE_INLINE void row(int64_t row_begin, int64_t begin, int64_t end, int64_t limit, A* best,
                            int32_t* arg) const {
    const int64_t channels = x.size / heads, ahead = x.ahead();
    std::fill_n(best, x.size, -std::numeric_limits<A>::infinity());
    std::fill_n(arg, x.size, -1);
    for (int64_t e = begin; e < end; ++e) {
      if (e + ahead < limit) x.prefetch(edges.indices[e + ahead]);
      const auto from = x[edges.indices[e]];
      const A* w = weight ? weight + edges.id(e) * heads : nullptr;
      const auto here = static_cast<int32_t>(e - row_begin);
      for (int64_t h = 0; h < heads; ++h) {
        const A factor = (w ? w[h] : A{1}) * sign;
        const int64_t first = h * channels;
#pragma omp simd
        for (int64_t c = first; c < first + channels; ++c) {
          const A value = number_of(from, c) * factor;
          const bool better =
              (value > best[c]) | ((value != value) & (best[c] == best[c])) | (arg[c] < 0);
          best[c] = better ? value : best[c];
          arg[c] = better ? here : arg[c];
        }
      }
    }
  }

  PYG_SCALE_INLINE void store(T* to, const A* best, const int32_t* arg) const {
    for (int64_t c = 0; c < x.size; ++c) to[c] = static_cast<T>(arg[c] < 0 ? A{0} : best[c] * sign);
  }
};

template <typename T, typename Source>
struct ExtremeRows {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const Extreme<T, Source>* op, const RowTasks* tasks,
                                   int64_t first, int64_t last, A* best, T* out,
                                   int32_t* arg) const {
    const int64_t *indptr = op->edges.indptr, limit = indptr[last], size = op->x.size;
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      op->row(indptr[row], indptr[row], indptr[row + 1], limit, best, arg + row * size);
      op->store(out + row * size, best, arg + row * size);
    }
  }
};

template <typename T, typename Source>
struct ExtremePiece {
  PYG_SCALE_INLINE void operator()(const Extreme<T, Source>* op, const Piece* piece,
                                   AccumulatorOf<T>* best, int32_t* arg) const {
    op->row(op->edges.indptr[piece->row], piece->begin, piece->end, piece->end, best, arg);
  }
};

// Writes the entries to `out` and the edges that they come from to `arg`, [edges.rows, x.size].
template <typename T, typename Source>
void extreme_rows(const CsrEdges& edges, const Source& x, const EdgeWeights& weights, bool minimum,
                  Tensor& out, Tensor& arg) {
  using A = AccumulatorOf<T>;
  const int64_t size = x.size;
  const RowTasks tasks(edges.indptr, edges.rows, edges.edges, size);
  for (const LongRow& row : tasks.long_rows) {
    check(edges.indptr[row.row + 1] - edges.indptr[row.row] <= std::numeric_limits<int32_t>::max(),
          "a row has more than 2^31 - 1 edges");
  }
  const Extreme<T, Source> op{edges, x, weights.data<A>(), weights.heads, minimum ? A{-1} : A{1}};
  T* to = data_of<T>(out);
  int32_t* to_arg = data_of<int32_t>(arg);
  const size_t parts = tasks.pieces.size() * static_cast<size_t>(size);
  std::vector<A> best(parts);
  std::vector<int32_t> best_arg(parts);
  const auto rows = [&](int64_t, int64_t first, int64_t last) {
    x.check_range(edges, edges.indptr[first], edges.indptr[last]);
    std::vector<A> scratch(static_cast<size_t>(size));
    dispatch(ExtremeRows<T, Source>{}, &op, &tasks, first, last, scratch.data(), to, to_arg);
  };
  const auto piece = [&](int64_t i, const Piece& which) {
    x.check_range(edges, which.begin, which.end);
    dispatch(ExtremePiece<T, Source>{}, &op, &which, best.data() + i * size,
             best_arg.data() + i * size);
  };
  const auto merge = [&](const LongRow& row) {
    A* value = best.data() + row.first * size;
    int32_t* at = best_arg.data() + row.first * size;
    for (int64_t i = row.first + 1; i < row.last; ++i) {
      for (int64_t c = 0; c < size; ++c) {
        const A other = best[static_cast<size_t>(i * size + c)];
        if (other > value[c] || (other != other && value[c] == value[c])) {
          value[c] = other;
          at[c] = best_arg[static_cast<size_t>(i * size + c)];
        }
      }
    }
    std::copy_n(at, size, to_arg + row.row * size);
    op.store(to + row.row * size, value, at);
  };
  if (size) run_tasks(tasks, rows, piece, merge);
}

}  // namespace pyg_scale
