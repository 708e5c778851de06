// layer_take: the sources of a whole hop by the norms of their columns, LADIES, or by given shares,
// FastGCN (the meaning is in pyg_scale/ops/layer_take.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>

#include "buffer.h"
#include "graph_view.h"
#include "hop_sources.h"
#include "pool.h"
#include "source_draws.h"

namespace pyg_scale {
namespace {

using Taken = std::tuple<Tensor, Tensor>;

struct Hop {
  HopSources sources;
  Buffer<int64_t> norm;  // of the column of each source, by place
  Buffer<double> share;  // by place; 0 if the source is not taken
};

// The square of the weight of an edge in fixed point.
int64_t square(int64_t degree, int64_t other) {
  const double product = static_cast<double>(degree) * static_cast<double>(other);
  return std::max<int64_t>(1, static_cast<int64_t>(std::floor(kCertain / product)));
}

void add_norms(Hop& hop, const int64_t* counts, int64_t rows, const int64_t* theirs,
               Weighting weighting) {
  hop.norm.reserve(hop.sources.size());
  std::fill_n(hop.norm.data(), hop.sources.size(), 0);
  const uint32_t* place = hop.sources.place.data();
  for (int64_t row = 0; row < rows; place += counts[row++]) {
    const int64_t d = counts[row];
    if (weighting == Weighting::kGcn) {
      for (int64_t i = 0; i < d; ++i) {
        hop.norm[place[i]] += square(d, std::max<int64_t>(1, *theirs++));
      }
      continue;
    }
    if (d == 0) continue;
    const int64_t every =
        weighting == Weighting::kSum ? static_cast<int64_t>(kCertain) : square(d, d);
    for (int64_t i = 0; i < d; ++i) hop.norm[place[i]] += every;
  }
}

// Shares in proportion to the norms, of sum `k`, none above all: those that would be are certain,
// and the others divide what is left.
void divide(Hop& hop, int64_t k) {
  const int64_t n = hop.sources.size();
  hop.share.reserve(n);
  std::fill_n(hop.share.data(), n, n <= k ? kCertain : 0.0);
  if (n <= k) return;
  for (int64_t wanted = k;;) {
    int64_t left = 0, more = 0;
    for (int64_t i = 0; i < n; ++i) left += hop.share[i] == kCertain ? 0 : hop.norm[i];
    const double rate =
        static_cast<double>(wanted) * kCertain / static_cast<double>(std::max<int64_t>(left, 1));
    for (int64_t i = 0; i < n; ++i) {
      if (hop.share[i] == kCertain) continue;
      const bool is_certain = static_cast<double>(hop.norm[i]) * rate >= kCertain;
      if (is_certain) hop.share[i] = kCertain;
      more += is_certain;
    }
    wanted -= more;
    if (more) continue;
    for (int64_t i = 0; i < n; ++i) {
      if (hop.share[i] == kCertain) continue;
      hop.share[i] = std::max(1.0, std::ceil(static_cast<double>(hop.norm[i]) * rate));
    }
    return;
  }
}

// The edges that have a share, with it.
template <typename F>
Taken taken_edges(int64_t total, const F& share_of) {
  Buffer<int64_t> taken;
  Buffer<double> share;
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < total; begin += kBlock) {
    const int64_t end = std::min(total, begin + kBlock);
    int64_t size = taken.size();
    taken.reserve(size + end - begin);
    share.reserve(size + end - begin);
    for (int64_t i = begin; i < end; ++i) {
      const double of = share_of(i);
      taken[size] = i;
      share[size] = of;
      size += of > 0;
    }
    taken.set_size(size);
    share.set_size(size);
  }
  Tensor position = pool_empty({taken.size()}, ScalarType::Long);
  Tensor shares = pool_empty({taken.size()}, ScalarType::Double);
  std::copy_n(taken.data(), taken.size(), position.mutable_data_ptr<int64_t>());
  std::copy_n(share.data(), share.size(), static_cast<double*>(shares.mutable_data_ptr()));
  return {position, shares};
}

Taken layer_take(Tensor counts, Tensor neighbor, std::optional<Tensor> theirs, int64_t num_nodes,
                 int64_t k, int64_t weighting, int64_t key) {
  const int64_t n = counts.numel(), total = neighbor.numel();
  const int64_t* count = int64_data(counts, n, "counts");
  const int64_t* from = int64_data(neighbor, total, "neighbor");
  const Weighting kind = weighting_of(weighting);
  check(theirs.has_value() == (kind == Weighting::kGcn), "theirs goes with weights of GCN");
  const int64_t* degrees = theirs ? int64_data(*theirs, total, "theirs") : nullptr;
  check_count(num_nodes, "num_nodes");
  check(k >= 0, "k must not be negative");
  check(total < int64_t{1} << 31, "a hop has 2**31 in-edges or more");
  check(checked_sum(count, n, "counts") == total, "counts must add up to neighbor");
  check_each_within(from, total, "neighbor", num_nodes);
  if (k == 0) return taken_edges(0, [](int64_t) { return 0.0; });
  thread_local std::unique_ptr<Hop> kept;
  std::unique_ptr<Hop> hop = std::move(kept);  // lost if anything below throws
  if (!hop) hop = std::make_unique<Hop>();
  hop->sources.number(from, total, num_nodes);
  add_norms(*hop, count, n, degrees, kind);
  divide(*hop, k);
  double* share = hop->share.data();
  for (int64_t i = 0; i < hop->sources.size(); ++i) {
    const auto id = static_cast<uint64_t>(hop->sources.source[i]);
    if (source_number(static_cast<uint64_t>(key), id) >= share[i]) share[i] = 0;
  }
  const uint32_t* place = hop->sources.place.data();
  Taken out = taken_edges(total, [&](int64_t i) { return share[place[i]]; });
  constexpr size_t kKeptBytes = size_t{1} << 28;  // a hop of unusual size must not hold its memory
  if (hop->sources.bytes() + hop->norm.bytes() + hop->share.bytes() <= kKeptBytes) {
    kept = std::move(hop);
  }
  return out;
}

Taken layer_take_by(Tensor neighbor, Tensor share, int64_t key) {
  const int64_t total = neighbor.numel(), nodes = share.numel();
  const int64_t* from = int64_data(neighbor, total, "neighbor");
  check(share.is_cpu() && share.dim() == 1 && share.is_contiguous() &&
            share.scalar_type() == ScalarType::Double,
        "share must be a contiguous 1-D float64 tensor on the CPU");
  check_each_within(from, total, "neighbor", nodes);
  const auto* of = static_cast<const double*>(share.const_data_ptr());
  return taken_edges(total, [&](int64_t i) {
    const auto id = static_cast<uint64_t>(from[i]);
    return source_number(static_cast<uint64_t>(key), id) < of[id] ? of[id] : 0.0;
  });
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "layer_take(Tensor counts, Tensor neighbor, Tensor? theirs, int num_nodes, int k, "
      "int weighting, int key) -> (Tensor position, Tensor share)");
  m.def("layer_take_by(Tensor neighbor, Tensor share, int key) -> (Tensor position, Tensor share)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("layer_take", TORCH_BOX(&pyg_scale::layer_take));
  m.impl("layer_take_by", TORCH_BOX(&pyg_scale::layer_take_by));
}
