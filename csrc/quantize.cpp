// dequantize: rows of a quantised matrix by index, as floating point numbers on recycled memory
// (the meaning is in pyg_scale/ops/quantize.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "graph_view.h"
#include "parallel.h"
#include "pool.h"

namespace pyg_scale {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kAhead = 8;              // rows under way
constexpr int64_t kTaskNumbers = 1 << 16;  // less is not worth a thread

struct Rows {
  const char* data;
  int64_t count;   // rows there are
  int64_t stride;  // bytes from row to row
  int64_t bytes;   // bytes of a row
  int64_t columns;
};

// Scale and zero at the head of each row, or one for each column.
template <typename Real>
struct PerRow {
  template <typename Out>
  void row(const char* from, int64_t columns, Out* to) const {
    Real scale, zero;
    std::memcpy(&scale, from, sizeof(Real));
    std::memcpy(&zero, from + sizeof(Real), sizeof(Real));
    const auto* q = reinterpret_cast<const int8_t*>(from + 2 * sizeof(Real));
    for (int64_t c = 0; c < columns; ++c) {
      to[c] = static_cast<Out>(static_cast<Real>(q[c]) * scale + zero);
    }
  }
};

template <typename Real>
struct PerColumn {
  const Real* scale;
  const Real* zero;

  template <typename Out>
  void row(const char* from, int64_t columns, Out* to) const {
    const auto* q = reinterpret_cast<const int8_t*>(from);
    for (int64_t c = 0; c < columns; ++c) {
      to[c] = static_cast<Out>(static_cast<Real>(q[c]) * scale[c] + zero[c]);
    }
  }
};

template <typename Narrow>
struct Widen {
  template <typename Out>
  void row(const char* from, int64_t columns, Out* to) const {
    const auto* x = reinterpret_cast<const Narrow*>(from);
    for (int64_t c = 0; c < columns; ++c) to[c] = static_cast<Out>(static_cast<float>(x[c]));
  }
};

template <typename Out, typename Decode>
void decode_rows(const Rows& rows, const IntColumn& index, int64_t count, int64_t num_threads,
                 const Decode& decode, Out* out) {
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
      decode.row(rows.data + row * rows.stride, rows.columns, out + i * rows.columns);
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

template <typename Real>
const Real* numbers(const Tensor& tensor, int64_t size, const char* name) {
  check(tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() == size,
        std::string(name) + " must hold one number per column, on the CPU");
  return static_cast<const Real*>(tensor.const_data_ptr());
}

Tensor dequantize(Tensor q, Tensor index, Tensor scale, Tensor zero, ScalarType dtype,
                  int64_t num_threads) {
  check(q.is_cpu() && q.dim() == 2 && (q.size(1) <= 1 || q.stride(1) == 1),
        "q must be a matrix on the CPU with contiguous rows");
  const ScalarType stored = q.scalar_type();
  const bool bytes = stored == ScalarType::Byte, per_column = bytes && scale.dim() == 1;
  const bool wide = dtype == ScalarType::Double;
  const ScalarType real = wide ? ScalarType::Double : ScalarType::Float;
  if (per_column) {
    check(scale.scalar_type() == real && zero.scalar_type() == real,
          "scale and zero must be float32, or float64 if the result is");
  }
  const int64_t head = bytes && !per_column ? 2 * (wide ? 8 : 4) : 0;
  check(q.size(1) >= head, "the rows of q are too short for a scale and a zero");
  const auto item = static_cast<int64_t>(q.element_size());
  const Rows rows{static_cast<const char*>(q.const_data_ptr()), q.size(0), q.stride(0) * item,
                  q.size(1) * item, q.size(1) - head};
  const IntColumn column = int_column(index, "index");
  const int64_t count = index.numel();
  Tensor out = pool_empty({count, rows.columns}, dtype);
  void* to = out.mutable_data_ptr();

  const auto into = [&](auto* typed) {
    using Out = std::remove_pointer_t<decltype(typed)>;
    using Real = std::conditional_t<std::is_same_v<Out, double>, double, float>;
    const auto run = [&](const auto& decode) {
      decode_rows(rows, column, count, num_threads, decode, typed);
    };
    if (per_column) {
      run(PerColumn<Real>{numbers<Real>(scale, rows.columns, "scale"),
                          numbers<Real>(zero, rows.columns, "zero")});
    } else if (bytes) {
      run(PerRow<Real>{});
    } else if (stored == ScalarType::Half) {
      run(Widen<Half>{});
    } else {
      check(stored == ScalarType::BFloat16, "q must be uint8, float16 or bfloat16");
      run(Widen<BFloat16>{});
    }
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
