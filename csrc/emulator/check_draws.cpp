// A program that runs draw_neighbors in the emulator on a graph allocated to the byte, against the
// loops of csrc/pick.h: to be compiled with sanitizers, and with faults planted.

#include <algorithm>
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

struct Options {
  bool replace = false;
  bool beyond = false;   // a neighbour that is no node, and a node that has no in-edges
  bool by_seed = false;  // draws depend on seeds, too
  bool weighted = false;
  bool within = false;  // not all in-edges are candidates
};

// Of in-edge `i` of a node: every third is 0, and one is large.
int64_t weight_of(int64_t i) { return i % 3 == 1 ? 0 : i == 5 ? int64_t{1} << 32 : 1 + i * i % 7; }

// How many of the candidates a node gets: those of weight 0 only if it gets all.
int64_t most_of(const pyg_scale::Candidates& c, int64_t first, int64_t k, const Options& how) {
  const int64_t most = pyg_scale::Picker::most(c.size(), k, how.replace);
  if (!how.weighted || k < 0 || (!how.replace && k >= c.size())) return most;
  int64_t positive = 0;
  for (int64_t p = c.begin; p < c.end; ++p) positive += weight_of(p - first) > 0;
  return how.replace ? (positive ? most : 0) : std::min(most, positive);
}

void check(int64_t k, const Options& how) {
  const std::vector<int64_t> degrees{0, 1, 5, 6, 7, 64, 65, 300, 0};
  std::vector<int64_t> indptr{0}, prefix;
  for (const int64_t d : degrees) {
    for (int64_t i = 0; i < d; ++i) prefix.push_back((i ? prefix.back() : 0) + weight_of(i));
    indptr.push_back(indptr.back() + d);
  }
  const int64_t edges = indptr.back();
  std::vector<int64_t> indices(static_cast<size_t>(edges));
  for (int64_t e = 0; e < edges; ++e) indices[static_cast<size_t>(e)] = e * 7 % 50;
  std::vector<int64_t> node;
  for (int64_t i = 0; i < 30; ++i) node.push_back(i * 4 % 9);
  std::vector<int64_t> seed;
  for (int64_t i = 0; i < 30; ++i) seed.push_back(i % 4);
  std::vector<int64_t> offset{0}, begin, end, wanted, wanted_row;
  pyg_scale::Picker picker;
  for (size_t i = 0; i < node.size(); ++i) {
    const auto v = static_cast<size_t>(node[i]);
    const int64_t first = indptr[v], own = static_cast<int64_t>(i);
    pyg_scale::Candidates c{first, indptr[v + 1]};
    if (how.within) c = {c.begin + c.size() * (own % 3) / 4, c.end - c.size() * (own % 2) / 5};
    begin.push_back(c.begin), end.push_back(c.end);
    const int64_t most = most_of(c, first, k, how);
    const size_t before = wanted.size();
    wanted.resize(before + static_cast<size_t>(most));
    uint64_t key = pyg_scale::fold(99, v);
    if (how.by_seed) key = pyg_scale::fold(key, static_cast<uint64_t>(seed[i]));
    int64_t* out = wanted.data() + before;
    if (how.weighted) {
      picker.weighted(key, c, first, prefix.data(), k, how.replace, out);
    } else {
      picker.uniform(key, c, k, how.replace, out);
    }
    wanted_row.insert(wanted_row.end(), static_cast<size_t>(most), static_cast<int64_t>(i));
    offset.push_back(offset.back() + most);
  }
  if (how.beyond) node.back() = 1000;
  const auto begins = exactly(indptr), sources = exactly(indices), nodes = exactly(node);
  const auto seeds = exactly(seed), sums = exactly(prefix);
  const auto from = exactly(begin), until = exactly(end);
  const auto places = exactly(offset);
  const auto total = static_cast<int64_t>(wanted.size());
  const std::vector<int64_t> nothing(static_cast<size_t>(kTimes * total), -1);
  const auto row = exactly(nothing), neighbor = exactly(nothing), edge = exactly(nothing);
  DrawNeighbors args{};
  args.row = row.get(), args.neighbor = neighbor.get(), args.edge = edge.get();
  args.replace = how.replace;
  for (; args.count < kTimes; ++args.count) {
    const DrawnType one{begins.get(),
                        {{sources.get(), true}, 1},
                        {{nullptr, false}, 1},
                        edges,
                        static_cast<int64_t>(degrees.size()),
                        50,
                        nodes.get(),
                        how.by_seed ? seeds.get() : nullptr,
                        places.get(),
                        how.within ? from.get() : nullptr,
                        how.within ? until.get() : nullptr,
                        how.weighted ? sums.get() : nullptr,
                        static_cast<int64_t>(node.size()),
                        total,
                        k,
                        args.count * total,
                        99};
    args.of[args.count] = one;
    args.first[args.count + 1] = args.first[args.count] + one.count;
  }
  const int code = pyg_scale_cuda_draw_neighbors(&args, emulator::kStream);
  if (how.beyond) {
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
    const size_t of = e % wanted.size();
    if (edge[e] != wanted[of] || row[e] != wanted_row[of] ||
        neighbor[e] != indices[static_cast<size_t>(wanted[of])]) {
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
    for (const bool weighted : {false, true}) {
      for (const bool within : {false, true}) {
        Options how;
        how.weighted = weighted, how.within = within;
        check(k, how);
        how.replace = k >= 0;
        check(k, how);
        how.replace = k % 2, how.by_seed = true;
        check(k, how);
      }
    }
  }
  Options beyond;
  beyond.beyond = true;
  check(5, beyond);
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
