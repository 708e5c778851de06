// Tasks side by side, on torch's own threads or, where they wait, on others.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace pyg_scale {

// The number of threads that was asked for, limited to a range that is safe in arithmetic.
inline int64_t usable_threads(int64_t num_threads) {
  return std::clamp(num_threads, int64_t{1}, int64_t{1024});
}

// Calls f(0), ..., f(count - 1), at the same time if torch has the threads. An exception is thrown
// on as it is (torch would turn it into a runtime error without its message).
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

// The same with a thread for each task, for tasks that wait for a disk. The caller does the tasks
// for which the system has no thread.
template <typename F>
void for_each_in_own_thread(int64_t count, const F& f) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(count));
  const auto run = [&](int64_t i) {
    try {
      f(i);
    } catch (...) {
      errors[static_cast<size_t>(i)] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(count));
  int64_t next = 1;
  for (; next < count; ++next) {
    try {
      threads.emplace_back(run, next);
    } catch (const std::system_error&) {
      break;
    }
  }
  if (count > 0) run(0);
  for (; next < count; ++next) run(next);
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace pyg_scale
