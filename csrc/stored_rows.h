// Rows as stores hold them: numbers in fewer bytes, and in one matrix or in two.
//
// Every form has the numbers of one row, `of(row)`, in the type in which they are computed: one by
// one, and a vector of them, with the same bits.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "csr_edges.h"
#include "graph_view.h"
#include "vectors.h"

namespace pyg_scale {

template <typename Real>
PYG_SCALE_INLINE Vector<Real> widen_bytes(const int8_t* from) {
  typename VectorOf<int8_t, kLanes<Real>>::type bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  using Words = typename VectorOf<int32_t, kLanes<Real>>::type;
  return __builtin_convertvector(__builtin_convertvector(bytes, Words), Vector<Real>);
}

// int8; scale and zero are at the head of each row.
template <typename Real>
struct ScaledByRow {
  using Number = Real;
  static constexpr int64_t kItem = 1, kHead = 2 * sizeof(Real);

  struct Row {
    const int8_t* q;
    Real scale, zero;
    PYG_SCALE_INLINE Real number(int64_t c) const { return static_cast<Real>(q[c]) * scale + zero; }
    PYG_SCALE_INLINE Vector<Real> vector(int64_t c) const {
      return widen_bytes<Real>(q + c) * scale + zero;
    }
  };

  PYG_SCALE_INLINE Row of(const char* row) const {
    Row out;
    std::memcpy(&out.scale, row, sizeof(Real));
    std::memcpy(&out.zero, row + sizeof(Real), sizeof(Real));
    out.q = reinterpret_cast<const int8_t*>(row + kHead);
    return out;
  }
};

// int8; each column has a scale and a zero.
template <typename Real>
struct ScaledByColumn {
  using Number = Real;
  static constexpr int64_t kItem = 1, kHead = 0;

  const Real* scale;
  const Real* zero;

  struct Row {
    const int8_t* q;
    const Real* scale;
    const Real* zero;
    PYG_SCALE_INLINE Real number(int64_t c) const {
      return static_cast<Real>(q[c]) * scale[c] + zero[c];
    }
    PYG_SCALE_INLINE Vector<Real> vector(int64_t c) const {
      return widen_bytes<Real>(q + c) * load(scale + c) + load(zero + c);
    }
  };

  PYG_SCALE_INLINE Row of(const char* row) const {
    return {reinterpret_cast<const int8_t*>(row), scale, zero};
  }
};

// Numbers of a floating type, as they are.
template <typename T>
struct AsStored {
  using Number = AccumulatorOf<T>;
  static constexpr int64_t kItem = sizeof(T), kHead = 0;

  struct Row {
    const T* x;
    PYG_SCALE_INLINE Number number(int64_t c) const { return widen(x[c]); }
    PYG_SCALE_INLINE Vector<Number> vector(int64_t c) const { return load(x + c); }
  };

  PYG_SCALE_INLINE Row of(const char* row) const { return {reinterpret_cast<const T*>(row)}; }
};

struct StoredMatrix {
  const char* data = nullptr;
  int64_t count = 0, stride = 0;  // in bytes
};

// Rows that are read as numbers of type `T`: a place from 0 on is a row of `held`, and -1 - p is
// row p of `rest`.
template <typename T, typename Form>
struct StoredRows {
  using A = AccumulatorOf<T>;
  // Numbers must not have to be rounded to T.
  static_assert(std::is_same_v<T, A> || std::is_same_v<Form, AsStored<T>>);
  static_assert(std::is_same_v<typename Form::Number, A>);

  Form form;
  StoredMatrix held, rest;
  int64_t size;  // columns

