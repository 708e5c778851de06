// dequantize: rows of a quantised matrix by index, as floating point numbers on recycled memory
// (the meaning is in pyg_scale/ops/quantize.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "graph_view.h"
#include "parallel.h"
#include "pool.h"
#include "stored_rows.h"

namespace pyg_scale {
namespace {

constexpr int64_t kAhead = 8;              // rows under way
constexpr int64_t kTaskNumbers = 1 << 16;  // less is not worth a thread

struct Stored {
  const char* data;
  int64_t count;   // rows there are
  int64_t stride;  // bytes from row to row
  int64_t bytes;   // bytes of a row
  int64_t columns;
};

template <typename Out, typename Form>
void decode_rows(const Stored& rows, const IntColumn& index, int64_t count, int64_t num_threads,
                 const Form& form, Out* out) {
  std::atomic<int64_t> wrong{count};
  const auto valid = [&](int64_t row) {
    return static_cast<uint64_t>(row) < static_cast<uint64_t>(rows.count);
  };
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end && valid(index[i + kAhead])) {
        const char* coming = rows.data + index[i + kAhead] * rows.stride;
        for (int64_t at = 0; at < rows.bytes; at += 64) __builtin_prefetch(coming + at);
      }
      const int64_t row = index[i];
      if (!valid(row)) [[unlikely]] {
        int64_t before = wrong.load();
        while (i < before && !wrong.compare_exchange_weak(before, i)) {
        }
        return;
      }
      const auto from = form.of(rows.data + row * rows.stride);
      Out* to = out + i * rows.columns;
      for (int64_t c = 0; c < rows.columns; ++c) to[c] = static_cast<Out>(from.number(c));
    }
  };
  if (num_threads > 1) {
    const int64_t share = count / usable_threads(num_threads) + 1;
    const int64_t grain = std::max(kTaskNumbers / std::max<int64_t>(rows.columns, 1), share);
    torch::stable::parallel_for(0, count, std::max<int64_t>(grain, 1), some);
  } else {
    some(0, count);
  }
  if (wrong < count) {
    throw std::out_of_range("index[" + std::to_string(wrong) + "] is " +
                            std::to_string(index[wrong]) + ", but there are only " +
                            std::to_string(rows.count) + " rows");
  }
}

Tensor dequantize(Tensor q, Tensor index, Tensor scale, Tensor zero, ScalarType dtype,
                  int64_t num_threads) {
  check(has_contiguous_rows(q), "q must be a matrix on the CPU with contiguous rows");
  const StoredForm form(q, &scale, &zero, dtype);
  const auto item = static_cast<int64_t>(q.element_size());
  const Stored rows{static_cast<const char*>(q.const_data_ptr()), q.size(0), q.stride(0) * item,
                    q.size(1) * item, form.columns};
  const IntColumn column = int_column(index, "index");
  const int64_t count = index.numel();
  Tensor out = pool_empty({count, rows.columns}, dtype);
  void* to = out.mutable_data_ptr();

  const auto into = [&](auto* typed) {
    using Out = std::remove_pointer_t<decltype(typed)>;
    const auto run = [&](const auto& each) {
      decode_rows(rows, column, count, num_threads, each, typed);
    };
    form.visit_short<AccumulatorOf<Out>>("q must be uint8, float16 or bfloat16", run);
  };
  switch (dtype) {
    case ScalarType::Float: into(static_cast<float*>(to)); break;
    case ScalarType::Double: into(static_cast<double*>(to)); break;
    case ScalarType::Half: into(static_cast<Half*>(to)); break;
    case ScalarType::BFloat16: into(static_cast<BFloat16*>(to)); break;
    default: fail("dtype must be float32, float64, float16 or bfloat16");
  }
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "dequantize(Tensor q, Tensor index, Tensor scale, Tensor zero, ScalarType dtype, "
      "int num_threads) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("dequantize", TORCH_BOX(&pyg_scale::dequantize));
}
