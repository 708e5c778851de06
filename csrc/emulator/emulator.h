// CUDA's names for a C++ compiler: kernels run on the CPU, a thread at a time.
//
// The threads of a block are fibers that give way to each other at collectives only. Blocks run one
// after the other, those of a cooperative launch up to the next wait for the grid, where what they
// __shared__ is lost. These things are checked: all lanes named in the mask of a collective arrive
// at the same one; nobody reads from a lane that is not named; nobody waits for ever or traps; the
// alignment of what is read and written (if compiled with -fsanitize=alignment); every access to
// memory (with a sanitizer). Not checked are races between threads, the order of memory, and the
// time anything takes. PYG_SCALE_EMULATOR_ORDER=backward runs blocks and threads in the other
// order, which must change no result.
#pragma once

#include <math.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local  // of the block that runs

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulator {

constexpr int kLaunchFailed = 719, kNoLaunch = 1;  // as the driver numbers errors

struct Here {  // where the running thread is
  dim3 thread, block, block_size, grid_size;
};
extern thread_local Here here;

// What the kernels of this thread have read: loads of features, of all lanes, their bytes, and
// numbers of the columns of graphs; and how many kernels there were.
struct Counts {
  int64_t loads, bytes, indices, launches;
};
extern thread_local Counts counts;

// A kernel, by its name: PYG_SCALE_KERNEL makes one of each.
struct Kernel {
  Kernel(const char* name, void (*call)(void** args));
  static const Kernel* find(const char* name);
  static std::string names();  // of all, a line each
  void (*call)(void** args);
};

// Runs body() for every thread of a grid; returns 0 or an error. If its blocks run together, they
// may wait for each other.
int run(dim3 grid, dim3 block, void (*call)(const void*), const void* body, bool together);

template <typename Body>
int run(dim3 grid, dim3 block, const Body& body, bool together = false) {
  const auto call = [](const void* of) { (*static_cast<const Body*>(of))(); };
  return run(grid, block, call, &body, together);
}

// Waits for the lanes in `mask`. Returns what each lane of the warp brought, valid until the next
// call.
const uint64_t* exchange(uint32_t mask, uint64_t value, const char* what);
uint64_t read(const uint64_t* values, uint32_t mask, int lane, const char* what);
int lane();
void wait_for_block();
void wait_for_grid();
[[noreturn]] void fail(const char* message);
const char* last_error();

template <typename T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <typename T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

// The value of lane `from`, or the lane's own if `from` is not in the same part of `width` lanes.
template <typename T>
T shuffle(uint32_t mask, T value, int from, int width, const char* what) {
  const uint64_t* values = exchange(mask, to_word(value), what);
  const int own = lane();
  const bool beside = from >= 0 && from < 32 && from / width == own / width;
  return from_word<T>(read(values, mask, beside ? from : own, what));
}

}  // namespace emulator

#define threadIdx (::emulator::here.thread)
#define blockIdx (::emulator::here.block)
#define blockDim (::emulator::here.block_size)
#define gridDim (::emulator::here.grid_size)

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int step, int width = 32) {
  return emulator::shuffle(mask, value, emulator::lane() ^ step, width, "__shfl_xor_sync");
}
template <typename T>
T __shfl_sync(uint32_t mask, T value, int from, int width = 32) {
  const int own = emulator::lane();
  const int lane = own / width * width + (from & (width - 1));
  return emulator::shuffle(mask, value, lane, width, "__shfl_sync");
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned step, int width = 32) {
  const int from = emulator::lane() - static_cast<int>(step);
  return emulator::shuffle(mask, value, from, width, "__shfl_up_sync");
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned step, int width = 32) {
  const int from = emulator::lane() + static_cast<int>(step);
  return emulator::shuffle(mask, value, from, width, "__shfl_down_sync");
}
inline uint32_t __ballot_sync(uint32_t mask, int vote) {
  const uint64_t* votes = emulator::exchange(mask, vote != 0, "__ballot_sync");
  uint32_t found = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) && votes[lane]) found |= 1u << lane;
  }
  return found;
}
inline int __any_sync(uint32_t mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(uint32_t mask, int vote) { return __ballot_sync(mask, vote) == mask; }
inline void __syncwarp(uint32_t mask = 0xffffffffu) { emulator::exchange(mask, 0, "__syncwarp"); }
inline void __syncthreads() { emulator::wait_for_block(); }
inline void __threadfence() {}
[[noreturn]] inline void __trap() {
  emulator::fail("the kernel trapped: a number leads out of its tensor");
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline uint64_t __umul64hi(uint64_t x, uint64_t y) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(x) * y >> 64);
}

// One thread runs at a time: what is atomic on a device is plain here.
template <typename T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at = static_cast<T>(old + value);
  return old;
}
template <typename T>
T atomicOr(T* at, T value) {
  const T old = *at;
  *at = static_cast<T>(old | value);
  return old;
}
template <typename T>
T atomicMin(T* at, T value) {
  const T old = *at;
  if (value < old) *at = value;
  return old;
}
template <typename T>
T atomicMax(T* at, T value) {
  const T old = *at;
  if (value > old) *at = value;
  return old;
}
template <typename T>
T atomicExch(T* at, T value) {
  const T old = *at;
  *at = value;
  return old;
}
template <typename T>
T atomicCAS(T* at, T expected, T value) {
  const T old = *at;
  if (old == expected) *at = value;
  return old;
}
