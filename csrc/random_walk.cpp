// random_walk: walks along the edges of a graph, see pyg_scale/ops/random_walk.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "graph_view.h"
#include "keys.h"
#include "pool.h"

namespace pyg_scale {
namespace {

constexpr int64_t kTogether = 16;  // walks that take a step at a time: covers memory's latency
constexpr int64_t kTaskSteps = 1 << 14;  // fewer are not worth a thread

Tensor random_walk(Tensor indptr, Tensor indices, Tensor start, Tensor walk, int64_t length,
                   int64_t key, int64_t num_threads) {
  const int64_t num_nodes = num_pointed(indptr), num_entries = indices.numel();
  const int64_t count = start.numel();
  check_count(length, "length");
  const int64_t* begin = int64_data(indptr, num_nodes + 1, "indptr");
  const int64_t* first = int64_data(start, count, "start");
  const int64_t* number = int64_data(walk, count, "walk");
  const IntColumn neighbor = int_column(indices, "indices");
  check(begin[0] == 0 && begin[num_nodes] == num_entries,
        "indptr must go from 0 to the number of entries of indices");
  const auto valid = [&](int64_t v) {
    return static_cast<uint64_t>(v) < static_cast<uint64_t>(num_nodes);
  };
  for (int64_t i = 0; i < count; ++i) {
    if (!valid(first[i])) [[unlikely]] {
      fail("start: node " + std::to_string(first[i]) + " is out of range, there are " +
           std::to_string(num_nodes));
    }
  }
  Tensor out = pool_empty({count, length + 1}, ScalarType::Long);
  if (count == 0) return out;
  auto* nodes = static_cast<int64_t*>(out.mutable_data_ptr());
  const int64_t width = length + 1;
  std::atomic<int64_t> wrong{0}, broken{-1};  // a neighbour and a node that make no sense
  std::atomic<bool> outside{false};
  const auto run = [&](int64_t from, int64_t to) {
    for (int64_t group = from; group < to; group += kTogether) {
      const int64_t end = std::min(group + kTogether, to);
      for (int64_t i = group; i < end; ++i) nodes[i * width] = first[i];
      for (int64_t step = 0; step < length; ++step) {
        for (int64_t i = group; i < end; ++i) {
          const int64_t v = nodes[i * width + step], low = begin[v], high = begin[v + 1];
          int64_t next = v;
          if (low < 0 || low > high || high > num_entries) [[unlikely]] {
            int64_t none = -1;
            broken.compare_exchange_strong(none, v);  // the first one is named
          } else if (const int64_t degree = high - low; degree > 0) {
            uint64_t mine = fold(static_cast<uint64_t>(key), static_cast<uint64_t>(number[i]));
            mine = fold(fold(mine, static_cast<uint64_t>(step)), static_cast<uint64_t>(v));
            next = neighbor[low +
                            static_cast<int64_t>(bounded(mine, 0, static_cast<uint64_t>(degree)))];
            if (!valid(next)) [[unlikely]] {
              wrong = next;
              outside = true;
              next = v;
            }
          }
          nodes[i * width + step + 1] = next;
          __builtin_prefetch(begin + next);
        }
      }
    }
  };
  if (num_threads > 1 && count * length > 2 * kTaskSteps) {
    const int64_t grain = std::max<int64_t>(kTogether, kTaskSteps / std::max<int64_t>(1, length));
    torch::stable::parallel_for(0, count, grain, run);
  } else {
    run(0, count);
  }
  if (const int64_t v = broken; v >= 0) check_entries(v, begin[v], begin[v + 1], num_entries);
  check(!outside, "indices: node " + std::to_string(wrong) + " is out of range, there are " +
                      std::to_string(num_nodes));
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "random_walk(Tensor indptr, Tensor indices, Tensor start, Tensor walk, int length, int key, "
      "int num_threads) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("random_walk", TORCH_BOX(&pyg_scale::random_walk));
}
