// gather_parts: rows of matrices whose rows lie in several parts, by index, into recycled memory.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "buffer.h"
#include "graph_view.h"
#include "parallel.h"
#include "parts.h"
#include "pool.h"
#include "prefetch.h"
#include "row_writer.h"

namespace pyg_scale {
namespace {

// The number of rows whose places are looked up before any of them is copied. If attributes took
// turns more often, they would push each other out of the caches.
constexpr int64_t kBlock = 32768;
constexpr int64_t kBookAhead = 64;       // rows whose places are asked for ahead
constexpr int64_t kTaskBytes = 1 << 18;  // less is not worth a thread

struct Part {
  const char* data;
  int64_t count;
};

// One attribute: its rows in every part, and where they go.
struct Matrix {
  std::vector<Part> parts;
  int64_t bytes;  // of a row
  char* out;
  bool past;  // whether they pass the caches
};

// A part and a row of it, in one word.
class Place {
 public:
  static constexpr int kRowBits = 48;

  Place() = default;
  Place(int64_t part, int64_t row) : word_(static_cast<uint64_t>(part) << kRowBits | row) {}

  const char* of(const Part* parts, int64_t bytes) const {
    const uint64_t row = word_ & ((uint64_t{1} << kRowBits) - 1);
    return parts[word_ >> kRowBits].data + row * static_cast<uint64_t>(bytes);
  }

