// The rows of a graph as tasks of about equal work.
//
// Where a task ends depends on the graph only, so results do not depend on the number of threads.
// Rows with many edges are cut into pieces of a fixed size, whose results are merged in order.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "graph_view.h"

namespace pyg_scale {

constexpr int64_t kPieceEdges = 2048;   // a row with more is cut
constexpr int64_t kRowCost = 4;         // the cost of a row beside its edges, in edges
constexpr int64_t kTaskWork = 1 << 16;  // multiply-adds; a parallel region costs as much
constexpr int64_t kMostTasks = 256;

struct Piece {
  int64_t row, begin, end;  // edges
};

struct LongRow {
  int64_t row, first, last;  // its pieces
};

struct RowTasks {
  // `width` is the number of multiply-adds an edge takes. Checks that the pointers rise.
  RowTasks(const int64_t* indptr, int64_t num_rows, int64_t num_edges, int64_t width)
      : indptr(indptr) {
    check(indptr[0] == 0 && indptr[num_rows] == num_edges,
          "indptr must go from 0 to the number of edges, " + std::to_string(num_edges));
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t begin = indptr[row], end = indptr[row + 1];
      if (begin > end) [[unlikely]] {
        fail("indptr goes down after row " + std::to_string(row));
      }
      if (end > num_edges) [[unlikely]] {  // before pieces beyond the edges are listed
        fail("indptr[" + std::to_string(row + 1) + "] is " + std::to_string(end) +
             ", but there are only " + std::to_string(num_edges) + " edges");
      }
      if (end - begin <= kPieceEdges) [[likely]]
        continue;
      const auto first = static_cast<int64_t>(pieces.size());
      for (int64_t at = begin; at < end; at += kPieceEdges) {
        pieces.push_back({row, at, std::min(end, at + kPieceEdges)});
      }
      long_rows.push_back({row, first, static_cast<int64_t>(pieces.size())});
    }
    const int64_t cost = num_edges + num_rows * kRowCost;
    work = cost * std::clamp<int64_t>(width, 1, kTaskWork);
    const int64_t count = std::clamp<int64_t>(work / kTaskWork, 1, kMostTasks);
    bounds.push_back(0);
    for (int64_t task = 1; task < count; ++task) {
      const int64_t wanted = cost / count * task + cost % count * task / count;
      int64_t low = bounds.back(), high = num_rows;
      while (low < high) {
        const int64_t mid = low + (high - low) / 2;
        if (indptr[mid] + mid * kRowCost < wanted) {
          low = mid + 1;
        } else {
          high = mid;
        }
      }
      bounds.push_back(low);
    }
    bounds.push_back(num_rows);
  }

  int64_t num_ranges() const { return static_cast<int64_t>(bounds.size()) - 1; }
  bool is_long(int64_t row) const { return indptr[row + 1] - indptr[row] > kPieceEdges; }

  const int64_t* indptr;
  int64_t work = 0;
  std::vector<int64_t> bounds;  // of ranges of rows; long rows among them are left out
  std::vector<Piece> pieces;
  std::vector<LongRow> long_rows;
};

// Calls f(0), ..., f(count - 1); each thread takes the next one when it is done. Of several
// exceptions, that of the first task is thrown on.
template <typename F>
void take_turns(int64_t count, bool parallel, const F& f) {
  const int64_t threads = parallel ? std::min<int64_t>(count, torch::stable::get_num_threads()) : 1;
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  std::vector<std::exception_ptr> errors(static_cast<size_t>(count));
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1)) < count;) {
      try {
        f(i);
      } catch (...) {
        errors[static_cast<size_t>(i)] = std::current_exception();
      }
    }
  });
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Calls rows(i, first, last) for the ranges of rows, and piece(i, piece) for the pieces, all side
// by side; `rows` must leave out long rows. After them, calls merge(long row) for every long row.
template <typename Rows, typename PieceOf, typename Merge>
void run_tasks(const RowTasks& tasks, const Rows& rows, const PieceOf& piece, const Merge& merge) {
  const int64_t ranges = tasks.num_ranges(), pieces = static_cast<int64_t>(tasks.pieces.size());
  const bool parallel = tasks.work > kTaskWork;
  // Pieces first: they are the largest tasks.
  take_turns(pieces + ranges, parallel, [&](int64_t i) {
    if (i < pieces) {
      piece(i, tasks.pieces[static_cast<size_t>(i)]);
    } else {
      const auto range = static_cast<size_t>(i - pieces);
      rows(i - pieces, tasks.bounds[range], tasks.bounds[range + 1]);
    }
  });
  const auto num_long = static_cast<int64_t>(tasks.long_rows.size());
  take_turns(num_long, parallel && num_long > 1,
             [&](int64_t i) { merge(tasks.long_rows[static_cast<size_t>(i)]); });
}

// Refuses positions [begin, end) if one of them holds a number that is not in [0, size).
template <typename T>
void check_numbers(const T* data, int64_t stride, int64_t begin, int64_t end, int64_t size,
                   const char* name, const char* what) {
  using Unsigned = std::make_unsigned_t<T>;
  Unsigned largest = 0;
  if (stride == 1) {
    for (int64_t i = begin; i < end; ++i) {
      largest = std::max(largest, static_cast<Unsigned>(data[i]));
    }
  } else {
    for (int64_t i = begin; i < end; ++i) {
      largest = std::max(largest, static_cast<Unsigned>(data[i * stride]));
    }
  }
  const uint64_t limit = std::min(static_cast<uint64_t>(size),
                                  static_cast<uint64_t>(std::numeric_limits<T>::max()) + 1);
  if (begin == end || static_cast<uint64_t>(largest) < limit) return;
  for (int64_t i = begin; i < end; ++i) {
    const auto value = static_cast<int64_t>(data[i * stride]);
    if (value < 0 || value >= size) {
      fail(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value) +
           ", but there are only " + std::to_string(size) + " " + what);
    }
  }
}

inline void check_numbers(const IntColumn& column, int64_t begin, int64_t end, int64_t size,
                          const char* name, const char* what) {
  if (!column.data) return;
  column.wide ? check_numbers(static_cast<const int64_t*>(column.data), column.stride, begin, end,
                              size, name, what)
              : check_numbers(static_cast<const int32_t*>(column.data), column.stride, begin, end,
                              size, name, what);
}

}  // namespace pyg_scale
