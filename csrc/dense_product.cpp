// dense_product: a matrix of many rows times a small one, see pyg_scale/ops/dense_product.py.
//
// Blocks as in Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (TOMS
// 2008): a tile of the result stays in registers while columns of the first matrix and rows of the
// second pass by. A small second matrix is copied so that it is read in order; all else is read
// where it is.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "buffer.h"
#include "graph_view.h"
#include "instructions.h"
#include "parallel.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace pyg_scale {
namespace {

constexpr int kTileRows = 8;
constexpr int kVectors = 3;  // of a tile's columns; 24 of 32 registers hold the tile
constexpr int kVectorBytes = 64;
constexpr int64_t kDepth = 256;             // products that a tile adds up at once
constexpr int64_t kBlockRows = 64;          // of the result, whose tiles follow one another
constexpr int64_t kCopiedBytes = 1 << 20;   // of the second matrix
constexpr int64_t kTasksEach = 4;           // of a thread, as others may be busy
constexpr int64_t kTaskProducts = 1 << 20;  // are worth a task
constexpr int64_t kDeepTask = 1024;         // products that are worth a task
constexpr int64_t kMostDeepTasks = 16;

template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
template <typename T>
constexpr int64_t kWidth = kVectors * kLanes<T>;  // columns of a tile

// A matrix that may be transposed.
template <typename T>
struct Matrix {
  const T* data;
  int64_t row_stride, column_stride;

  Matrix from(int64_t row, int64_t column) const {
    return {data + row * row_stride + column * column_stride, row_stride, column_stride};
  }
};

struct Range {
  int64_t from, to;

