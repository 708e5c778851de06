// Output tensors on recycled memory: faulting in fresh pages costs more than filling them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace pyg_scale {

// A contiguous, uninitialised tensor on the CPU. Its memory is used again once the last tensor
// on it is gone, never before. May be called, and the tensor may die, on any thread.
torch::stable::Tensor pool_empty(const std::vector<int64_t>& sizes,
                                 torch::headeronly::ScalarType dtype);

// The same for tensors that stay: memory of its own, on huge pages, given back when it is gone.
torch::stable::Tensor huge_empty(const std::vector<int64_t>& sizes,
                                 torch::headeronly::ScalarType dtype);

}  // namespace pyg_scale
