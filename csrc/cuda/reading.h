// Tensors that kernels read where they are: on the device, or in memory of the host that was mapped
// for it (pyg_scale/ops/mapped_rows.py).
#pragma once

#include <utility>
#include <vector>

#include "loading.h"
#include "tensors.h"

namespace pyg_scale::cuda {

// Where the device has memory of the host; null if it was not mapped.
inline const void* mapped(const Tensor& tensor, const OnDevice& device) {
  const void* there = nullptr;
  if (!tensor.is_cpu() || !tensor.numel()) return nullptr;
  const int code = pyg_scale_cuda_mapped(device.stream().device, tensor.const_data_ptr(), &there);
  return code ? nullptr : there;
}

// Numbers as kernels take them. They are valid as long as this object lives.
class Reading {
 public:
  explicit Reading(const OnDevice& device) : device_(device) {}

  // Contiguous int64.
  const int64_t* longs(const Tensor& tensor, int64_t numel, const char* name) {
    const void* there = mapped(tensor, device_);
    if (!there)
      return data_of<int64_t>(keep(dense(device_, tensor, ScalarType::Long, numel, name)));
    check(tensor.scalar_type() == ScalarType::Long && tensor.numel() == numel &&
              tensor.is_contiguous(),
          std::string(name) + " must be contiguous int64 with an entry for each position");
    return static_cast<const int64_t*>(there);
  }
  // The same; null if there are none.
  const int64_t* maybe(const Tensor& tensor, int64_t numel, const char* name) {
    return tensor.numel() ? longs(tensor, numel, name) : nullptr;
  }
  // Integers; those of the host stay in their places, at any distance from each other.
  Spaced integers(const Tensor& tensor, int64_t numel, const char* name) {
    const void* there = mapped(tensor, device_);
    if (!there) return {column_of(keep(cuda::integers(device_, tensor, numel, name))), 1};
    const ScalarType type = tensor.scalar_type();
    check(tensor.dim() == 1 && (type == ScalarType::Long || type == ScalarType::Int) &&
              (numel < 0 || tensor.numel() == numel),
          std::string(name) + " must be int64 or int32 with an entry for each position");
    return {{there, type == ScalarType::Long}, tensor.stride(0)};
  }

 private:
  const Tensor& keep(Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

  const OnDevice& device_;
  std::vector<Tensor> kept_;
};

}  // namespace pyg_scale::cuda
