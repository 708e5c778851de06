// The sum of rows by destination, for rows of any form.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "csr_edges.h"
#include "edge_weights.h"

namespace pyg_scale {

// `T` is the type of the numbers, `Source` the rows: x[place] is one of them.
template <typename T, typename Source>
struct Sum {
  using A = AccumulatorOf<T>;
  const CsrEdges& edges;
  Source x;
  const A* weight;  // [edges, heads] by id, or null
  int64_t heads;
  bool mean;
  int64_t ahead;  // how many edges before it is needed a row is asked for

  A factor(int64_t row) const {
    const int64_t degree = edges.indptr[row + 1] - edges.indptr[row];
    return mean && degree ? A{1} / static_cast<A>(degree) : A{1};
  }

  PYG_SCALE_INLINE void look_ahead(int64_t e, int64_t limit) const {
    const int64_t coming = e + ahead;
    if (coming >= limit) return;
    x.prefetch(edges.indices[coming]);
    if (edges.edge_id.data && weight) __builtin_prefetch(weight + edges.edge_id[coming] * heads);
  }

  // kCount vectors of columns from `column` on, held in registers; one weight for an edge.
  template <int kCount, bool kWeighted>
  PYG_SCALE_INLINE void columns(int64_t begin, int64_t end, int64_t limit, int64_t column,
                                A* out) const {
    Vector<A> sum[kCount] = {};
    for (int64_t e = begin; e < end; ++e) {
      if (const int64_t coming = e + ahead; coming < limit) {
        x.prefetch(edges.indices[coming], column, kCount * kLanes<A>);
      }
      const auto from = x[edges.indices[e]];
      if constexpr (kWeighted) {
        const A w = weight[edges.id(e)];
#pragma GCC unroll 8
        for (int k = 0; k < kCount; ++k) sum[k] += vector_of(from, column + k * kLanes<A>) * w;
      } else {
#pragma GCC unroll 8
        for (int k = 0; k < kCount; ++k) sum[k] += vector_of(from, column + k * kLanes<A>);
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < kCount; ++k) keep<A>(out + column + k * kLanes<A>, sum[k]);
  }

  // Fewer columns than a vector has.
  PYG_SCALE_INLINE void few_columns(int64_t begin, int64_t end, int64_t limit, A* out) const {
    A sum[kLanes<A>] = {};
    for (int64_t e = begin; e < end; ++e) {
      look_ahead(e, limit);
      const auto from = x[edges.indices[e]];
      const A w = weight ? weight[edges.id(e)] : A{1};
      for (int64_t c = 0; c < x.size; ++c) sum[c] += number_of(from, c) * w;
    }
    for (int64_t c = 0; c < x.size; ++c) out[c] = sum[c];
  }

  // All columns, 8, 4, 2 or 1 vectors at a time; the last ones may be computed twice.
  template <bool kWeighted>
  PYG_SCALE_INLINE void all_columns(int64_t begin, int64_t end, int64_t limit, A* out) const {
    constexpr int64_t kWidth = kLanes<A>;
    for (int64_t c = 0; c < x.size;) {
      int64_t left = x.size - c;
      int64_t width = 8 * kWidth;
      while (width > kWidth && width / 2 >= left) width /= 2;
      while (width > x.size) width /= 2;
      if (left < width) c = x.size - width;
      switch (width / kWidth) {
        case 8: columns<8, kWeighted>(begin, end, limit, c, out); break;
        case 4: columns<4, kWeighted>(begin, end, limit, c, out); break;
        case 2: columns<2, kWeighted>(begin, end, limit, c, out); break;
        default: columns<1, kWeighted>(begin, end, limit, c, out); break;
      }
      c += width;
    }
  }

  // out += w * from in columns [begin, end).
  template <typename Row>
  PYG_SCALE_INLINE static void add_scaled_part(A* out, const Row& from, A w, int64_t begin,
                                               int64_t end) {
    int64_t c = begin;
    for (; c + kLanes<A> <= end; c += kLanes<A>) {
      keep<A>(out + c, load(out + c) + vector_of(from, c) * w);
    }
    for (; c < end; ++c) out[c] += number_of(from, c) * w;
  }

  PYG_SCALE_INLINE void by_head(int64_t begin, int64_t end, int64_t limit, A* out) const {
    const int64_t channels = x.size / heads;
    std::fill_n(out, x.size, A{0});
    for (int64_t e = begin; e < end; ++e) {
      look_ahead(e, limit);
      const auto from = x[edges.indices[e]];
      const A* w = weight + edges.id(e) * heads;
      for (int64_t h = 0; h < heads; ++h) {
        add_scaled_part(out, from, w[h], h * channels, (h + 1) * channels);
      }
    }
  }

  // Writes the sum over edges [begin, end) to `out`. Rows of edges below `limit` may be prefetched.
  PYG_SCALE_INLINE void row(int64_t begin, int64_t end, int64_t limit, A* out) const {
    if (weight && heads > 1) {
      by_head(begin, end, limit, out);
    } else if (x.size < kLanes<A>) {
      few_columns(begin, end, limit, out);
    } else if (weight) {
      all_columns<true>(begin, end, limit, out);
    } else {
      all_columns<false>(begin, end, limit, out);
    }
  }
};

template <typename T, typename Source>
struct SumRows {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const Sum<T, Source>* sum, const RowTasks* tasks, int64_t first,
                                   int64_t last, A* scratch, T* out) const {
    const int64_t *indptr = sum->edges.indptr, limit = indptr[last], size = sum->x.size;
    for (int64_t row = first; row < last; ++row) {
      if (tasks->is_long(row)) continue;
      T* to = out + row * size;
      if constexpr (std::is_same_v<T, A>) {
        sum->row(indptr[row], indptr[row + 1], limit, to);
        if (sum->mean) store_row(to, to, sum->factor(row), size);
      } else {
        sum->row(indptr[row], indptr[row + 1], limit, scratch);
        store_row(to, scratch, sum->factor(row), size);
      }
    }
  }
};

template <typename T, typename Source>
struct SumPiece {
  using A = AccumulatorOf<T>;
  PYG_SCALE_INLINE void operator()(const Sum<T, Source>* sum, const Piece* piece, A* out) const {
    sum->row(piece->begin, piece->end, piece->end, out);
  }
};

// Writes the sums to `out` [edges.rows, x.size].
template <typename T, typename Source>
void sum_rows(const CsrEdges& edges, const Source& x, const EdgeWeights& weights, bool mean,
              Tensor& out) {
  using A = AccumulatorOf<T>;
  using Op = Sum<T, Source>;
  const int64_t size = x.size;
  const RowTasks tasks(edges.indptr, edges.rows, edges.edges, size);
  const Op sum{edges, x, weights.data<A>(), weights.heads, mean, x.ahead()};
  T* to = data_of<T>(out);
  std::vector<A> partial(tasks.pieces.size() * static_cast<size_t>(size));
  const auto rows = [&](int64_t, int64_t first, int64_t last) {
    x.check_range(edges, edges.indptr[first], edges.indptr[last]);
    std::vector<A> scratch(static_cast<size_t>(std::is_same_v<T, A> ? 0 : size));
    dispatch(SumRows<T, Source>{}, &sum, &tasks, first, last, scratch.data(), to);
  };
  const auto piece = [&](int64_t i, const Piece& which) {
    x.check_range(edges, which.begin, which.end);
    dispatch(SumPiece<T, Source>{}, &sum, &which, partial.data() + i * size);
  };
  const auto merge = [&](const LongRow& row) {
    A* total = partial.data() + row.first * size;
    for (int64_t i = row.first + 1; i < row.last; ++i) add(total, partial.data() + i * size, size);
    store_row(to + row.row * size, total, sum.factor(row.row), size);
  };
  if (size) run_tasks(tasks, rows, piece, merge);
}

}  // namespace pyg_scale
