// Tasks side by side, on torch's own threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <exception>
#include <vector>

namespace pyg_scale {

// Calls f(0), ..., f(count - 1), at once if torch has the threads. An exception of one of them
// comes out as it is (torch would make a runtime error without its message of it).
template <typename F>
void for_each_task(int64_t count, const F& f) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(count));
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      try {
        f(i);
      } catch (...) {
        errors[static_cast<size_t>(i)] = std::current_exception();
      }
    }
  });
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace pyg_scale
