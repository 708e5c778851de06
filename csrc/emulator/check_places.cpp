// A program that runs first_places in the emulator on numbers allocated to the byte: to be compiled
// with sanitizers, and with faults planted.

#include <cstdio>
#include <memory>
#include <vector>

#include "../cuda/loading.h"
#include "driver.h"

namespace {

using namespace pyg_scale::cuda;

int failures = 0;

void check(const std::vector<int64_t>& key, int64_t slots, bool refused) {
  const size_t n = key.size();
  const std::unique_ptr<int64_t[]> keys(new int64_t[n]), out(new int64_t[n]);
  std::copy(key.begin(), key.end(), keys.get());
  const std::unique_ptr<uint64_t[]> held(new uint64_t[static_cast<size_t>(slots)]);
  const std::unique_ptr<uint32_t[]> least(new uint32_t[static_cast<size_t>(slots)]);
  const FirstPlaces args{keys.get(), static_cast<int64_t>(n), slots, held.get(), least.get(),
                         out.get()};
  const int code = pyg_scale_cuda_first_places(&args, emulator::kStream);
  if ((code != 0) != refused) {
    std::printf("error %d\n", code);
    ++failures;
  }
  if (code) return;
  for (size_t i = 0; i < n; ++i) {
    size_t first = 0;
    while (key[first] != key[i]) ++first;
    if (out[i] != static_cast<int64_t>(first)) {
      std::printf("a first place is wrong\n");
      ++failures;
      return;
    }
  }
}

}  // namespace

int main() {
  std::vector<int64_t> key;
  check(key, 64, false);
  for (int64_t i = 0; i < 1000; ++i) key.push_back(i * i % 331 << (i % 3 * 20));
  check(key, 2048, false);
  for (int64_t i = 0; i < 700; ++i) key.push_back(7);
  check(key, 4096, false);
  check({5, -1, 5}, 64, true);
  check({0, 1, 2, 3, 4}, 4, true);  // no slot is left
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
