// The CUDA driver behind driver.h. Its types and numbers are its binary interface. They are written
// out, as only machines with CUDA have cuda.h.

#include "driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>

namespace pyg_scale::cuda {
namespace {

constexpr int kMajor = 75, kMinor = 76;             // attributes: compute capability
constexpr int kMultiprocessors = 16;                // another one
constexpr int kRelaxed = 2;                         // of captures
constexpr unsigned kPortableAndMapped = 1u | 2;     // for every device, in its address space
constexpr int kUnsupported = 900, kCaptured = 907;  // the first and last error of captures
constexpr int kFailed = -1;

thread_local std::string failure;  // of this thread's last call

struct Failure : std::runtime_error {
  Failure(int code, const std::string& text) : std::runtime_error(text), code(code) {}
  int code;
};

// Runs what may fail, and remembers why.
template <typename F>
int guarded(const F& f) {
  try {
    f();
    return 0;
  } catch (const Failure& error) {
    failure = error.what();
    return error.code;
  } catch (const std::exception& error) {
    failure = error.what();
    return kFailed;
  }
}

void* (*find_with)(const char*) = nullptr;
pyg_scale_cuda_compile compile_with = nullptr;

void* find(const char* name) {
  if (find_with) return find_with(name);
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) throw Failure(kFailed, "there is no CUDA driver here: libcuda.so.1 is not found");
  return dlsym(library, name);
}

// A function of the driver, by its versioned name.
template <typename... Parameters>
class Function {
 public:
  explicit Function(const char* name)
      : call_(reinterpret_cast<int (*)(Parameters...)>(find(name))) {
    if (!call_) throw Failure(kFailed, std::string("the CUDA driver is too old: no ") + name);
  }
  int code(Parameters... args) const { return call_(args...); }

 private:
  int (*call_)(Parameters...);
};

struct Driver {
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  Driver() { check(init.code(0), "cuInit"); }

  // Throws what a call returned, unless it is 0.
  void check(int code, const char* what) const {
    if (!code) return;
    const char *name = nullptr, *text = nullptr;
    error_name.code(code, &name);
    error_string.code(code, &text);
    throw Failure(code, std::string(text ? text : "unknown error") + " (" + what + ": " +
                            (name ? name : std::to_string(code).c_str()) + ")");
  }

  Function<unsigned> init{"cuInit"};
  Function<int, const char**> error_name{"cuGetErrorName"}, error_string{"cuGetErrorString"};
  Function<int*, int> device{"cuDeviceGet"};
  Function<int*, int, int> attribute{"cuDeviceGetAttribute"};
  Function<void**, int> retain{"cuDevicePrimaryCtxRetain"};
  Function<void**> current{"cuCtxGetCurrent"};
  Function<void*> push{"cuCtxPushCurrent_v2"};
  Function<void**> pop{"cuCtxPopCurrent_v2"};
  Function<> synchronize{"cuCtxSynchronize"};
  Function<int*> exchange_capture{"cuThreadExchangeStreamCaptureMode"};
  Function<void**, const void*> load{"cuModuleLoadData"};
  Function<void**, void*, const char*> function{"cuModuleGetFunction"};
  Function<void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
           void**, void**>
      launch{"cuLaunchKernel"};
  Function<void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
           void**>
      launch_together{"cuLaunchCooperativeKernel"};
  Function<int*, void*, int, size_t> most_blocks{"cuOccupancyMaxActiveBlocksPerMultiprocessor"};
  Function<uint64_t, unsigned, size_t, void*> fill{"cuMemsetD32Async"};
  Function<void*, size_t, unsigned> lock_host{"cuMemHostRegister_v2"};
  Function<void*> unlock_host{"cuMemHostUnregister"};
  Function<uint64_t*, void*, unsigned> host_pointer{"cuMemHostGetDevicePointer_v2"};
};

// Makes a context this thread's current one as long as the object lives. A thread has no context
// until torch makes one for it.
class Within {
 public:
  explicit Within(void* context) {
    void* now = nullptr;
    driver_.check(driver_.current.code(&now), "cuCtxGetCurrent");
    if (now == context) return;
    driver_.check(driver_.push.code(context), "cuCtxPushCurrent");
    pushed_ = true;
  }
  ~Within() {
    void* popped = nullptr;
    if (pushed_) driver_.pop.code(&popped);
  }
  Within(const Within&) = delete;

