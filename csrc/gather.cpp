// gather: rows of a matrix by index, `x[index]`, into recycled memory.

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
#include "parallel.h"
#include "pool.h"
#include "prefetch.h"
#include "row_writer.h"

namespace pyg_scale {
namespace {

constexpr int64_t kTaskBytes = 1 << 18;  // less is not worth a thread
// Rows that follow each other and are copied at once, as those of a cluster: of fewer, each is
// asked for in time, but not those that a longer copy passes.
constexpr int64_t kRun = 16;

struct Rows {
  const char* data;
  int64_t count;   // rows there are
  int64_t stride;  // bytes from row to row
  int64_t bytes;   // bytes of a row
};

// Copies rows [begin, end) of the output; returns the position of the first index that is no row,
// or `end`. `kBytes` is the size of a row, or 0 if it is not one of the usual small ones.
template <typename Index, int64_t kBytes>
int64_t copy_rows(const Rows& rows, const Index* index, int64_t index_stride, int64_t begin,
                  int64_t end, char* out) {
  const int64_t bytes = kBytes ? kBytes : rows.bytes;
  const int64_t ahead = rows_ahead(bytes);
  const auto valid = [&](int64_t row) {
    return static_cast<uint64_t>(row) < static_cast<uint64_t>(rows.count);
  };
  const bool in_one = rows.stride == bytes;
  const auto number = [&](int64_t i) { return static_cast<int64_t>(index[i * index_stride]); };
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) {
      const int64_t coming = number(i + ahead);
      if (valid(coming)) prefetch_row_start(rows.data + coming * rows.stride, bytes);
    }
    const int64_t row = number(i);
    if (!valid(row)) [[unlikely]]
      return i;
    char* to = out + i * bytes;
    const char* from = rows.data + row * rows.stride;
    if (in_one && end - i >= kRun && number(i + kRun - 1) == row + kRun - 1) {
      const int64_t most = std::min(end - i, rows.count - row);
      int64_t n = 1;
      while (n < most && number(i + n) == row + n) ++n;
      if (n >= kRun) {
        std::memcpy(to, from, static_cast<size_t>(n * bytes));
        i += n - 1;
        continue;
      }
    }
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  return end;
}

template <typename Index>
int64_t copy_any(const Rows& rows, const Index* index, int64_t index_stride, int64_t begin,
                 int64_t end, bool past, char* out) {
  if (past) {
    const Index* own = index + begin * index_stride;
    const auto at = [=](int64_t i) __attribute__((always_inline)) {
      const auto row = static_cast<int64_t>(own[i * index_stride]);
      return static_cast<uint64_t>(row) < static_cast<uint64_t>(rows.count)
                 ? rows.data + row * rows.stride
                 : nullptr;
    };
    return begin + write_rows(end - begin, rows.bytes, out + begin * rows.bytes, at);
  }
  switch (rows.bytes) {
    case 1: return copy_rows<Index, 1>(rows, index, index_stride, begin, end, out);
    case 2: return copy_rows<Index, 2>(rows, index, index_stride, begin, end, out);
    case 4: return copy_rows<Index, 4>(rows, index, index_stride, begin, end, out);
    case 8: return copy_rows<Index, 8>(rows, index, index_stride, begin, end, out);
    case 16: return copy_rows<Index, 16>(rows, index, index_stride, begin, end, out);
    case 32: return copy_rows<Index, 32>(rows, index, index_stride, begin, end, out);
    case 64: return copy_rows<Index, 64>(rows, index, index_stride, begin, end, out);
    default: return copy_rows<Index, 0>(rows, index, index_stride, begin, end, out);
  }
}

Tensor gather(Tensor x, Tensor index, int64_t num_threads) {
  check(x.is_cpu() && x.dim() >= 1, "x must be a tensor on the CPU with at least one dimension");
  const IntColumn column = int_column(index, "index");
  const int64_t count = index.numel();
  std::vector<int64_t> sizes{count};
  int64_t row_numel = 1;
  for (int64_t d = 1; d < x.dim(); ++d) sizes.push_back(x.size(d));
  for (int64_t d = x.dim() - 1; d >= 1; row_numel *= x.size(d--)) {
    check(x.size(d) == 1 || x.stride(d) == row_numel, "the rows of x must be contiguous");
  }
  const auto item = static_cast<int64_t>(x.element_size());
  const Rows rows{static_cast<const char*>(x.const_data_ptr()), x.size(0), x.stride(0) * item,
                  row_numel * item};
  Tensor out = pool_empty(sizes, x.scalar_type());
  auto* to = static_cast<char*>(out.mutable_data_ptr());

  const bool past = passes_caches(rows.bytes, count * rows.bytes);
  std::atomic<int64_t> wrong{count};
  const auto copy = [&](int64_t begin, int64_t end) {
    const int64_t stop = column.wide ? copy_any(rows, static_cast<const int64_t*>(column.data),
                                                column.stride, begin, end, past, to)
                                     : copy_any(rows, static_cast<const int32_t*>(column.data),
                                                column.stride, begin, end, past, to);
    if (stop == end) return;
    int64_t before = wrong.load();
    while (stop < before && !wrong.compare_exchange_weak(before, stop)) {
    }
  };
  if (rows.bytes == 0) {
    for (int64_t i = count; i-- > 0;) {
      if (column[i] < 0 || column[i] >= rows.count) wrong = i;
    }
  } else if (num_threads > 1) {
    const int64_t share = count / usable_threads(num_threads) + 1;
    const int64_t grain = std::max(kTaskBytes / rows.bytes, share);
    torch::stable::parallel_for(0, count, std::max(grain, int64_t{1}), copy);
  } else {
    copy(0, count);
  }
  if (wrong < count) {
    throw std::out_of_range("index[" + std::to_string(wrong) + "] is " +
                            std::to_string(column[wrong]) + ", but there are only " +
                            std::to_string(rows.count) + " rows");
  }
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("gather(Tensor x, Tensor index, int num_threads) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("gather", TORCH_BOX(&pyg_scale::gather));
}
