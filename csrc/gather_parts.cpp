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

#include "graph_view.h"
#include "parts.h"
#include "pool.h"

namespace pyg_scale {
namespace {

constexpr int64_t kBlock = 256;  // rows whose places are known ahead; a power of two
constexpr int64_t kLine = 64;
// Rows under way: enough lines to hide the latency of memory, not more than the first cache holds.
constexpr int64_t kBytesAhead = 4096, kRowsAhead = 32;
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
};

struct Place {
  int64_t part, row;
};

inline void prefetch_row(const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at);
}

inline const char* row_of(const Matrix& matrix, Place place) {
  return matrix.parts[static_cast<size_t>(place.part)].data + place.row * matrix.bytes;
}

template <int64_t kBytes>
void copy_rows(const Matrix& matrix, const Place* places, int64_t n, char* out) {
  const int64_t ahead = std::min(kRowsAhead, n);
  for (int64_t i = 0; i < ahead; ++i) __builtin_prefetch(row_of(matrix, places[i]));
  for (int64_t i = 0; i < n; ++i) {
    if (i + ahead < n) __builtin_prefetch(row_of(matrix, places[i + ahead]));
    std::memcpy(out + i * kBytes, row_of(matrix, places[i]), kBytes);
  }
}

void copy_small(const Matrix& matrix, const Place* places, int64_t n, char* out) {
  switch (matrix.bytes) {
    case 1: return copy_rows<1>(matrix, places, n, out);
    case 2: return copy_rows<2>(matrix, places, n, out);
    case 4: return copy_rows<4>(matrix, places, n, out);
    case 8: return copy_rows<8>(matrix, places, n, out);
    default: break;
  }
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(out + i * matrix.bytes, row_of(matrix, places[i]),
                static_cast<size_t>(matrix.bytes));
  }
}

// Where the rows of an index are. Blocks are looked up one row at a time, so that whoever copies
// a block looks up the next one while memory is waited for.
class Blocks {
 public:
  Blocks(const Places& book, const std::vector<Part>& sizes, const IntColumn& index,
         int64_t num_rows, int64_t begin, int64_t end)
      : book_(book), sizes_(sizes), index_(index), num_rows_(num_rows), begin_(begin), end_(end) {
    for (int64_t i = begin; i < std::min(begin + 2 * kBlock, end); ++i) prefetch(i);
    for (int64_t i = begin; i < std::min(begin + kBlock, end) && wrong < 0; ++i) look_up(i);
  }

  // The place of row i, which is of the block that is copied or of the next one.
  const Place& operator[](int64_t i) const { return places_[slot(i)]; }

  // Looks up row i + kBlock, and prefetches what is needed for that of a block later.
  void advance(int64_t i) {
    if (i + 2 * kBlock < end_) prefetch(i + 2 * kBlock);
    if (i + kBlock < end_) look_up(i + kBlock);
  }

  int64_t wrong = -1;  // the first position that is no row

 private:
  int64_t slot(int64_t i) const { return (i - begin_) & (2 * kBlock - 1); }

  void prefetch(int64_t i) const {
    const int64_t v = index_[i];
    if (static_cast<uint64_t>(v) < static_cast<uint64_t>(num_rows_)) book_.prefetch(v);
  }

  void look_up(int64_t i) {
    const int64_t v = index_[i];
    const bool there = static_cast<uint64_t>(v) < static_cast<uint64_t>(num_rows_);
    const int64_t p = there ? book_.part(v) : -1;
    const int64_t row = p >= 0 && p < book_.num_parts ? book_.at(v, p) : -1;
    if (row < 0 || row >= sizes_[static_cast<size_t>(p)].count) [[unlikely]] {
      if (wrong < 0) wrong = i;
      places_[slot(i)] = {0, 0};
      return;
    }
    places_[slot(i)] = {p, row};
  }

  const Places& book_;
  const std::vector<Part>& sizes_;
  const IntColumn& index_;
  int64_t num_rows_, begin_, end_;
  Place places_[2 * kBlock];
};

// Copies the rows [from, stop) of an attribute with long rows, and looks up the block after them.
void copy_wide(const Matrix& wide, Blocks& blocks, int64_t from, int64_t stop, int64_t end,
               bool first) {
  const int64_t bytes = wide.bytes;
  const int64_t ahead = std::clamp(kBytesAhead / bytes, int64_t{1}, kRowsAhead);
  for (int64_t i = from; first && i < std::min(from + ahead, stop); ++i) {
    prefetch_row(row_of(wide, blocks[i]), bytes);
  }
  for (int64_t i = from; i < stop; ++i) {
    blocks.advance(i);
    if (i + ahead < end) prefetch_row(row_of(wide, blocks[i + ahead]), bytes);
    std::memcpy(wide.out + i * bytes, row_of(wide, blocks[i]), static_cast<size_t>(bytes));
  }
}

// Copies the rows [begin, end) of all attributes; returns the first position that is no row, or -1.
int64_t copy_all(const std::vector<Matrix>& matrices, size_t widest, Blocks& blocks, int64_t begin,
                 int64_t end) {
  const Matrix* wide = matrices[widest].bytes > kLine ? &matrices[widest] : nullptr;
  for (int64_t from = begin; from < end; from += kBlock) {
    if (blocks.wrong >= 0) return blocks.wrong;
    const int64_t stop = std::min(end, from + kBlock);
    if (wide) {
      copy_wide(*wide, blocks, from, stop, end, from == begin);
    } else {
      for (int64_t i = from; i < stop; ++i) blocks.advance(i);
    }
    for (const Matrix& matrix : matrices) {
      if (&matrix == wide || matrix.bytes == 0) continue;
      copy_small(matrix, &blocks[from], stop - from, matrix.out + from * matrix.bytes);
    }
  }
  return blocks.wrong;
}

std::vector<Tensor> gather_parts(std::vector<Tensor> x, Tensor part, Tensor local, Tensor offsets,
                                 Tensor index, int64_t num_threads) {
  const int64_t num_parts = offsets.numel() - 1;
  check(num_parts > 0 && x.size() % static_cast<size_t>(num_parts) == 0,
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
  }
  if (matrices.empty()) return out;
  const Places book = places_of({part}, {local}, {offsets}, {num_rows})[0];
  const std::vector<Part>& sizes = matrices[0].parts;

  size_t widest = 0;
  for (size_t a = 1; a < matrices.size(); ++a) {
    if (matrices[a].bytes > matrices[widest].bytes) widest = a;
  }
  std::atomic<int64_t> wrong{count};
  const auto copy = [&](int64_t begin, int64_t end) {
    Blocks blocks(book, sizes, column, num_rows, begin, end);
    const int64_t found = copy_all(matrices, widest, blocks, begin, end);
    if (found < 0) return;
    int64_t before = wrong.load();
    while (found < before && !wrong.compare_exchange_weak(before, found)) {
    }
  };
  if (num_threads > 1) {
    const int64_t grain = std::max(kTaskBytes / std::max<int64_t>(all_bytes, 1),
                                   (count + num_threads - 1) / num_threads);
    torch::stable::parallel_for(0, count, std::max(grain, int64_t{1}), copy);
  } else {
    copy(0, count);
  }
  if (wrong < count) {
    throw std::out_of_range("index[" + std::to_string(wrong) + "] is " +
                            std::to_string(column[wrong]) +
                            ", which is no row of a part; there are " + std::to_string(num_rows) +
                            " rows");
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
