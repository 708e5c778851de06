// The functions of the CUDA driver that csrc/cuda/driver.cpp calls, on top of the emulator.
//
// Linked beside it, they are found instead of libcuda.so.1. Compiled with PYG_SCALE_LIBCUDA, they
// are that library. A module is the text "emulated" or the output of a compiler, which must name
// the kernels. A kernel runs within its launch, from the functions that were compiled into the
// emulator.

#include "driver.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulator.h"

#if defined(PYG_SCALE_LIBCUDA)
#define PYG_SCALE_DRIVER __attribute__((visibility("default")))
#else
#include "../cuda/driver.h"
#define PYG_SCALE_DRIVER
#endif

namespace {

using namespace emulator;

enum : int {
  kInvalidValue = 1,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNotFound = 500,
  kInvalidHandle = 400,
  kAlreadyRegistered = 712,
  kTooLarge = 720,
  kNotRegistered = 713,
  kCaptureUnsupported = 900,
};

struct Context {
  int device;
};
Context contexts[2] = {{0}, {1}};
thread_local std::vector<Context*> stack;
constexpr int kRelaxed = 2;
thread_local int capture_mode = 0;

struct Module {
  Context* context;
  std::string image;  // empty for "emulated"
};
struct Loaded {
  Module* module;
  const Kernel* kernel;
};

std::mutex mutex;
std::deque<Module> modules;
std::deque<Loaded> functions;

// Memory of the host that a device reads. Its address there is another one, which has what the host
// had when it was registered: who reads by the wrong address reads what was written since.
struct Registered {
  Registered(const char* data, size_t bytes) : bytes(bytes), held(new char[bytes + 2 * kPage]) {
    const auto at = reinterpret_cast<uintptr_t>(held.get());
    device = held.get() + (reinterpret_cast<uintptr_t>(data) - at) % kPage;
    std::memcpy(device, data, bytes);
  }
  static constexpr size_t kPage = 4096;
  size_t bytes;
  std::unique_ptr<char[]> held;
  char* device;  // as aligned as on the host
};
std::map<const char*, Registered> registered;  // by address

// The bytes of an ELF file with 64-bit headers, which say how long it is; empty for anything else.
std::string image_of(const void* data) {
  const char* bytes = static_cast<const char*>(data);
  if (std::strncmp(bytes, "\177ELF", 4) != 0) return {};
  uint64_t sections = 0;
  uint16_t size = 0, count = 0;
  std::memcpy(&sections, bytes + 40, 8);
  std::memcpy(&size, bytes + 58, 2);
  std::memcpy(&count, bytes + 60, 2);
  return std::string(bytes, sections + size_t{size} * count);
}

int launch(const void* function, dim3 grid, dim3 size, unsigned shared_bytes, const void* stream,
           void** args, bool together) {
  const Loaded* loaded = static_cast<const Loaded*>(function);
  if (stack.empty() || stack.back() != loaded->module->context) return kInvalidContext;
  if (stream != kStream.handle || stack.back()->device != kStream.device) return kInvalidHandle;
  if (size.x != pyg_scale::cuda::kBlockThreads || shared_bytes) return kInvalidValue;
  ++counts.launches;
  return run(grid, size, [&] { loaded->kernel->call(args); }, together);
}

}  // namespace

extern "C" {

PYG_SCALE_DRIVER int cuInit(unsigned flags) { return flags ? kInvalidValue : 0; }

PYG_SCALE_DRIVER int cuGetErrorName(int, const char** name) {
  *name = "emulated";
  return 0;
}

PYG_SCALE_DRIVER int cuGetErrorString(int code, const char** text) {
  switch (code) {
    case kInvalidDevice: *text = "invalid device ordinal"; break;
    case kInvalidContext: *text = "invalid device context"; break;
    case kNotFound: *text = "named symbol not found"; break;
    case kInvalidHandle: *text = "invalid resource handle"; break;
    case kAlreadyRegistered: *text = "part or all of it is registered already"; break;
    case kTooLarge: *text = "too many blocks in cooperative launch"; break;
    case kNotRegistered: *text = "it is not registered"; break;
    case emulator::kLaunchFailed: *text = last_error(); break;
    default: *text = "invalid argument";
  }
  return 0;
}

PYG_SCALE_DRIVER int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 || ordinal == 1 ? 0 : kInvalidDevice;
}

