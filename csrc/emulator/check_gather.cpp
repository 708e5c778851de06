// A program that runs gather_cached in the emulator on rows allocated to the byte: to be compiled
// with sanitizers, and with faults planted, which these must find.

#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "../cuda/loading.h"
#include "driver.h"

namespace {

using namespace pyg_scale::cuda;

int failures = 0;

std::unique_ptr<char[]> bytes(int64_t size, unsigned seed) {
  std::unique_ptr<char[]> made(new char[static_cast<size_t>(size)]);
  for (int64_t i = 0; i < size; ++i) {
    seed = seed * 1664525u + 1013904223u;
    made[static_cast<size_t>(i)] = static_cast<char>(seed >> 24);
  }
  return made;
}

// Rows of so many bytes, every third of them cached; `shift` bytes lie before the rest.
void check(int64_t row_bytes, int64_t shift, bool over_the_bus, bool looked_up) {
  constexpr int64_t kRows = 21, kCount = 40;
  const auto memory = bytes(shift + kRows * row_bytes, 1), cached = bytes(7 * row_bytes, 2);
  const char* rest = memory.get() + shift;
  std::vector<int32_t> slot_of(kRows, -1);
  for (int64_t i = 0; i < 7; ++i) slot_of[static_cast<size_t>(3 * i)] = static_cast<int32_t>(i);
  std::vector<int64_t> index(kCount);
  const auto out = bytes(kCount * row_bytes, 3);
  for (int64_t i = 0; i < kCount; ++i) {
    const int64_t id = i * 13 % kRows, slot = slot_of[static_cast<size_t>(id)];
    index[static_cast<size_t>(i)] = looked_up ? id : slot >= 0 ? slot : -1 - id;
  }
  const GatherCached args{{cached.get(), 7, row_bytes},
                          {rest, kRows, row_bytes},
                          {index.data(), true},
                          looked_up ? slot_of.data() : nullptr,
                          kCount,
                          row_bytes,
                          over_the_bus,
                          out.get()};
  const int code = pyg_scale_cuda_gather_cached(&args, emulator::kStream);
  if (code) {
    std::printf("error %d: %s\n", code, pyg_scale_cuda_error(code));
    ++failures;
    return;
  }
  for (int64_t i = 0; i < kCount; ++i) {
    const int64_t id = i * 13 % kRows, slot = slot_of[static_cast<size_t>(id)];
    const char* wanted = slot >= 0 ? cached.get() + slot * row_bytes : rest + id * row_bytes;
    if (std::memcmp(out.get() + i * row_bytes, wanted, static_cast<size_t>(row_bytes)) != 0) {
      std::printf("row %d of %d bytes is wrong\n", static_cast<int>(i),
                  static_cast<int>(row_bytes));
      ++failures;
      return;
    }
  }
}

void check_bounds() {
  const auto rest = bytes(4 * 16, 1), cached = bytes(16, 2), out = bytes(16, 3);
  for (const int64_t wrong : {int64_t{1}, int64_t{-5}}) {
    const GatherCached args{{cached.get(), 1, 16},
                            {rest.get(), 4, 16},
                            {&wrong, true},
                            nullptr,
                            1,
                            16,
                            false,
                            out.get()};
    if (pyg_scale_cuda_gather_cached(&args, emulator::kStream) == 0) {
      std::printf("a row that is not there was read\n");
      ++failures;
    }
  }
}

}  // namespace

int main() {
  for (const int64_t row_bytes : {1, 2, 3, 12, 16, 100, 128, 132, 512, 4000}) {
    for (const bool over_the_bus : {false, true}) {
      for (const bool looked_up : {false, true}) {
        for (const int64_t shift : {0, 4, 16, 48}) check(row_bytes, shift, over_the_bus, looked_up);
      }
    }
  }
  check_bounds();
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
