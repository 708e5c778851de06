// A program that runs draw_neighbors in the emulator on a graph allocated to the byte, against the
// loops of csrc/pick.h: to be compiled with sanitizers, and with faults planted.

#include <cstdio>
#include <memory>
#include <vector>

#include "../cuda/device.cuh"
#include "../cuda/loading.h"
#include "../pick.h"
#include "driver.h"

namespace {

using namespace pyg_scale::cuda;

constexpr int kTimes = 3;  // the same edges as so many types

int failures = 0;

template <typename T>
std::unique_ptr<T[]> exactly(const std::vector<T>& from) {
  std::unique_ptr<T[]> made(new T[from.size()]);
  std::copy(from.begin(), from.end(), made.get());
  return made;
}

// `beyond`: a neighbour that is no node, and a node that has no in-edges. `by_seed`: draws depend
// on seeds, too.
void check(int64_t k, bool replace, bool beyond, bool by_seed = false) {
  const std::vector<int64_t> degrees{0, 1, 5, 6, 7, 64, 65, 300, 0};
  std::vector<int64_t> indptr{0};
  for (const int64_t d : degrees) indptr.push_back(indptr.back() + d);
  const int64_t edges = indptr.back();
  std::vector<int64_t> indices(static_cast<size_t>(edges));
  for (int64_t e = 0; e < edges; ++e) indices[static_cast<size_t>(e)] = e * 7 % 50;
  std::vector<int64_t> node;
  for (int64_t i = 0; i < 30; ++i) node.push_back(i * 4 % 9);
  std::vector<int64_t> seed;
  for (int64_t i = 0; i < 30; ++i) seed.push_back(i % 4);
  std::vector<int64_t> offset{0}, wanted, wanted_row;
  pyg_scale::Picker picker;
  for (size_t i = 0; i < node.size(); ++i) {
    const auto v = static_cast<size_t>(node[i]);
    const pyg_scale::Candidates all{indptr[v], indptr[v + 1]};
    const int64_t most = pyg_scale::Picker::most(all.size(), k, replace);
    const size_t before = wanted.size();
    wanted.resize(before + static_cast<size_t>(most));
    uint64_t key = pyg_scale::fold(99, v);
    if (by_seed) key = pyg_scale::fold(key, static_cast<uint64_t>(seed[i]));
    picker.uniform(key, all, k, replace, wanted.data() + before);
    wanted_row.insert(wanted_row.end(), static_cast<size_t>(most), static_cast<int64_t>(i));
    offset.push_back(offset.back() + most);
  }
  if (beyond) node.back() = 1000;
  const auto begins = exactly(indptr), sources = exactly(indices), nodes = exactly(node);
  const auto seeds = exactly(seed);
  const auto places = exactly(offset);
  const auto total = static_cast<int64_t>(wanted.size());
  const std::vector<int64_t> nothing(static_cast<size_t>(kTimes * total), -1);
  const auto row = exactly(nothing), neighbor = exactly(nothing), edge = exactly(nothing);
  DrawNeighbors args{};
  args.row = row.get(), args.neighbor = neighbor.get(), args.edge = edge.get();
  args.replace = replace;
  for (; args.count < kTimes; ++args.count) {
    const DrawnType one{begins.get(),
                        {sources.get(), true},
                        {nullptr, false},
                        edges,
                        static_cast<int64_t>(degrees.size()),
                        50,
                        nodes.get(),
                        by_seed ? seeds.get() : nullptr,
                        places.get(),
                        static_cast<int64_t>(node.size()),
                        total,
                        k,
                        args.count * total,
                        99};
    args.of[args.count] = one;
    args.first[args.count + 1] = args.first[args.count] + one.count;
  }
  const int code = pyg_scale_cuda_draw_neighbors(&args, emulator::kStream);
  if (beyond) {
    if (!code) {
      std::printf("a node that is not there was expanded\n");
      ++failures;
    }
    return;
  }
  if (code) {
    std::printf("error %d: %s\n", code, pyg_scale_cuda_error(code));
    ++failures;
    return;
  }
  for (size_t e = 0; e < nothing.size(); ++e) {
    const size_t from = e % wanted.size();
    if (edge[e] != wanted[from] || row[e] != wanted_row[from] ||
        neighbor[e] != indices[static_cast<size_t>(wanted[from])]) {
      std::printf("the draws of a node differ: edge %d, k=%d\n", static_cast<int>(e),
                  static_cast<int>(k));
      ++failures;
      return;
    }
  }
}

// Sizes for which most words are rejected, and those for which none is.
void check_bounded() {
  for (uint64_t size = 1; size < uint64_t{1} << 62; size = size * 3 + 1) {
    for (const uint64_t wide : {size, (uint64_t{1} << 63) - size, ~uint64_t{0} / 3 + size % 5}) {
      for (uint64_t i = 0; i < 50; ++i) {
        if (pyg_scale::cuda::bounded(size, i, wide) != pyg_scale::bounded(size, i, wide)) {
          std::printf("a bounded draw differs\n");
          ++failures;
          return;
        }
      }
    }
  }
}

}  // namespace

int main() {
  check_bounded();
  for (const int64_t k : {-1, 0, 1, 2, 6, 7, 64, 65, 100}) {
    check(k, false, false);
    if (k >= 0) check(k, true, false);
    check(k, k % 2, false, true);
  }
  check(5, false, true);
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
