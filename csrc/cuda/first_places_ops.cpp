// first_places on a device, see pyg_scale/ops/first_places.py.

#include <algorithm>
#include <limits>
#include <utility>

#include "loading.h"
#include "tensors.h"

namespace pyg_scale::cuda {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

Tensor first_places(Tensor key, int64_t distinct) {
  const OnDevice device(key);
  const int64_t count = key.numel();
  check(count <= kMost, "key must have less than 2**31 numbers");
  const Tensor keys = dense(device, key, ScalarType::Long, count, "key");
  Tensor out = empty_like(key, {count}, ScalarType::Long);
  FirstPlaces args{};
  args.key = data_of<int64_t>(keys);
  args.count = count;
  args.slots = 64;
  while (args.slots < 2 * std::min(count, distinct)) args.slots *= 2;
  Tensor held = empty_like(key, {args.slots}, ScalarType::Long);
  Tensor least = empty_like(key, {args.slots}, ScalarType::Int);
  args.held = reinterpret_cast<uint64_t*>(data_of<int64_t>(held));
  args.least = reinterpret_cast<uint32_t*>(data_of<int32_t>(least));
  args.out = data_of<int64_t>(out);
  device.done(pyg_scale_cuda_first_places(&args, device.stream()), "first_places");
  return out;
}

}  // namespace
}  // namespace pyg_scale::cuda

PYG_SCALE_DEVICE_LIBRARY(m) { m.impl("first_places", TORCH_BOX(&pyg_scale::cuda::first_places)); }