PYG_SCALE_DRIVER int cuDeviceGetAttribute(int* value, int attribute, int) {
  const char* given = std::getenv("PYG_SCALE_EMULATOR_CAPABILITY");
  const int capability = given ? std::atoi(given) : 90;
  if (attribute == 16) {  // few multiprocessors
    *value = 3;
    return 0;
  }
  if (attribute != 75 && attribute != 76) return kInvalidValue;
  *value = attribute == 75 ? capability / 10 : capability % 10;
  return 0;
}

PYG_SCALE_DRIVER int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &contexts[device];
  return 0;
}

PYG_SCALE_DRIVER int cuCtxGetCurrent(void** context) {
  *context = stack.empty() ? nullptr : stack.back();
  return 0;
}

PYG_SCALE_DRIVER int cuCtxPushCurrent_v2(void* context) {
  stack.push_back(static_cast<Context*>(context));
  return 0;
}

PYG_SCALE_DRIVER int cuCtxPopCurrent_v2(void** context) {
  if (stack.empty()) return kInvalidContext;
  *context = stack.back();
  stack.pop_back();
  return 0;
}

PYG_SCALE_DRIVER int cuCtxSynchronize() {
  if (stack.empty() || capture_mode != kRelaxed) return kInvalidContext;
  return std::getenv("PYG_SCALE_EMULATOR_CAPTURES") ? kCaptureUnsupported : 0;
}

PYG_SCALE_DRIVER int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}

PYG_SCALE_DRIVER int cuModuleLoadData(void** module, const void* image) {
  if (stack.empty() || capture_mode != kRelaxed) return kInvalidContext;
  std::string bytes = image_of(image);
  if (bytes.empty() && std::strcmp(static_cast<const char*>(image), "emulated") != 0) {
    return kInvalidValue;
  }
  const std::lock_guard lock(mutex);
  *module = &modules.emplace_back(Module{stack.back(), std::move(bytes)});
  return 0;
}

PYG_SCALE_DRIVER int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (capture_mode != kRelaxed) return kInvalidContext;  // its code may be loaded now
  Module* from = static_cast<Module*>(module);
  const Kernel* kernel = Kernel::find(name);
  const std::string entry = std::string("\0", 1) + name + std::string("\0", 1);
  const bool held = from->image.empty() || from->image.find(entry) != std::string::npos;
  if (!kernel || !held) return kNotFound;
  const std::lock_guard lock(mutex);
  *function = &functions.emplace_back(Loaded{from, kernel});
  return 0;
}

PYG_SCALE_DRIVER int cuLaunchKernel(void* function, unsigned blocks, unsigned tiles, unsigned depth,
                                    unsigned x, unsigned y, unsigned z, unsigned shared_bytes,
                                    void* stream, void** args, void** extra) {
  return extra ? kInvalidValue
               : launch(function, dim3(blocks, tiles, depth), dim3(x, y, z), shared_bytes, stream,
                        args, false);
}

PYG_SCALE_DRIVER int cuLaunchCooperativeKernel(void* function, unsigned blocks, unsigned tiles,
                                               unsigned depth, unsigned x, unsigned y, unsigned z,
                                               unsigned shared_bytes, void* stream, void** args) {
  if (blocks > 3 * 2) return kTooLarge;
  return launch(function, dim3(blocks, tiles, depth), dim3(x, y, z), shared_bytes, stream, args,
                true);
}

PYG_SCALE_DRIVER int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads,
                                                                 size_t shared_bytes) {
  if (stack.empty() || threads != pyg_scale::cuda::kBlockThreads || shared_bytes) {
    return kInvalidValue;
  }
  *blocks = 2;
  return 0;
}

