// Tensors on a device as the kernels take them: checked, contiguous, as raw pointers.
//
// With PYG_SCALE_EMULATED the same code serves the emulator: tensors are on the CPU, and the ops
// are those of the library pyg_scale_emulated.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi.h"

#if defined(PYG_SCALE_EMULATED)
#include "../emulator/driver.h"
#define PYG_SCALE_DEVICE_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(pyg_scale_emulated, CPU, m)
#else
#define PYG_SCALE_DEVICE_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CUDA, m)
// Weak: only a torch that was compiled for CUDA has it, but others load this library, too.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream)
    __attribute__((weak));
#endif

namespace pyg_scale::cuda {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

[[noreturn]] inline void fail(const std::string& message) { throw std::invalid_argument(message); }
inline void check(bool condition, const std::string& message) {
  if (!condition) fail(message);
}

// Makes the device of a tensor the current one for as long as it lives, and knows its stream.
class OnDevice {
 public:
#if defined(PYG_SCALE_EMULATED)
  explicit OnDevice(const Tensor& tensor) : stream_(emulator::kStream) {
    check_here(tensor, "the first tensor");
  }
  void check_here(const Tensor& tensor, const char* name) const {
    check(tensor.is_cpu(), std::string(name) + " must be on the CPU, to be emulated");
  }
#else
  explicit OnDevice(const Tensor& tensor)
      : stream_{nullptr, tensor.get_device_index()}, guard_(tensor.get_device_index()) {
    check_here(tensor, "the first tensor");
    check(aoti_torch_get_current_cuda_stream, "this torch was not compiled for CUDA");
    check(aoti_torch_get_current_cuda_stream(stream_.device, &stream_.handle) == 0,
          "torch has no CUDA stream");
  }
  void check_here(const Tensor& tensor, const char* name) const {
    check(tensor.is_cuda() && tensor.get_device_index() == stream_.device,
          std::string(name) + " must be on device cuda:" + std::to_string(stream_.device));
  }
#endif
  const Stream& stream() const { return stream_; }

  // Throws what a launch returned, unless it is 0.
  void done(int code, const char* what) const {
    if (code) {
      throw std::runtime_error(std::string(what) + " failed: " + pyg_scale_cuda_error(code));
    }
  }

 private:
  Stream stream_;
#if !defined(PYG_SCALE_EMULATED)
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

inline Type type_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Type::kFloat;
    case ScalarType::Double: return Type::kDouble;
    case ScalarType::BFloat16: return Type::kBfloat16;
    case ScalarType::Half: return Type::kHalf;
    default: fail(std::string(name) + " must be float32, float64, bfloat16 or float16");
  }
}

inline ScalarType accumulator_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <typename T = void>
const T* data_of(const Tensor& tensor) {
  return tensor.numel() ? static_cast<const T*>(tensor.const_data_ptr()) : nullptr;
}
template <typename T = void>
T* data_of(Tensor& tensor) {
  return tensor.numel() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

inline Tensor empty_like(const Tensor& x, const std::vector<int64_t>& sizes, ScalarType type) {
  return torch::stable::new_empty(x, sizes, type);
}

// Contiguous integers.
inline Tensor integers(const OnDevice& device, const Tensor& tensor, int64_t numel,
                       const char* name) {
  device.check_here(tensor, name);
  const ScalarType type = tensor.scalar_type();
  check(tensor.dim() == 1 && (type == ScalarType::Long || type == ScalarType::Int),
        std::string(name) + " must be a one-dimensional int64 or int32 tensor");
  check(numel < 0 || tensor.numel() == numel, std::string(name) + " has " +
                                                  std::to_string(tensor.numel()) +
                                                  " entries, expected " + std::to_string(numel));
  return torch::stable::contiguous(tensor);
}

inline Column column_of(const Tensor& tensor) {
  return {data_of(tensor), tensor.scalar_type() == ScalarType::Long};
}

// Contiguous numbers of a given type and count.
inline Tensor dense(const OnDevice& device, const Tensor& x, ScalarType type, int64_t numel,
                    const char* name) {
  device.check_here(x, name);
  check(x.scalar_type() == type, std::string(name) + " has the wrong type");
  check(x.numel() == numel, std::string(name) + " has " + std::to_string(x.numel()) +
                                " numbers, expected " + std::to_string(numel));
  return torch::stable::contiguous(x);
}

// The edges of each row, and the tensors that hold them. `row_size`: numbers that a row of the
// result has, of all heads.
struct Edges {
  Edges(const OnDevice& device, const Tensor& pointers, const Tensor& sources,
        const MaybeTensor& ids, int64_t num_columns, int64_t row_size) {
    check(pointers.numel() > 0 && pointers.scalar_type() == ScalarType::Long,
          "indptr must be int64, with one number more than there are rows");
    indptr = integers(device, pointers, -1, "indptr");
    indices = integers(device, sources, -1, "indices");
    const int64_t edges = indices.numel();
    check(indptr.numel() > 1 || edges == 0, "there are edges, but indptr has no rows");
    graph = {data_of<int64_t>(indptr),
             column_of(indices),
             {nullptr, false},
             indptr.numel() - 1,
             edges,
             num_columns,
             chunk_of(edges, row_size)};
    if (ids) {
      edge_id = integers(device, *ids, edges, "edge_id");
      graph.edge_id = column_of(edge_id);
    }
  }

  Tensor indptr, indices, edge_id;
  Graph graph;
};

// A tensor with rows, [rows, ...], each of them contiguous; a copy if they are not.
struct Rows {
  Rows() = default;
  Rows(const OnDevice& device, const Tensor& x, const char* name) : tensor(x) {
    device.check_here(x, name);
    check(x.dim() >= 2, std::string(name) + " must have rows");
    size = 1;
    bool dense = true;
    for (int64_t d = x.dim() - 1; d >= 1; --d) {
      dense = dense && (x.size(d) == 1 || x.stride(d) == size);
      size *= x.size(d);
    }
    if (!dense) tensor = torch::stable::contiguous(x);
    count = tensor.size(0);
    matrix = {data_of(std::as_const(tensor)), count > 1 ? tensor.stride(0) : size};
  }

  Tensor tensor;
  int64_t count = 0, size = 0;
  Matrix matrix{nullptr, 0};
};

}  // namespace pyg_scale::cuda