  PYG_SCALE_INLINE const char* address(int64_t place) const {
    return place >= 0 ? held.data + place * held.stride : rest.data + (-1 - place) * rest.stride;
  }
  PYG_SCALE_INLINE typename Form::Row operator[](int64_t place) const {
    return form.of(address(place));
  }
  int64_t bytes() const { return size * Form::kItem + Form::kHead; }
  int64_t ahead() const { return features_ahead(held.count + rest.count, bytes()); }
  PYG_SCALE_INLINE void prefetch(int64_t place) const {
    prefetch_row(address(place), bytes(), far());
  }
  PYG_SCALE_INLINE void prefetch(int64_t place, int64_t column, int64_t count) const {
    prefetch_row(address(place) + column * Form::kItem, count * Form::kItem + Form::kHead, far());
  }
  bool far() const { return lie_in_memory(held.count + rest.count, bytes()); }
  void check_range(const CsrEdges& edges, int64_t begin, int64_t end) const {
    edges.check_places(begin, end, held.count, rest.count);
  }
};

template <typename Row>
PYG_SCALE_INLINE auto number_of(const Row& row, int64_t c) -> decltype(row.number(c)) {
  return row.number(c);
}
template <typename Row>
PYG_SCALE_INLINE auto vector_of(const Row& row, int64_t c) -> decltype(row.vector(c)) {
  return row.vector(c);
}

template <typename Real>
const Real* numbers_of_columns(const Tensor& tensor, int64_t size, const char* name) {
  check(tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() == size,
        std::string(name) + " must hold one number per column, on the CPU");
  return static_cast<const Real*>(tensor.const_data_ptr());
}

inline bool has_contiguous_rows(const Tensor& q) {
  return q.is_cpu() && q.dim() == 2 && (q.size(1) <= 1 || q.stride(1) == 1);
}

// The form of a stored matrix whose rows are read as numbers of `dtype`.
struct StoredForm {
  // `scale` and `zero` are those of columns, or empty or absent.
  StoredForm(const Tensor& q, const Tensor* scale, const Tensor* zero, ScalarType dtype)
      : stored(q.scalar_type()), scale(scale), zero(zero) {
    const bool wide = dtype == ScalarType::Double, bytes = stored == ScalarType::Byte;
    per_column = bytes && scale && zero && scale->dim() == 1;
    if (per_column) {
      const ScalarType real = wide ? ScalarType::Double : ScalarType::Float;
      check(scale->scalar_type() == real && zero->scalar_type() == real,
            "scale and zero must be float32, or float64 if the result is");
    }
    const int64_t head = bytes && !per_column ? 2 * (wide ? 8 : 4) : 0;
    check(q.size(1) >= head, "the rows of q are too short for a scale and a zero");
    columns = q.size(1) - head;
  }

  // Calls f(form) for int8 whose scales are Real, or for half precision.
  template <typename Real, typename F>
  void visit_short(const char* refused, const F& f) const {
    if (stored == ScalarType::Half) return f(AsStored<Half>{});
    if (stored == ScalarType::BFloat16) return f(AsStored<BFloat16>{});
    visit_int8<Real>(refused, f);
  }

  template <typename Real, typename F>
  void visit_int8(const char* refused, const F& f) const {
    if (per_column) {
      return f(ScaledByColumn<Real>{numbers_of_columns<Real>(*scale, columns, "scale"),
                                    numbers_of_columns<Real>(*zero, columns, "zero")});
    }
    check(stored == ScalarType::Byte, refused);
    f(ScaledByRow<Real>{});
  }

  ScalarType stored;
  int64_t columns;
  bool per_column;

 private:
  const Tensor* scale;
  const Tensor* zero;
};

// The rows of one or two matrices as an op is handed them; see pyg_scale/ops/stored_rows.py.
struct StoredArguments {
  StoredArguments(const Tensor& held, const MaybeTensor& rest, const MaybeTensor& scale,
                  const MaybeTensor& zero, ScalarType dtype)
      : dtype(dtype),
        held(checked(held)),
        rest(rest),
        form(held, scale ? &*scale : nullptr, zero ? &*zero : nullptr, dtype) {
    if (rest) {
      check(has_contiguous_rows(*rest) && rest->scalar_type() == held.scalar_type() &&
                rest->size(1) == held.size(1),
            "rest must be a matrix like rows");
    }
    check(scale.has_value() == zero.has_value() && (!scale || scale->dim() == 1),
          "scale and zero must be given together, with one dimension");
  }

  // Calls f(number, rows) with a number of the type and StoredRows.
  template <typename F>
  void visit(const F& f) const {
    const auto as = [&](auto one) {
      return [&, one](const auto& each) {
        using Source = StoredRows<std::decay_t<decltype(one)>, std::decay_t<decltype(each)>>;
        f(one,
          Source{each, matrix_of(held), rest ? matrix_of(*rest) : StoredMatrix{}, form.columns});
      };
    };
    constexpr const char* kRefused = "rows must be of dtype, or be stored in a form for it";
    if (dtype == form.stored) {
      return pyg_scale::visit(dtype, "dtype",
                              [&](auto one) { as(one)(AsStored<decltype(one)>{}); });
    }
    if (dtype == ScalarType::Float) return form.visit_short<float>(kRefused, as(float{}));
    check(dtype == ScalarType::Double, kRefused);
    form.visit_int8<double>(kRefused, as(double{}));
  }

  ScalarType dtype;
  const Tensor& held;
  const MaybeTensor& rest;
  StoredForm form;

 private:
  static const Tensor& checked(const Tensor& held) {
    check(has_contiguous_rows(held), "rows must be a matrix on the CPU with contiguous rows");
    return held;
  }
  static StoredMatrix matrix_of(const Tensor& x) {
    return {x.numel() ? static_cast<const char*>(x.const_data_ptr()) : nullptr, x.size(0),
            (x.size(0) > 1 ? x.stride(0) : x.size(1)) * static_cast<int64_t>(x.element_size())};
  }
};

}  // namespace pyg_scale