 private:
  const Driver& driver_ = Driver::get();
  bool pushed_ = false;
};

// Lets this thread do what may wait for the device while a stream records a graph. Without it, that
// would end the recording.
class Relaxed {
 public:
  Relaxed() {
    driver_.check(driver_.exchange_capture.code(&mode_), "cuThreadExchangeStreamCaptureMode");
  }
  ~Relaxed() { driver_.exchange_capture.code(&mode_); }
  Relaxed(const Relaxed&) = delete;

 private:
  const Driver& driver_ = Driver::get();
  int mode_ = kRelaxed;
};

// Modules ###################################################################################

struct Answer {
  std::string bytes;
};

const void* held_image(const char* file) {
  const Image* image = pyg_scale_cuda_images;
  while (image->file && std::strcmp(image->file, file) != 0) ++image;
  return image->data;
}

// A device, with the modules that it has loaded. They stay until the process ends.
class Device {
 public:
  static Device& of(int32_t index) {
    static std::mutex mutex;
    static std::map<int32_t, std::unique_ptr<Device>> devices;
    const std::lock_guard lock(mutex);
    std::unique_ptr<Device>& found = devices[index];
    if (!found) found.reset(new Device(index));
    return *found;
  }

  void* context() const { return context_; }

  void* function(const Source& source, const std::string& kernel) {
    {
      const std::shared_lock lock(mutex_);
      const auto found = functions_.find(kernel);
      if (found != functions_.end()) return found->second;
    }
    const Relaxed relaxed;  // code is loaded with its module, or only when a kernel is looked up
    void* const module = module_of(source);
    void* function = nullptr;
    driver_.check(driver_.function.code(&function, module, kernel.c_str()),
                  ("cuModuleGetFunction " + kernel).c_str());
    const std::unique_lock lock(mutex_);
    return functions_[kernel] = function;
  }

