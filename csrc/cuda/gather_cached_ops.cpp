// gather_cached, map_rows and unmap_rows on a device, see pyg_scale/ops/gather_cached.py and
// pyg_scale/ops/mapped_rows.py.

#include <utility>

#include "reading.h"

#if defined(PYG_SCALE_EMULATED)
#define PYG_SCALE_HOST_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(pyg_scale_emulated, CPU, m)
#else
#define PYG_SCALE_HOST_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CPU, m)
#endif

namespace pyg_scale::cuda {
namespace {

// The bytes of rows, each of them contiguous.
struct Bytes {
  Bytes(const Tensor& x, const char* name) : tensor(x) {
    check(x.dim() >= 1, std::string(name) + " must have rows");
    int64_t numel = 1;
    bool dense = true;
    for (int64_t d = x.dim() - 1; d >= 1; --d) {
      dense = dense && (x.size(d) == 1 || x.stride(d) == numel);
      numel *= x.size(d);
    }
    if (!dense) tensor = torch::stable::contiguous(x);
    const auto item = static_cast<int64_t>(x.element_size());
    row = numel * item;
    const int64_t stride = tensor.size(0) > 1 ? tensor.stride(0) * item : row;
    rows = {static_cast<const char*>(data_of(std::as_const(tensor))), tensor.size(0), stride};
  }
  Tensor tensor;
  int64_t row;
  ByteRows rows;
};

Tensor gather_cached(Tensor cached, Tensor rest, Tensor index, MaybeTensor slot_of) {
  const OnDevice device(cached);
  const Bytes held(cached, "cached");
  check(rest.dim() == cached.dim() && rest.scalar_type() == cached.scalar_type(),
        "rest must have rows like those of cached");
  for (int64_t d = 1; d < cached.dim(); ++d) {
    check(rest.size(d) == cached.size(d), "rest must have rows like those of cached");
  }
  const void* there = mapped(rest, device);
  if (there) {
    check(rest.is_contiguous(), "rest must be contiguous, to be read by a device");
  } else if (rest.numel()) {
    device.check_here(rest, "rest (which is not mapped)");
  }
  Bytes left(rest, "rest");
  if (there) left.rows.data = static_cast<const char*>(there);
  const Tensor ids = integers(device, index, -1, "index");
  Tensor slots;
  if (slot_of) {
    slots = dense(device, *slot_of, ScalarType::Int, rest.size(0), "slot_of");
  }
  std::vector<int64_t> sizes{ids.numel()};
  for (int64_t d = 1; d < cached.dim(); ++d) sizes.push_back(cached.size(d));
  Tensor out = empty_like(cached, sizes, cached.scalar_type());
  const GatherCached args{
      held.rows,        left.rows,
      column_of(ids),   slot_of ? data_of<int32_t>(std::as_const(slots)) : nullptr,
      ids.numel(),      held.row,
      there != nullptr, static_cast<char*>(data_of(out))};
  device.done(pyg_scale_cuda_gather_cached(&args, device.stream()), "gather_cached");
  return out;
}

void check_code(int code, const char* what) {
  if (code) throw std::runtime_error(std::string(what) + ": " + pyg_scale_cuda_error(code));
}

void map_rows(Tensor x, int64_t device) {
  check(x.is_cpu() && x.is_contiguous() && x.numel() > 0, "x must be contiguous, on the CPU");
  const int64_t bytes = x.numel() * static_cast<int64_t>(x.element_size());
  check_code(pyg_scale_cuda_map_host(static_cast<int32_t>(device), x.mutable_data_ptr(), bytes),
             "cuMemHostRegister");
}

bool unmap_rows(Tensor x, int64_t device) {
  bool done = false;
  check_code(pyg_scale_cuda_unmap_host(static_cast<int32_t>(device), x.mutable_data_ptr(), &done),
             "cuMemHostUnregister");
  return done;
}

}  // namespace
}  // namespace pyg_scale::cuda

PYG_SCALE_DEVICE_LIBRARY(m) { m.impl("gather_cached", TORCH_BOX(&pyg_scale::cuda::gather_cached)); }

PYG_SCALE_HOST_LIBRARY(m) {
  m.impl("map_rows", TORCH_BOX(&pyg_scale::cuda::map_rows));
  m.impl("unmap_rows", TORCH_BOX(&pyg_scale::cuda::unmap_rows));
}