PYG_SCALE_DRIVER int cuMemsetD32Async(uint64_t data, unsigned value, size_t count, void* stream) {
  if (stack.empty()) return kInvalidContext;
  if (stream != kStream.handle || stack.back()->device != kStream.device) return kInvalidHandle;
  ++counts.launches;
  auto* to = reinterpret_cast<unsigned*>(static_cast<uintptr_t>(data));
  for (size_t i = 0; i < count; ++i) to[i] = value;
  return 0;
}

PYG_SCALE_DRIVER int cuMemHostRegister_v2(void* data, size_t bytes, unsigned flags) {
  if (!data || !bytes || flags != 3 || stack.empty()) return kInvalidValue;
  const std::lock_guard lock(mutex);
  const char* begin = static_cast<const char*>(data);
  for (const auto& [at, there] : registered) {
    if (begin < at + there.bytes && at < begin + bytes) return kAlreadyRegistered;
  }
  registered.emplace(begin, Registered(begin, bytes));
  return 0;
}

PYG_SCALE_DRIVER int cuMemHostUnregister(void* data) {
  const std::lock_guard lock(mutex);
  return registered.erase(static_cast<const char*>(data)) ? 0 : kNotRegistered;
}

PYG_SCALE_DRIVER int cuMemHostGetDevicePointer_v2(uint64_t* there, void* data, unsigned) {
  const std::lock_guard lock(mutex);
  const char* wanted = static_cast<const char*>(data);
  for (const auto& [at, of] : registered) {
    if (wanted >= at && wanted < at + of.bytes) {
      *there = reinterpret_cast<uintptr_t>(of.device + (wanted - at));
      return 0;
    }
  }
  return kInvalidValue;
}

// The names of all kernels, a line each.
PYG_SCALE_DRIVER const char* pyg_scale_emulated_kernels() {
  static const std::string names = Kernel::names();
  return names.c_str();
}

}  // extern "C"

#if !defined(PYG_SCALE_LIBCUDA)
namespace {

void* find(const char* name) {
#define PYG_SCALE_FIND(function) \
  if (std::strcmp(name, #function) == 0) return reinterpret_cast<void*>(function);
  PYG_SCALE_FIND(cuInit)
  PYG_SCALE_FIND(cuGetErrorName)
  PYG_SCALE_FIND(cuGetErrorString)
  PYG_SCALE_FIND(cuDeviceGet)
  PYG_SCALE_FIND(cuDeviceGetAttribute)
  PYG_SCALE_FIND(cuDevicePrimaryCtxRetain)
  PYG_SCALE_FIND(cuCtxGetCurrent)
  PYG_SCALE_FIND(cuCtxPushCurrent_v2)
  PYG_SCALE_FIND(cuCtxPopCurrent_v2)
  PYG_SCALE_FIND(cuCtxSynchronize)
  PYG_SCALE_FIND(cuThreadExchangeStreamCaptureMode)
  PYG_SCALE_FIND(cuModuleLoadData)
  PYG_SCALE_FIND(cuModuleGetFunction)
  PYG_SCALE_FIND(cuLaunchKernel)
  PYG_SCALE_FIND(cuLaunchCooperativeKernel)
  PYG_SCALE_FIND(cuOccupancyMaxActiveBlocksPerMultiprocessor)
  PYG_SCALE_FIND(cuMemsetD32Async)
  PYG_SCALE_FIND(cuMemHostRegister_v2)
  PYG_SCALE_FIND(cuMemHostUnregister)
  PYG_SCALE_FIND(cuMemHostGetDevicePointer_v2)
  return nullptr;
}

int compile(const char*, const char*, int, void* answer) {
  pyg_scale_cuda_answer(answer, "emulated", sizeof("emulated"));
  return 1;
}

const bool linked = (pyg_scale_cuda_find_with(find), pyg_scale_cuda_compile_with(compile), true);

}  // namespace

const pyg_scale::cuda::Image pyg_scale_cuda_images[] = {{nullptr, nullptr}};
#endif
