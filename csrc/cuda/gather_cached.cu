// Launches the kernel of gather_cached, and lets the device read memory of the host.

#include "gather_cached.cuh"
#include "launch.cuh"

namespace pyg_scale::cuda {
namespace {

template <int kBytes>
cudaError_t run(const GatherCached& args, void* stream) {
  const int lanes = lanes_for(args.row_bytes / kBytes);
  return launch(gather_cached_kernel<kBytes>, blocks_for(args.count, lanes), 1, stream, args, lanes);
}

// Whether rows can be copied in words of so many bytes.
bool fits(const GatherCached& args, int64_t bytes) {
  const auto aligned = [&](const void* data) {
    return reinterpret_cast<uint64_t>(data) % static_cast<uint64_t>(bytes) == 0;
  };
  const auto rows = [&](const ByteRows& of) {
    return !of.count || (aligned(of.data) && of.stride % bytes == 0);
  };
  return args.row_bytes % bytes == 0 && aligned(args.out) && rows(args.cached) && rows(args.rest);
}

// An error that somebody was told of is not found again by the next launch.
int told(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace
}  // namespace pyg_scale::cuda

extern "C" int pyg_scale_cuda_gather_cached(const pyg_scale::cuda::GatherCached* args,
                                            void* stream) {
  using namespace pyg_scale::cuda;
  if (args->count == 0 || args->row_bytes == 0) return cudaSuccess;
  if (fits(*args, 16)) return run<16>(*args, stream);
  if (fits(*args, 8)) return run<8>(*args, stream);
  if (fits(*args, 4)) return run<4>(*args, stream);
  if (fits(*args, 2)) return run<2>(*args, stream);
  return run<1>(*args, stream);
}

extern "C" int pyg_scale_cuda_map_host(void* data, int64_t bytes) {
  return pyg_scale::cuda::told(cudaHostRegister(data, static_cast<size_t>(bytes),
                                                cudaHostRegisterPortable | cudaHostRegisterMapped));
}

extern "C" int pyg_scale_cuda_unmap_host(void* data) {
  // Kernels that read it may be under way.
  const cudaError_t done = cudaDeviceSynchronize();
  const cudaError_t gone = cudaHostUnregister(data);
  return pyg_scale::cuda::told(done == cudaSuccess ? gone : done);
}

extern "C" int pyg_scale_cuda_mapped(const void* data, const void** there) {
  void* found = nullptr;
  const cudaError_t done = cudaHostGetDevicePointer(&found, const_cast<void*>(data), 0);
  *there = found;
  return pyg_scale::cuda::told(done);
}
