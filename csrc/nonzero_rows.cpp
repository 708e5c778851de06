// nonzero_rows: how many rows of a matrix come before rows of nothing but zeros, see
// pyg_scale/ops/nonzero_rows.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "graph_view.h"
#include "parallel.h"

namespace pyg_scale {
namespace {

constexpr int64_t kStepBytes = 64 << 10;  // read by a thread before it checks what others found
constexpr int64_t kWaveSteps = 8;         // of each thread at a time, from the end

// A mask for 8 bytes of numbers: all bits except signs.
uint64_t unsigned_bits(int64_t element_size) {
  if (element_size == 2) return 0x7fff'7fff'7fff'7fffU;
  return element_size == 4 ? 0x7fff'ffff'7fff'ffffU : 0x7fff'ffff'ffff'ffffU;
}

// The end of the last row of [begin, end) that is not all zeros, or begin.
int64_t last_row(const char* data, int64_t row_bytes, uint64_t mask, int64_t begin, int64_t end) {
  for (int64_t row = end; row > begin; --row) {
    const char* from = data + (row - 1) * row_bytes;
    uint64_t bits = 0, word = 0;
    int64_t at = 0;
    for (; at + 8 <= row_bytes; at += 8) {
      std::memcpy(&word, from + at, 8);
      bits |= word;
    }
    word = 0;
    std::memcpy(&word, from + at, static_cast<size_t>(row_bytes - at));
    if ((bits | word) & mask) return row;
  }
  return begin;
}

int64_t nonzero_rows(Tensor x) {
  check(x.is_cpu() && x.dim() == 2 && x.is_contiguous(),
        "x must be a contiguous matrix on the CPU");
  const auto type = x.scalar_type();
  check(type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Half ||
            type == ScalarType::BFloat16,
        "x must be float32, float64, float16 or bfloat16");
  const int64_t rows = x.size(0), row_bytes = x.size(1) * x.element_size();
  const uint64_t mask = unsigned_bits(x.element_size());
  if (rows == 0 || row_bytes == 0) return 0;
  const char* data = static_cast<const char*>(x.const_data_ptr());
  const int64_t step = std::max<int64_t>(1, kStepBytes / row_bytes);
  const int64_t wave = kWaveSteps * std::max<int64_t>(1, torch::stable::get_num_threads());
  int64_t end = rows;
  while (end > 0) {  // most gradients end at once, in the first step
    const int64_t steps = end == rows ? 1 : std::min(wave, (end + step - 1) / step);
    const int64_t begin = std::max<int64_t>(0, end - steps * step);
    std::atomic<int64_t> found{begin};
    for_each_task(steps, [&](int64_t i) {
      const int64_t first = begin + i * step, last = std::min(end, first + step);
      if (first >= last || found.load(std::memory_order_relaxed) >= last) return;
      const int64_t mine = last_row(data, row_bytes, mask, first, last);
      if (mine == first) return;
      int64_t before = found.load();
      while (before < mine && !found.compare_exchange_weak(before, mine)) {
      }
    });
    if (found > begin) return found;
    end = begin;
  }
  return 0;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) { m.def("nonzero_rows(Tensor x) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("nonzero_rows", TORCH_BOX(&pyg_scale::nonzero_rows));
}