  int64_t size() const { return to - from; }
};

int64_t parts_of(int64_t count, int64_t each) { return (count + each - 1) / each; }
int64_t round_up(int64_t count, int64_t step) { return parts_of(count, step) * step; }

// What is computed at a time: `rows` by `columns` of the result, from `depth` products each.
template <typename T>
struct Tile {
  Matrix<T> a, b;  // the columns of `b` lie side by side
  int64_t depth;
  T* out;
  int64_t out_stride;
  int rows, columns;
  const T* before;  // what is added to rows that are `before_stride` apart; null is zero
  int64_t before_stride;
};

// Everywhere.
template <typename T>
struct PortableTiles {
  template <int>
  static void compute(const Tile<T>& tile) {
    for (int i = 0; i < tile.rows; ++i) {
      T sum[kWidth<T>] = {};
      const T *x = tile.a.data + i * tile.a.row_stride, *row = tile.b.data;
      for (int64_t p = 0; p < tile.depth; ++p) {
        for (int j = 0; j < tile.columns; ++j) sum[j] += *x * row[j];
        x += tile.a.column_stride;
        row += tile.b.row_stride;
      }
      for (int j = 0; j < tile.columns; ++j) {
        const T before = tile.before ? tile.before[i * tile.before_stride + j] : T{};
        tile.out[i * tile.out_stride + j] = before + sum[j];
      }
    }
  }
};

#if defined(__x86_64__) && defined(__GNUC__)
#define PYG_SCALE_AVX512 [[gnu::target("avx512f"), gnu::always_inline]] static inline

template <typename T>
struct Wide;

template <>
struct Wide<float> {
  using Vector = __m512;
  using Mask = __mmask16;
  PYG_SCALE_AVX512 Vector zero() { return _mm512_setzero_ps(); }
  PYG_SCALE_AVX512 Vector all(float x) { return _mm512_set1_ps(x); }
  PYG_SCALE_AVX512 Vector load(const float* from) { return _mm512_loadu_ps(from); }
  PYG_SCALE_AVX512 Vector load(Mask these, const float* from) {
    return _mm512_maskz_loadu_ps(these, from);
  }
  PYG_SCALE_AVX512 void store(Mask these, float* to, Vector x) {
    _mm512_mask_storeu_ps(to, these, x);
  }
  PYG_SCALE_AVX512 Vector add(Vector x, Vector y) { return _mm512_add_ps(x, y); }
  PYG_SCALE_AVX512 Vector add_product(Vector x, Vector y, Vector to) {
    return _mm512_fmadd_ps(x, y, to);
  }
};

template <>
struct Wide<double> {
  using Vector = __m512d;
  using Mask = __mmask8;
  PYG_SCALE_AVX512 Vector zero() { return _mm512_setzero_pd(); }
  PYG_SCALE_AVX512 Vector all(double x) { return _mm512_set1_pd(x); }
  PYG_SCALE_AVX512 Vector load(const double* from) { return _mm512_loadu_pd(from); }
  PYG_SCALE_AVX512 Vector load(Mask these, const double* from) {
    return _mm512_maskz_loadu_pd(these, from);
  }
  PYG_SCALE_AVX512 void store(Mask these, double* to, Vector x) {
    _mm512_mask_storeu_pd(to, these, x);
  }
  PYG_SCALE_AVX512 Vector add(Vector x, Vector y) { return _mm512_add_pd(x, y); }
  PYG_SCALE_AVX512 Vector add_product(Vector x, Vector y, Vector to) {
    return _mm512_fmadd_pd(x, y, to);
  }
};

template <typename T>
struct WideTiles {
  // `kCount` vectors hold the columns.
  template <int kCount>
  [[gnu::target("avx512f")]] static void compute(const Tile<T>& tile) {
    const auto all = static_cast<typename W::Mask>(~0u);
    const int rest = tile.columns - (kCount - 1) * kLanes<T>;
    const auto last = static_cast<typename W::Mask>((1u << rest) - 1);
    typename W::Vector sum[kTileRows][kCount];
    const T* row[kTileRows];
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; ++i) {
      row[i] = tile.a.data + std::min(i, tile.rows - 1) * tile.a.row_stride;
#pragma GCC unroll 3
      for (int v = 0; v < kCount; ++v) sum[i][v] = W::zero();
    }
    const T* b = tile.b.data;
    int64_t at = 0;
    for (int64_t p = 0; p < tile.depth; ++p) {
      typename W::Vector columns[kCount];
#pragma GCC unroll 3
      for (int v = 0; v < kCount; ++v) {
        columns[v] = W::load(v == kCount - 1 ? last : all, b + v * kLanes<T>);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kTileRows; ++i) {
        const auto x = W::all(row[i][at]);
#pragma GCC unroll 3
        for (int v = 0; v < kCount; ++v) sum[i][v] = W::add_product(x, columns[v], sum[i][v]);
      }
      at += tile.a.column_stride;
      b += tile.b.row_stride;
    }
    // A loop over rows that may end early would keep the sums in memory all the time.
    alignas(kVectorBytes) T sums[kTileRows * kCount * kLanes<T>];
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 3
      for (int v = 0; v < kCount; ++v)
        W::store(all, sums + (i * kCount + v) * kLanes<T>, sum[i][v]);
    }
    for (int i = 0; i < tile.rows; ++i) {
      for (int v = 0; v < kCount; ++v) {
        const auto these = v == kCount - 1 ? last : all;
        auto value = W::load(all, sums + (i * kCount + v) * kLanes<T>);
        if (tile.before) {
          const T* before = tile.before + i * tile.before_stride + v * kLanes<T>;
          value = W::add(W::load(these, before), value);
        }
        W::store(these, tile.out + i * tile.out_stride + v * kLanes<T>, value);
      }
    }
  }

 private:
  using W = Wide<T>;
};
#endif

// What a product is added to and where it goes: rows that are `stride` apart.
template <typename T>
struct Result {
  T* out;
  int64_t stride;
  const T* bias;  // null if there is none
  bool add;       // to what is there

  Result from(int64_t row, int64_t column) const {
    return {out + row * stride + column, stride, bias ? bias + column : nullptr, add};
  }
};

template <typename T, typename Tiles>
class Product {
 public:
  Product(Matrix<T> a, Matrix<T> b, int64_t depth) : a_(a), b_(b), depth_(depth) {}

  void run(int64_t rows, int64_t columns, const Result<T>& result) const {
    const int64_t threads = std::max<int64_t>(1, torch::stable::get_num_threads());
    if (depth_ * columns <= kCopied) {
      by_rows({0, rows}, {0, columns}, threads, result);
    } else if (rows * columns <= kCopied && depth_ >= 2 * kDeepTask) {
      by_depth({0, rows}, {0, columns}, result);
    } else {
      by_tiles({0, rows}, {0, columns}, threads, result);
    }
  }

 private:
  static constexpr int64_t kCopied = kCopiedBytes / static_cast<int64_t>(sizeof(T));