  // The blocks of a kernel that half of the device runs at the same time, one at least.
  int64_t half(void* function) {
    const std::unique_lock lock(mutex_);
    int64_t& found = halves_[function];
    if (!found) {
      int each = 0;
      driver_.check(driver_.most_blocks.code(&each, function, kBlockThreads, 0),
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor");
      const int64_t all = int64_t{each} * multiprocessors_;
      if (all < 1) throw Failure(kFailed, "the device cannot run a block of a kernel");
      found = all / 2 > 0 ? all / 2 : 1;
    }
    return found;
  }

 private:
  explicit Device(int32_t index) {
    int device = 0, major = 0, minor = 0;
    driver_.check(driver_.device.code(&device, index), "cuDeviceGet");
    driver_.check(driver_.attribute.code(&major, kMajor, device), "cuDeviceGetAttribute");
    driver_.check(driver_.attribute.code(&minor, kMinor, device), "cuDeviceGetAttribute");
    driver_.check(driver_.attribute.code(&multiprocessors_, kMultiprocessors, device),
                  "cuDeviceGetAttribute");
    driver_.check(driver_.retain.code(&context_, device), "cuDevicePrimaryCtxRetain");
    capability_ = 10 * major + minor;
  }

  // The lock is not held while a module is compiled.
  void* module_of(const Source& source) {
    Answer answer;
    const int given =
        compile_with ? compile_with(source.file, source.type, capability_, &answer) : 0;
    if (given != 0 && given != 1) throw Failure(kFailed, answer.bytes);
    const void* image = given ? answer.bytes.data() : held_image(source.file);
    if (!image) throw Failure(kFailed, "this library holds no kernels for CUDA");
    const std::string name = std::string(source.file) + (given ? source.type : "");
    const std::unique_lock lock(mutex_);
    void*& module = modules_[name];
    if (!module) {
      // What nvcc made may be of a later CUDA than the driver's.
      const char* hint = given ? "" : "; PYG_SCALE_CUDA=nvrtc has it compiled by torch's own NVRTC";
      driver_.check(driver_.load.code(&module, image),
                    ("cuModuleLoadData of " + name + hint).c_str());
    }
    return module;
  }

  const Driver& driver_ = Driver::get();
  void* context_ = nullptr;
  int capability_ = 0, multiprocessors_ = 0;
  std::shared_mutex mutex_;
  std::unordered_map<std::string, void*> functions_;
  std::unordered_map<void*, int64_t> halves_;
  std::map<std::string, void*> modules_;
};

}  // namespace

// Interface #################################################################################

int launch(const Stream& stream, const Source& source, const std::string& kernel, int64_t blocks,
           int64_t tiles, const void* args, int lanes) {
  if (blocks == 0 || tiles == 0) return 0;
  return guarded([&] {
    if (blocks > 0x7fffffff || tiles > 0xffff) {
      throw Failure(kFailed, "a grid of " + std::to_string(blocks) + " by " +
                                 std::to_string(tiles) + " blocks is more than a device takes");
    }
    const Driver& driver = Driver::get();
    Device& device = Device::of(stream.device);
    const Within within(device.context());
    void* const function = device.function(source, kernel);
#if defined(PYG_SCALE_FAULT_ARGUMENT_ORDER)
    void* given[] = {&lanes, const_cast<void*>(args)};
#else
    void* given[] = {const_cast<void*>(args), &lanes};
#endif
    driver.check(
        driver.launch.code(function, static_cast<unsigned>(blocks), static_cast<unsigned>(tiles), 1,
                           kBlockThreads, 1, 1, 0, stream.handle, given, nullptr),
        kernel.c_str());
  });
}

int launch_together(const Stream& stream, const Source& source, const std::string& kernel,
                    int64_t most, const void* args) {
  if (most <= 0) return 0;
  return guarded([&] {
    const Driver& driver = Driver::get();
    Device& device = Device::of(stream.device);
    const Within within(device.context());
    void* const function = device.function(source, kernel);
    const int64_t blocks = std::min(most, device.half(function));
    int lanes = 1;
    void* given[] = {const_cast<void*>(args), &lanes};
    driver.check(driver.launch_together.code(function, static_cast<unsigned>(blocks), 1, 1,
                                             kBlockThreads, 1, 1, 0, stream.handle, given),
                 kernel.c_str());
  });
}

int clear(const Stream& stream, int32_t* data, int64_t count) {
  if (count == 0) return 0;
  return guarded([&] {
    const Driver& driver = Driver::get();
    const Within within(Device::of(stream.device).context());
    driver.check(driver.fill.code(reinterpret_cast<uintptr_t>(data), 0, static_cast<size_t>(count),
                                  stream.handle),
                 "cuMemsetD32Async");
  });
}

int map_host(int32_t device, void* data, size_t bytes) {
  return guarded([&] {
    const Driver& driver = Driver::get();
    const Within within(Device::of(device).context());
    driver.check(driver.lock_host.code(data, bytes, kPortableAndMapped), "cuMemHostRegister");
  });
}

int unmap_host(int32_t device, void* data, bool* done) {
  *done = false;
  return guarded([&] {
    const Driver& driver = Driver::get();
    const Within within(Device::of(device).context());
    const Relaxed relaxed;  // Python may collect garbage at any time
    const auto refused = [](int code) { return code >= kUnsupported && code <= kCaptured; };
    const int waited = driver.synchronize.code();  // kernels that read it may be under way
    const int unlocked = refused(waited) ? waited : driver.unlock_host.code(data);
    if (refused(unlocked)) return;
    driver.check(unlocked, "cuMemHostUnregister");
    *done = true;
    driver.check(waited, "cuCtxSynchronize");
  });
}

int mapped(int32_t device, const void* data, const void** there) {
  return guarded([&] {
    const Driver& driver = Driver::get();
    const Within within(Device::of(device).context());
    uint64_t found = 0;
    driver.check(driver.host_pointer.code(&found, const_cast<void*>(data), 0),
                 "cuMemHostGetDevicePointer");
    *there = reinterpret_cast<const void*>(static_cast<uintptr_t>(found));
  });
}

}  // namespace pyg_scale::cuda

using namespace pyg_scale::cuda;

extern "C" const char* pyg_scale_cuda_error(int code) { return code ? failure.c_str() : ""; }

extern "C" void pyg_scale_cuda_compile_with(pyg_scale_cuda_compile compile) {
  compile_with = compile;
}

extern "C" void pyg_scale_cuda_answer(void* answer, const void* bytes, size_t size) {
  static_cast<Answer*>(answer)->bytes.assign(static_cast<const char*>(bytes), size);
}

extern "C" void pyg_scale_cuda_find_with(void* (*find)(const char*)) { find_with = find; }
