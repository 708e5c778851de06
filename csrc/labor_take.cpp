// labor_take: in-edges of a whole hop by importance that is refined until few sources are expected,
// LABOR-i and LABOR-* (the meaning is in pyg_scale/ops/labor_take.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <tuple>

#include "buffer.h"
#include "graph_view.h"
#include "hop_sources.h"
#include "pool.h"
#include "source_draws.h"
#include "vectors.h"

namespace pyg_scale {
namespace {

constexpr double kWhole = 2147483648.0;  // 2^31: what the least important source of a node counts
constexpr int64_t kMostRounds = 100;
constexpr int64_t kLeastGain = 10000;  // less than one part in so many is no gain

// The sources of a hop, with what is known of each by its place.
struct Hop {
  const int64_t* counts;
  int64_t num_rows, k;
  HopSources sources;
  Buffer<double> rarity;   // one over the importance
  Buffer<double> lowered;  // the same after a round
  Buffer<double> parts;    // of the edges of a row
};

// The largest of `d` numbers, of which vectors may read zeros that follow.
PYG_SCALE_INLINE double largest_of(const double* x, int64_t d) {
  Vector<double> most{};
  for (int64_t i = 0; i < d; i += kLanes<double>) {
    const Vector<double> v = load(x + i);
    most = v > most ? v : most;
  }
  return std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}

// How many parts are not above a bound, and the sum of the others. Both are whole numbers, and
// doubles hold their sums exactly, as rows are cut before these reach 2^53.
struct Above {
  int64_t certain = 0, left = 0;
};

PYG_SCALE_INLINE Above above(const double* part, int64_t d, double bound) {
  constexpr int64_t kExact = int64_t{1} << 20;
  using Mask = decltype(Vector<double>{} > Vector<double>{});
  Above out;
  for (int64_t begin = 0; begin < d; begin += kExact) {
    const int64_t end = std::min(d, begin + kExact);
    Vector<double> left{};
    Mask more{};
    for (int64_t i = begin; i < end; i += kLanes<double>) {
      const Vector<double> v = load(part + i);
      const Mask is_above = v > bound;
      left += (Vector<double>)((Mask)v & is_above);
      more -= is_above;  // all ones are -1
    }
    out.certain += end - begin - (more[0] + more[1] + more[2] + more[3]);
    out.left += static_cast<int64_t>(add_lanes<double>(left));
  }
  return out;
}

// The bound of a row: of its `d` sources, those whose part is not above it are certain, and another
// one has the probability bound / part. Leaves the parts of the sources, from 1 to 2^31, in
// `part`, and zeros after them.
PYG_SCALE_INLINE double bound_of(const double* rarity, const uint32_t* place, int64_t d, int64_t k,
                                 double* part) {
  for (int64_t i = 0; i < d; ++i) part[i] = rarity[place[i]];
  for (int64_t i = d; i < d + kLanes<double>; ++i) part[i] = 0;
  const double scale = kWhole / largest_of(part, d);
  for (int64_t i = 0; i < d; ++i) {
    const double scaled = std::ceil(part[i] * scale);
    part[i] = scaled < 1 ? 1 : scaled > kWhole ? kWhole : scaled;
  }
  if (d <= k) return kWhole;
  double bound = 0;
  for (int64_t certain = -1;;) {
    const Above now = above(part, d, bound);
    if (now.certain == certain) return bound;
    certain = now.certain;
    bound = static_cast<double>(k) * static_cast<double>(now.left) /
            static_cast<double>(d * d - k * certain);
  }
}

// Lowers the rarity of each source to one over its largest probability.
struct Refine {
  PYG_SCALE_INLINE void operator()(Hop* hop, double* part, bool first) const {
    double* lowered = hop->lowered.data();
    const double* rarity = hop->rarity.data();
    const uint32_t* place = hop->sources.place.data();
    const int64_t k = hop->k;
    for (int64_t row = 0; row < hop->num_rows; place += hop->counts[row++]) {
      const int64_t d = hop->counts[row];
      if (d == 0) continue;
      if (first && d > k) {  // all parts are the whole
        const double every = kWhole * static_cast<double>(d);
        const double bound = static_cast<double>(k) * every / static_cast<double>(d * d);
        const double value = kWhole * (1 / bound);
        for (int64_t i = 0; i < d; ++i) lowered[place[i]] = std::min(lowered[place[i]], value);
        continue;
      }
      const double inverse = 1 / bound_of(rarity, place, d, k, part);
      for (int64_t i = 0; i < d; ++i) {
        lowered[place[i]] = std::min(lowered[place[i]], part[i] * inverse);
      }
    }
  }
};

// Returns how many sources are expected after that, as a number of 2^32.
int64_t refine(Hop& hop, bool first) {
  const int64_t n = hop.sources.size();
  hop.lowered.reserve(n);
  std::fill_n(hop.lowered.data(), n, INFINITY);
  dispatch(Refine{}, &hop, hop.parts.data(), first);
  int64_t expected = 0;
  for (int64_t i = 0; i < n; ++i) {
    hop.rarity[i] = hop.lowered[i];
    expected += static_cast<int64_t>(std::ceil(kCertain / std::max(hop.lowered[i], 1.0)));
  }
  return expected;
}

// Takes the in-edges whose sources' numbers, `hop.lowered` now, are below their shares.
struct Take {
  PYG_SCALE_INLINE void operator()(Hop* hop, double* part, Buffer<int64_t>* taken,
                                   Buffer<double>* share) const {
    const double *drawn = hop->lowered.data(), *rarity = hop->rarity.data();
    const uint32_t* place = hop->sources.place.data();
    int64_t edge = 0;
    for (int64_t row = 0; row < hop->num_rows; ++row) {
      const int64_t d = hop->counts[row], size = taken->size();
      if (d == 0) continue;
      const double bound = bound_of(rarity, place, d, hop->k, part);
      taken->reserve(size + d);
      share->reserve(size + d);
      int64_t* to = taken->data() + size;
      double* of = share->data() + size;
      int64_t found = 0;
      for (int64_t i = 0; i < d; ++i) {
        to[found] = edge + i;
        of[found] = part[i] <= bound ? kCertain : std::ceil(bound / part[i] * kCertain);
        found += drawn[place[i]] < of[found];
      }
      taken->set_size(size + found);
      share->set_size(size + found);
      place += d;
      edge += d;
    }
  }
};

std::tuple<Tensor, Tensor> labor_take(Tensor counts, Tensor neighbor, int64_t num_nodes, int64_t k,
                                      int64_t rounds, int64_t key, int64_t next_key,
                                      int64_t renewed) {
  const int64_t n = counts.numel(), total = neighbor.numel();
  const int64_t* count = int64_data(counts, n, "counts");
  const int64_t* from = int64_data(neighbor, total, "neighbor");
  check_count(num_nodes, "num_nodes");
  check(k >= 0 && k < int64_t{1} << 31, "k must be from 0 to 2**31 - 1");
  check(checked_sum(count, n, "counts") == total, "counts must add up to neighbor");
  check_each_within(from, total, "neighbor", num_nodes);
  check_32_bits(renewed, "renewed");
  check(rounds <= kMostRounds, "rounds must be at most 100");
  int64_t longest = 0;
  for (int64_t row = 0; row < n; ++row) longest = std::max(longest, count[row]);
  check(longest < int64_t{1} << 31, "a node has 2**31 in-edges or more");
  if (k == 0) return {pool_empty({0}, ScalarType::Long), pool_empty({0}, ScalarType::Double)};
  thread_local std::unique_ptr<Hop> kept;
  std::unique_ptr<Hop> hop = std::move(kept);  // lost if anything below throws
  if (!hop) hop = std::make_unique<Hop>();
  hop->counts = count;
  hop->num_rows = n;
  hop->k = k;
  hop->sources.number(from, total, num_nodes);
  hop->parts.reserve(longest + kLanes<double>);
  const int64_t num_sources = hop->sources.size();
  hop->rarity.reserve(num_sources);
  std::fill_n(hop->rarity.data(), num_sources, 1.0);
  int64_t before = 0;
  for (int64_t round = 0; round < (rounds < 0 ? kMostRounds : rounds); ++round) {
    const int64_t expected = refine(*hop, round == 0);
    if (rounds < 0 && round > 0 && before - expected < before / kLeastGain) break;
    before = expected;
  }

  const SourceNumbers number{static_cast<uint64_t>(key), static_cast<uint64_t>(next_key),
                             static_cast<uint32_t>(renewed)};
  Buffer<double>& drawn = hop->lowered;  // the random number of each source
  drawn.reserve(num_sources);
  for (int64_t i = 0; i < num_sources; ++i) {
    drawn[i] = static_cast<double>(number(hop->sources.source[i]));
  }
  Buffer<int64_t> taken;
  Buffer<double> share;
  dispatch(Take{}, hop.get(), hop->parts.data(), &taken, &share);
  const int64_t size = taken.size();
  Tensor position = pool_empty({size}, ScalarType::Long);
  Tensor shares = pool_empty({size}, ScalarType::Double);
  std::copy_n(taken.data(), size, position.mutable_data_ptr<int64_t>());
  std::copy_n(share.data(), size, static_cast<double*>(shares.mutable_data_ptr()));
  constexpr size_t kKeptBytes = size_t{1} << 28;  // a hop of unusual size must not hold its memory
  const size_t bytes = hop->sources.bytes() + hop->rarity.bytes() + hop->lowered.bytes();
  if (bytes <= kKeptBytes) kept = std::move(hop);
  return {position, shares};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "labor_take(Tensor counts, Tensor neighbor, int num_nodes, int k, int rounds, int key, "
      "int next_key, int renewed) -> (Tensor position, Tensor share)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("labor_take", TORCH_BOX(&pyg_scale::labor_take));
}
