// keyed_draws: keys.h as seen from Python, to compare it with pyg_scale/ops/keys.py.

#include "keys.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "graph_view.h"

namespace pyg_scale {
namespace {

// bounded(key, index[i], size[i]); a size of 0 stands for the word itself.
Tensor keyed_draws(int64_t key, Tensor index, Tensor size) {
  const int64_t count = index.numel();
  const int64_t* words = int64_data(index, count, "index");
  const int64_t* sizes = int64_data(size, count, "size");
  Tensor out = torch::stable::empty({count}, ScalarType::Long);
  int64_t* data = out.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (sizes[i] < 0) fail("size must not be negative");
    const auto word = static_cast<uint64_t>(words[i]);
    const auto bound = static_cast<uint64_t>(sizes[i]);
    const uint64_t drawn = bound ? bounded(static_cast<uint64_t>(key), word, bound)
                                 : draw(static_cast<uint64_t>(key), word);
    data[i] = static_cast<int64_t>(drawn);
  }
  return out;
}

// bounded(fold(key, i), 0, size) for i from 0 to count - 1.
Tensor keyed_draws_each(int64_t key, int64_t count, int64_t size) {
  check_count(count, "count");
  check(size >= 1, "size must be at least 1");
  Tensor out = torch::stable::empty({count}, ScalarType::Long);
  int64_t* data = out.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t own = fold(static_cast<uint64_t>(key), static_cast<uint64_t>(i));
    data[i] = static_cast<int64_t>(bounded(own, 0, static_cast<uint64_t>(size)));
  }
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def("keyed_draws(int key, Tensor index, Tensor size) -> Tensor");
  m.def("keyed_draws_each(int key, int count, int size) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("keyed_draws", TORCH_BOX(&pyg_scale::keyed_draws));
  m.impl("keyed_draws_each", TORCH_BOX(&pyg_scale::keyed_draws_each));
}
