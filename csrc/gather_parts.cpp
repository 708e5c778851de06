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

constexpr int64_t kBlock = 256;  // rows whose places are looked up together
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

template <int64_t kBytes>
void copy_rows(const Matrix& matrix, const Place* places, int64_t n, char* out) {
  const int64_t bytes = kBytes ? kBytes : matrix.bytes;
  const int64_t ahead = std::clamp(kBytesAhead / std::max<int64_t>(bytes, 1), int64_t{1}, kRowsAhead);
  const Part* parts = matrix.parts.data();
  const auto row = [&](int64_t i) { return parts[places[i].part].data + places[i].row * bytes; };
  const auto prefetch = [&](int64_t i) {
    const char* from = row(i);
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at);
  };
  for (int64_t i = 0; i < std::min(ahead, n); ++i) prefetch(i);
  for (int64_t i = 0; i < n; ++i) {
    if (i + ahead < n) prefetch(i + ahead);
    std::memcpy(out + i * bytes, row(i), static_cast<size_t>(bytes));
  }
}

void copy_any(const Matrix& matrix, const Place* places, int64_t n, char* out) {
  switch (matrix.bytes) {
    case 1: return copy_rows<1>(matrix, places, n, out);
    case 4: return copy_rows<4>(matrix, places, n, out);
    case 8: return copy_rows<8>(matrix, places, n, out);
    case 64: return copy_rows<64>(matrix, places, n, out);
    default: return copy_rows<0>(matrix, places, n, out);
  }
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

  std::atomic<int64_t> wrong{count};
  const auto copy = [&](int64_t begin, int64_t end) {
    Place places[kBlock];
    for (int64_t from = begin; from < end; from += kBlock) {
      const int64_t n = std::min(kBlock, end - from);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t v = column[from + i];
        if (v >= 0 && v < num_rows) book.prefetch(v);
      }
      for (int64_t i = 0; i < n; ++i) {
        const int64_t v = column[from + i];
        const int64_t p = v >= 0 && v < num_rows ? book.part(v) : -1;
        const int64_t row = p >= 0 && p < num_parts ? book.at(v, p) : -1;
        if (row < 0 || row >= sizes[static_cast<size_t>(p)].count) [[unlikely]] {
          int64_t before = wrong.load();
          while (from + i < before && !wrong.compare_exchange_weak(before, from + i)) {
          }
          return;
        }
        places[i] = {p, row};
      }
      for (const Matrix& matrix : matrices) {
        copy_any(matrix, places, n, matrix.out + from * matrix.bytes);
      }
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
