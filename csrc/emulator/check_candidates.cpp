// A program that runs candidates in the emulator on a graph allocated to the byte, against plain
// loops: to be compiled with sanitizers, and with faults planted.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "../cuda/device.cuh"
#include "../cuda/loading.h"
#include "driver.h"

namespace {

using namespace pyg_scale::cuda;

constexpr int kTimes = 3;  // the same nodes as so many types

int failures = 0;

std::unique_ptr<int64_t[]> exactly(const std::vector<int64_t>& from) {
  std::unique_ptr<int64_t[]> made(new int64_t[from.size()]);
  std::copy(from.begin(), from.end(), made.get());
  return made;
}

struct Options {
  bool of_nodes = false;  // times are those of neighbours
  bool timed = false, window = false, weighted = false, replace = false, last = false;
  bool beyond = false;  // a node that has no in-edges
};

// Of in-edge `i` of node `v`; those of node 6 are all 0, but for one.
int64_t weight_of(int64_t v, int64_t i) {
  if (v == 6) return i == 40;
  return i % 4 == 1 ? 0 : 1 + i * i % 7;
}

int64_t at(const std::vector<int64_t>& from, int64_t i) { return from[static_cast<size_t>(i)]; }

void check(int64_t k, const Options& how) {
  const std::vector<int64_t> degrees{0, 1, 5, 31, 32, 33, 65, 1100, 0};
  std::vector<int64_t> indptr{0}, time, indices, prefix, node_time;
  for (int64_t u = 0; u < 2000; ++u) node_time.push_back(u / 3);
  for (int64_t v = 0; v < static_cast<int64_t>(degrees.size()); ++v) {
    for (int64_t i = 0; i < at(degrees, v); ++i) {
      indices.push_back(i * 2000 / at(degrees, v));  // in order of their times
      time.push_back(i / 3);                         // there are ties
      prefix.push_back((i ? prefix.back() : 0) + weight_of(v, i));
    }
    indptr.push_back(indptr.back() + at(degrees, v));
  }
  const int64_t edges = indptr.back();
  std::vector<int64_t> node, latest, after, wanted_begin, wanted_end, wanted;
  for (int64_t i = 0; i < 90; ++i) {
    const int64_t v = i % 9, d = at(degrees, v), first = at(indptr, v);
    const int64_t span = how.of_nodes ? 680 : d / 3 + 2;
    node.push_back(v);
    latest.push_back(i * 7 % 11 * span / 10 - 1);
    after.push_back(latest.back() - 1 - i % 5 * span / 8);
    int64_t begin = first, end = first + d;
    if (how.timed) {
      const auto count = [&](int64_t limit) {
        int64_t found = 0;
        for (int64_t p = first; p < first + d; ++p) {
          found += (how.of_nodes ? at(node_time, at(indices, p)) : at(time, p)) <= limit;
        }
        return found;
      };
      end = first + count(latest.back());
      if (how.window) begin = first + count(after.back());
      if (how.last && k >= 0) begin = std::max(begin, end - k);
    }
    int64_t positive = 0;
    for (int64_t p = begin; p < end; ++p) positive += weight_of(v, p - first) > 0;
    int64_t most = end - begin;
    if (k >= 0 && most > 0 && (how.replace || k < most)) {
      most = !how.weighted ? k : how.replace ? (positive ? k : 0) : std::min(k, positive);
    }
    wanted_begin.push_back(begin), wanted_end.push_back(end), wanted.push_back(most);
  }
  if (how.beyond) node.back() = 9;
  const auto begins = exactly(indptr), sources = exactly(indices), times = exactly(time);
  const auto times_of_nodes = exactly(node_time), sums = exactly(prefix), nodes = exactly(node);
  const auto until = exactly(latest), since = exactly(after);
  const auto count = static_cast<int64_t>(node.size());
  const std::vector<int64_t> nothing(static_cast<size_t>(kTimes * count), -1);
  const auto begin = exactly(nothing), end = exactly(nothing), counts = exactly(nothing);
  ChooseCandidates args{};
  args.begin = begin.get(), args.end = end.get(), args.counts = counts.get();
  args.replace = how.replace, args.last = how.last;
  for (; args.count < kTimes; ++args.count) {
    args.of[args.count] = {begins.get(),
                           {{sources.get(), true}, 1},
                           how.timed && !how.of_nodes ? times.get() : nullptr,
                           how.timed && how.of_nodes ? times_of_nodes.get() : nullptr,
                           how.weighted ? sums.get() : nullptr,
                           edges,
                           static_cast<int64_t>(degrees.size()),
                           2000,
                           nodes.get(),
                           how.timed ? until.get() : nullptr,
                           how.window ? since.get() : nullptr,
                           count,
                           k,
                           args.count * count};
    args.first[args.count + 1] = args.first[args.count] + count;
  }
  const int code = pyg_scale_cuda_candidates(&args, emulator::kStream);
  if (how.beyond) {
    if (!code) {
      std::printf("a node that is not there was asked for\n");
      ++failures;
    }
    return;
  }
  if (code) {
    std::printf("error %d: %s\n", code, pyg_scale_cuda_error(code));
    ++failures;
    return;
  }
  for (int64_t i = 0; i < kTimes * count; ++i) {
    const auto of = static_cast<size_t>(i % count);
    if (begin[i] != wanted_begin[of] || end[i] != wanted_end[of] || counts[i] != wanted[of]) {
      std::printf("the candidates of a node differ: %d, k=%d\n", static_cast<int>(of),
                  static_cast<int>(k));
      ++failures;
      return;
    }
  }
}

}  // namespace

int main() {
  for (const int64_t k : {-1, 0, 1, 5, 33, 64}) {
    for (int bits = 0; bits < 32; ++bits) {
      Options how;
      how.weighted = bits & 1, how.replace = bits & 2, how.timed = bits & 4;
      how.of_nodes = bits & 8, how.last = how.timed && bits & 16;
      check(k, how);
      how.window = how.timed;
      if (how.window) check(k, how);
    }
  }
  Options beyond;
  beyond.beyond = true;
  check(5, beyond);
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