 private:
  uint64_t word_;
};

// The places of the rows [begin, end) of an index; returns the first position that is no row, or
// -1. Rows up to `stop` come next.
int64_t look_up(const Places& book, const std::vector<Part>& sizes, const IntColumn& index,
                int64_t num_rows, int64_t begin, int64_t end, int64_t stop, Place* places) {
  const auto is_row = [&](int64_t v) {
    return static_cast<uint64_t>(v) < static_cast<uint64_t>(num_rows);
  };
  for (int64_t i = begin; i < end; ++i) {
    if (i + kBookAhead < stop && is_row(index[i + kBookAhead])) {
      book.prefetch(index[i + kBookAhead]);
    }
    const int64_t v = index[i];
    const int64_t p = is_row(v) ? book.part(v) : -1;
    const int64_t row = p >= 0 && p < book.num_parts ? book.at(v, p) : -1;
    if (row < 0 || row >= sizes[static_cast<size_t>(p)].count) [[unlikely]]
      return i;
    places[i - begin] = {p, row};
  }
  return -1;
}

// `kBytes` is the size of a row, or 0 if it is not one of the usual small ones.
template <int64_t kBytes>
void copy_rows(const Matrix& matrix, const Place* places, int64_t n, char* out) {
  const int64_t bytes = kBytes ? kBytes : matrix.bytes;
  const int64_t ahead = std::min(rows_ahead(bytes), n);
  const Part* parts = matrix.parts.data();
  const auto prefetch = [&](int64_t i) __attribute__((always_inline)) {
    if constexpr (kBytes) {
      __builtin_prefetch(places[i].of(parts, bytes), 0, 2);
    } else {
      prefetch_row_start(places[i].of(parts, bytes), bytes);
    }
  };
  for (int64_t i = 0; i < ahead; ++i) prefetch(i);
  for (int64_t i = 0; i < n; ++i) {
    if (i + ahead < n) prefetch(i + ahead);
    std::memcpy(out + i * bytes, places[i].of(parts, bytes), static_cast<size_t>(bytes));
  }
}

void copy(const Matrix& matrix, const Place* places, int64_t n, char* out) {
  if (matrix.past) {
    const Part* parts = matrix.parts.data();
    const int64_t bytes = matrix.bytes;
    const auto at = [=](int64_t i)
                        __attribute__((always_inline)) { return places[i].of(parts, bytes); };
    write_rows(n, matrix.bytes, out, at);
    return;
  }
  switch (matrix.bytes) {
    case 0: return;
    case 1: return copy_rows<1>(matrix, places, n, out);
    case 2: return copy_rows<2>(matrix, places, n, out);
    case 4: return copy_rows<4>(matrix, places, n, out);
    case 8: return copy_rows<8>(matrix, places, n, out);
    default: return copy_rows<0>(matrix, places, n, out);
  }
}

std::vector<Tensor> gather_parts(std::vector<Tensor> x, Tensor part, Tensor local, Tensor offsets,
                                 Tensor index, int64_t num_threads) {
  const int64_t num_parts = offsets.numel() - 1;
  check(num_parts > 0 && num_parts < (1 << 16) && x.size() % static_cast<size_t>(num_parts) == 0,
        "x must have a tensor for each part of every attribute");
  const IntColumn column = int_column(index, "index");
  const int64_t count = index.numel();
  std::vector<Tensor> out;
  std::vector<Matrix> matrices(x.size() / static_cast<size_t>(num_parts));
  int64_t num_rows = 0, all_bytes = 0;
  for (size_t a = 0; a < matrices.size(); ++a) {
    int64_t rows = 0;
    Matrix& matrix = matrices[a];
    for (int64_t p = 0; p < num_parts; ++p) {
      const Tensor& each = x[a * static_cast<size_t>(num_parts) + static_cast<size_t>(p)];
      check(each.is_cpu() && each.dim() == 2 && each.scalar_type() == ScalarType::Byte &&
                each.is_contiguous() && (p == 0 || each.size(1) == matrix.bytes),
            "x must be contiguous uint8 matrices, those of an attribute with rows of one length");
      matrix.bytes = each.size(1);
      matrix.parts.push_back({static_cast<const char*>(each.const_data_ptr()), each.size(0)});
      check(a == 0 || each.size(0) == matrices[0].parts[static_cast<size_t>(p)].count,
            "attributes have different numbers of rows");
      rows += each.size(0);
    }
    num_rows = rows;
    all_bytes += matrix.bytes;
    out.push_back(pool_empty({count, matrix.bytes}, ScalarType::Byte));
    matrix.out = static_cast<char*>(out.back().mutable_data_ptr());
    matrix.past = passes_caches(matrix.bytes, count * matrix.bytes);
  }
  if (matrices.empty()) return out;
  const Places book = places_of({part}, {local}, {offsets}, {num_rows})[0];

  const std::vector<Part> sizes = matrices[0].parts;
  std::stable_sort(matrices.begin(), matrices.end(), [](const Matrix& one, const Matrix& other) {
    return one.bytes < other.bytes;  // the book and short rows are in the caches at first
  });
  for (const Part& each : sizes) {
    check(each.count < int64_t{1} << Place::kRowBits, "a part has too many rows");
  }
  std::atomic<int64_t> wrong{count};
  const auto copy_some = [&](int64_t begin, int64_t end) {
    auto& scratch = kept_by_thread<Buffer<Place>, struct Gathered>();
    scratch.reserve(std::min(end - begin, kBlock));
    Place* places = scratch.data();
    int64_t found = -1;
    for (int64_t from = begin; from < end && found < 0; from += kBlock) {
      const int64_t stop = std::min(end, from + kBlock);
      found = look_up(book, sizes, column, num_rows, from, stop, end, places);
      if (found >= 0) break;
      for (const Matrix& matrix : matrices) {
        copy(matrix, places, stop - from, matrix.out + from * matrix.bytes);
      }
    }
    if (found < 0) return;
    int64_t before = wrong.load();
    while (found < before && !wrong.compare_exchange_weak(before, found)) {
    }
  };
  if (num_threads > 1) {
    const int64_t grain = std::max(kTaskBytes / std::max<int64_t>(all_bytes, 1),
                                   count / usable_threads(num_threads) + 1);
    torch::stable::parallel_for(0, count, std::max(grain, int64_t{1}), copy_some);
  } else {
    copy_some(0, count);
  }
  if (wrong < count) {
    throw std::out_of_range(
        "index[" + std::to_string(wrong) + "] is " + std::to_string(column[wrong]) +
        ", which is no row of a part; there are " + std::to_string(num_rows) + " rows");
  }
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "gather_parts(Tensor[] x, Tensor part, Tensor local, Tensor offsets, Tensor index, "
      "int num_threads) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("gather_parts", TORCH_BOX(&pyg_scale::gather_parts));
}
