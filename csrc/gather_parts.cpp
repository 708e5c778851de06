// gather_parts: rows of a matrix whose rows lie in several parts, by index, into recycled memory.

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

constexpr int64_t kBlock = 128;            // rows whose places are looked up together
constexpr int64_t kTaskBytes = 1 << 18;    // less is not worth a thread
constexpr int64_t kLine = 64, kMostLines = 16;  // more than this is read in order anyhow

struct Part {
  const char* data;
  int64_t count;
};

Tensor gather_parts(std::vector<Tensor> x, Tensor part, Tensor local, Tensor offsets, Tensor index,
                    int64_t num_threads) {
  check(!x.empty(), "x must have a tensor for each part");
  const int64_t bytes = x[0].dim() == 2 ? x[0].size(1) : -1;
  std::vector<Part> parts;
  int64_t num_rows = 0;
  for (const Tensor& each : x) {
    check(each.is_cpu() && each.dim() == 2 && each.scalar_type() == ScalarType::Byte &&
              each.is_contiguous() && each.size(1) == bytes,
          "x must be contiguous uint8 matrices with rows of one length");
    parts.push_back({static_cast<const char*>(each.const_data_ptr()), each.size(0)});
    num_rows += each.size(0);
  }
  const Places places = places_of({part}, {local}, {offsets}, {num_rows})[0];
  check(places.num_parts == static_cast<int64_t>(parts.size()),
        "the book and x have different numbers of parts");
  const IntColumn column = int_column(index, "index");
  const int64_t count = index.numel();
  Tensor out = pool_empty({count, bytes}, ScalarType::Byte);
  auto* to = static_cast<char*>(out.mutable_data_ptr());

  std::atomic<int64_t> wrong{count};
  const auto copy = [&](int64_t begin, int64_t end) {
    const char* rows[kBlock];
    for (int64_t from = begin; from < end; from += kBlock) {
      const int64_t n = std::min(kBlock, end - from);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t v = column[from + i];
        if (v >= 0 && v < num_rows) places.prefetch(v);
      }
      for (int64_t i = 0; i < n; ++i) {
        const int64_t v = column[from + i];
        const int64_t p = v >= 0 && v < num_rows ? places.part(v) : -1;
        const int64_t row = p >= 0 && p < places.num_parts ? places.at(v, p) : -1;
        if (row < 0 || row >= parts[p].count) [[unlikely]] {
          int64_t before = wrong.load();
          while (from + i < before && !wrong.compare_exchange_weak(before, from + i)) {
          }
          return;
        }
        rows[i] = parts[p].data + row * bytes;
        const int64_t lines = std::min((bytes + kLine - 1) / kLine, kMostLines);
        for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(rows[i] + line * kLine);
      }
      for (int64_t i = 0; i < n; ++i) {
        std::memcpy(to + (from + i) * bytes, rows[i], static_cast<size_t>(bytes));
      }
    }
  };
  if (num_threads > 1 && bytes > 0) {
    const int64_t grain = std::max(kTaskBytes / bytes, (count + num_threads - 1) / num_threads);
    torch::stable::parallel_for(0, count, std::max(grain, int64_t{1}), copy);
  } else {
    copy(0, count);
  }
  if (wrong < count) {
    throw std::out_of_range("index[" + std::to_string(wrong) + "] is " +
                            std::to_string(column[wrong]) + ", which is no row of a part; there are " +
                            std::to_string(num_rows) + " rows");
  }
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "gather_parts(Tensor[] x, Tensor part, Tensor local, Tensor offsets, Tensor index, "
      "int num_threads) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("gather_parts", TORCH_BOX(&pyg_scale::gather_parts));
}