  // Many rows by a small matrix.
  void by_rows(Range rows, Range columns, int64_t threads, const Result<T>& result) const {
    auto& copied = kept_by_thread<Buffer<T>, Product>();
    copy({0, depth_}, columns, copied);
    const int64_t least = kTaskProducts / (depth_ * columns.to);
    const int64_t each =
        round_up(std::max(least, parts_of(rows.to, threads * kTasksEach)), kBlockRows);
    for_each_task(parts_of(rows.to, each), [&](int64_t i) {
      const Range own{i * each, std::min(rows.to, (i + 1) * each)};
      multiply(copied.data(), {0, depth_}, own, columns, result);
    });
  }

  // A small result of a long sum, such as the gradient of a weight. Parts of the sum do not depend
  // on the number of threads, so neither does the result.
  void by_depth(Range rows, Range columns, const Result<T>& result) const {
    const int64_t size = rows.to * columns.to;
    const int64_t each = round_up(std::max(kDeepTask, parts_of(depth_, kMostDeepTasks)), kDepth);
    const int64_t count = parts_of(depth_, each);
    auto& sums = kept_by_thread<Buffer<T>, Product<T, Tiles>*>();
    sums.reserve(count * size);
    T* parts = sums.data();
    for_each_task(count, [&](int64_t i) {
      const Range own{i * each, std::min(depth_, (i + 1) * each)};
      by_steps(own, rows, columns, {parts + i * size, columns.to, nullptr, false});
    });
    // A number of a part is read from memory, and so takes as long as 16 products.
    const int64_t high = parts_of(kTaskProducts / 16, count * columns.to);
    for_each_task(parts_of(rows.to, high), [&](int64_t task) {
      for (int64_t r = task * high; r < std::min(rows.to, (task + 1) * high); ++r) {
        T* sum = parts + r * columns.to;
        for (int64_t i = 1; i < count; ++i) {
          for (int64_t c = 0; c < columns.to; ++c) sum[c] += sum[i * size + c];
        }
        T* out = result.out + r * result.stride;
        const T* before = result.add ? out : result.bias;
        for (int64_t c = 0; c < columns.to; ++c) out[c] = before ? before[c] + sum[c] : sum[c];
      }
    });
  }

  // Two large matrices.
  void by_tiles(Range rows, Range columns, int64_t threads, const Result<T>& result) const {
    const int64_t high = round_up(parts_of(rows.to, threads), kTileRows);
    const int64_t down = parts_of(rows.to, high);
    const int64_t wide = round_up(parts_of(columns.to, parts_of(threads, down)), kWidth<T>);
    const int64_t across = parts_of(columns.to, wide);
    for_each_task(down * across, [&](int64_t i) {
      const int64_t top = i / across * high, left = i % across * wide;
      by_steps({0, depth_}, {top, std::min(rows.to, top + high)},
               {left, std::min(columns.to, left + wide)}, result);
    });
  }

  // `kDepth` products at a time, so that caches hold what is read for them. Rows of the second
  // matrix whose columns do not lie side by side are copied.
  void by_steps(Range depth, Range rows, Range columns, Result<T> result) const {
    const bool copies = b_.column_stride != 1;
    auto& copied = kept_by_thread<Buffer<T>, Range>();
    for (Range step = depth; step.from < depth.to; step.from = step.to, result.add = true) {
      step.to = std::min(depth.to, step.from + kDepth);
      if (copies) copy(step, columns, copied);
      multiply(copies ? copied.data() : nullptr, step, rows, columns, result);
    }
  }

  // Copies rows of the second matrix: `kDepth` of them at a time, a panel of columns after the
  // other.
  void copy(Range depth, Range columns, Buffer<T>& to) const {
    to.reserve(depth.size() * columns.size());
    T* out = to.data();
    for (int64_t p = depth.from; p < depth.to; p += kDepth) {
      const int64_t deep = std::min(kDepth, depth.to - p);
      for (int64_t j = columns.from; j < columns.to; j += kWidth<T>) {
        const int64_t width = std::min(kWidth<T>, columns.to - j);
        const Matrix<T> from = b_.from(p, j);
        if (from.column_stride == 1) {
          for (int64_t q = 0; q < deep; ++q) {
            std::memcpy(out + q * width, from.data + q * from.row_stride,
                        static_cast<size_t>(width) * sizeof(T));
          }
        } else {
          for (int64_t c = 0; c < width; ++c) {
            const T* column = from.data + c * from.column_stride;
            for (int64_t q = 0; q < deep; ++q) out[q * width + c] = column[q * from.row_stride];
          }
        }
        out += deep * width;
      }
    }
  }

