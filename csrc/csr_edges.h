// A graph and features as the fused ops of the layers are handed them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "graph_view.h"
#include "pool.h"
#include "row_tasks.h"
#include "vectors.h"

namespace pyg_scale {

using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kBytesAhead = 4096, kMostAhead = 16;  // rows asked for before they are needed
// The same for rows that lie in memory rather than in a cache, and from what size on they do.
constexpr int64_t kBytesFarAhead = 32768, kMostFarAhead = 64;
constexpr uint64_t kInMemory = uint64_t{64} << 20;

// The edges of each row; see pyg_scale/ops/adjacency.py.
struct CsrEdges {
  CsrEdges(const Tensor& pointers, const Tensor& sources, const MaybeTensor& ids)
      : rows(num_pointed(pointers)), edges(sources.numel()) {
    indptr = int64_data(pointers, rows + 1, "indptr");
    indices = int_column(sources, "indices");
    if (ids) {
      check(ids->numel() == edges, "edge_id must have one entry per edge");
      edge_id = int_column(*ids, "edge_id");
    }
  }

  int64_t id(int64_t e) const { return edge_id.data ? edge_id[e] : e; }

  // Refuses edges [begin, end) that do not come from one of `num_src` rows.
  void check_range(int64_t begin, int64_t end, int64_t num_src) const {
    check_numbers(indices, begin, end, num_src, "indices", "source nodes");
    check_numbers(edge_id, begin, end, edges, "edge_id", "edges");
  }

  // The same where sources are places: rows of one matrix, and -1 - p for row p of another one.
  void check_places(int64_t begin, int64_t end, int64_t num_held, int64_t num_rest) const {
    if (num_rest == 0) return check_range(begin, end, num_held);
    for (int64_t e = begin; e < end; ++e) {
      const int64_t place = indices[e];
      if (place >= num_held || place < -num_rest) [[unlikely]] {
        fail("indices[" + std::to_string(e) + "] is the place " + std::to_string(place) +
             ", but there are only " + std::to_string(num_held) + " rows and " +
             std::to_string(num_rest) + " others");
      }
    }
    check_numbers(edge_id, begin, end, edges, "edge_id", "edges");
  }

  const int64_t* indptr;
  IntColumn indices, edge_id;
  int64_t rows, edges;
};

// True for rows that together are more than a cache holds.
inline bool lie_in_memory(int64_t count, int64_t row_bytes) {
  return static_cast<uint64_t>(count) * static_cast<uint64_t>(row_bytes) > kInMemory;
}

// How many rows ahead of the one that is added to ask for one.
inline int64_t features_ahead(int64_t count, int64_t row_bytes) {
  const bool far = lie_in_memory(count, row_bytes);
  return std::clamp((far ? kBytesFarAhead : kBytesAhead) / std::max<int64_t>(row_bytes, 1),
                    int64_t{1}, far ? kMostFarAhead : kMostAhead);
}

// A matrix of features with contiguous rows and any stride. If a copy had to be made, `holder`
// keeps it alive.
template <typename T>
struct Rows {
  const T* data;
  int64_t count, stride, size;
  const T* operator[](int64_t row) const { return data + row * stride; }
  int64_t bytes() const { return size * static_cast<int64_t>(sizeof(T)); }
  int64_t ahead() const { return features_ahead(count, bytes()); }
  PYG_SCALE_INLINE void prefetch(int64_t row) const { prefetch(row, 0, size); }
  PYG_SCALE_INLINE void prefetch(int64_t row, int64_t column, int64_t columns) const {
    prefetch_row((*this)[row] + column, columns * static_cast<int64_t>(sizeof(T)),
                 lie_in_memory(count, bytes()));
  }
  void check_range(const CsrEdges& edges, int64_t begin, int64_t end) const {
    edges.check_range(begin, end, count);
  }
};

// Numbers of a row in the type in which they are added up, one or a vector of them.
template <typename T>
PYG_SCALE_INLINE AccumulatorOf<T> number_of(const T* row, int64_t c) {
  return widen(row[c]);
}
template <typename T>
PYG_SCALE_INLINE Vector<AccumulatorOf<T>> vector_of(const T* row, int64_t c) {
  return load(row + c);
}

// `x` itself, or a copy of it, with contiguous rows.
inline Tensor with_rows(const Tensor& x, const char* name) {
  check(x.is_cpu() && x.dim() >= 2, std::string(name) + " must have rows, on the CPU");
  int64_t expected = 1;
  for (int64_t d = x.dim() - 1; d >= 1; expected *= x.size(d--)) {
    if (x.size(d) != 1 && x.stride(d) != expected) return torch::stable::contiguous(x);
  }
  return x;
}

template <typename T>
Rows<T> rows_of(const Tensor& x) {  // of with_rows
  int64_t size = 1;
  for (int64_t d = 1; d < x.dim(); ++d) size *= x.size(d);
  return {static_cast<const T*>(x.numel() ? x.const_data_ptr() : nullptr), x.size(0),
          x.size(0) > 1 ? x.stride(0) : size, size};
}

// Contiguous numbers of a given type and count.
inline Tensor dense(const Tensor& x, ScalarType dtype, int64_t numel, const char* name) {
  check(x.is_cpu() && x.scalar_type() == dtype, std::string(name) + " has the wrong type");
  check(x.numel() == numel, std::string(name) + " has " + std::to_string(x.numel()) +
                                " numbers, expected " + std::to_string(numel));
  return torch::stable::contiguous(x);
}

inline ScalarType accumulator_type(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls f with a number of the type.
template <typename F>
void visit(ScalarType dtype, const char* name, const F& f) {
  switch (dtype) {
    case ScalarType::Float: return f(float{});
    case ScalarType::Double: return f(double{});
    case ScalarType::BFloat16: return f(BFloat16{});
    case ScalarType::Half: return f(Half{});
    default: fail(std::string(name) + " must be float32, float64, bfloat16 or float16");
  }
}

template <typename T>
T* data_of(Tensor& tensor) {
  return static_cast<T*>(tensor.numel() ? tensor.mutable_data_ptr() : nullptr);
}

template <typename T>
const T* const_data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.numel() ? tensor.const_data_ptr() : nullptr);
}

}  // namespace pyg_scale