  // `copied` has the rows `depth` of the second matrix in these columns; null: they are read where
  // they are.
  void multiply(const T* copied, Range depth, Range rows, Range columns,
                const Result<T>& result) const {
    for (int64_t top = rows.from; top < rows.to; top += kBlockRows) {
      const int64_t bottom = std::min(rows.to, top + kBlockRows);
      const T* panel = copied;
      for (int64_t p = depth.from; p < depth.to; p += kDepth) {
        const int64_t deep = std::min(kDepth, depth.to - p);
        for (int64_t j = columns.from; j < columns.to; j += kWidth<T>) {
          const int64_t width = std::min(kWidth<T>, columns.to - j);
          const Matrix<T> b = copied ? Matrix<T>{panel, width, 1} : b_.from(p, j);
          for (int64_t i = top; i < bottom; i += kTileRows) {
            const Result<T> to = result.from(i, j);
            const bool add = to.add || p > depth.from;
            compute({a_.from(i, p), b, deep, to.out, to.stride,
                     static_cast<int>(std::min<int64_t>(kTileRows, bottom - i)),
                     static_cast<int>(width), add ? to.out : to.bias, add ? to.stride : 0});
          }
          if (copied) panel += deep * width;
        }
      }
    }
  }

  static void compute(const Tile<T>& tile) {
    const int64_t count = parts_of(tile.columns, kLanes<T>);
    if (count == 3) {
      Tiles::template compute<3>(tile);
    } else {
      count == 2 ? Tiles::template compute<2>(tile) : Tiles::template compute<1>(tile);
    }
  }

  Matrix<T> a_, b_;
  int64_t depth_;
};

template <typename T>
Matrix<T> matrix_of(const Tensor& x) {
  return {x.const_data_ptr<T>(), x.stride(0), x.stride(1)};
}

template <typename T>
void multiply(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, Tensor& out,
              bool add) {
  const T* start = bias ? bias->const_data_ptr<T>() : nullptr;
  T* to = out.mutable_data_ptr<T>();
  const Result<T> result{to, out.stride(0), start, add};
  const auto run = [&](auto product) { product.run(out.size(0), out.size(1), result); };
  const Matrix<T> left = matrix_of<T>(a), right = matrix_of<T>(b);
#if defined(__x86_64__) && defined(__GNUC__)
  if (has_avx512()) {
    run(Product<T, WideTiles<T>>(left, right, a.size(1)));
    return;
  }
#endif
  run(Product<T, PortableTiles<T>>(left, right, a.size(1)));
}

void dense_product(Tensor a, Tensor b, std::optional<Tensor> bias, Tensor out, bool add) {
  const auto type = out.scalar_type();
  check(type == ScalarType::Float || type == ScalarType::Double, "out must be float32 or float64");
  for (const Tensor* x : {&a, &b, &out}) {
    check(x->is_cpu() && x->dim() == 2 && x->scalar_type() == type,
          "a, b and out must be matrices of one type on the CPU");
  }
  const int64_t rows = out.size(0), columns = out.size(1);
  check(a.size(0) == rows && b.size(1) == columns && a.size(1) == b.size(0),
        "the sizes of a, b and out must be those of a product");
  check(rows > 0 && columns > 0 && a.size(1) > 0, "a, b and out must not be empty");
  check(out.stride(1) == 1 && (rows == 1 || out.stride(0) >= columns),
        "rows of out must lie one after the other");
  check(!bias || (bias->is_cpu() && bias->dim() == 1 && bias->scalar_type() == type &&
                  bias->size(0) == columns && bias->is_contiguous()),
        "bias must be contiguous, of the type of out, with a number a column");
  check(!(bias && add), "bias must be absent if the product is added to out");
  type == ScalarType::Float ? multiply<float>(a, b, bias, out, add)
                            : multiply<double>(a, b, bias, out, add);
}

// True where it is faster than torch's library (MKL), which takes AVX2 on processors of AMD.
bool dense_product_pays() {
#if defined(__x86_64__) && defined(__GNUC__)
  return has_avx512() && __builtin_cpu_is("amd");
#else
  return false;
#endif
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("dense_product(Tensor a, Tensor b, Tensor? bias, Tensor(a!) out, bool add) -> ()");
  m.def("dense_product_pays() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("dense_product", TORCH_BOX(&pyg_scale::dense_product));
  m.impl("dense_product_pays", TORCH_BOX(&pyg_scale::dense_product_pays));
}
