// Edges grouped by ranges of destinations, and the edges of a range by destination, see
// pyg_scale/ops/edge_buckets.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "graph_view.h"
#include "pool.h"

namespace pyg_scale {
namespace {

// Finds the range of a node: by a table of bins of 2^shift nodes, or by search if a range begins
// inside the bin.
struct Ranges {
  const int64_t* bounds;
  int64_t count;
  const int32_t* table;
  int64_t shift;

  int64_t of(int64_t node) const {
    const int32_t range = table[node >> shift];
    if (range >= 0) [[likely]]
      return range;
    return std::upper_bound(bounds, bounds + count + 1, node) - bounds - 1;
  }
};

template <typename Index, typename Source>
void place(const Index* dst, const Index* src, int64_t num_edges, const Ranges& ranges,
           std::vector<int64_t>& next, int32_t* dst_out, Source* src_out, int32_t* order) {
  for (int64_t e = 0; e < num_edges; ++e) {
    const int64_t range = ranges.of(dst[e]);
    const int64_t at = next[static_cast<size_t>(range)]++;
    dst_out[at] = static_cast<int32_t>(dst[e] - ranges.bounds[range]);
    src_out[at] = static_cast<Source>(src[e]);
    order[at] = static_cast<int32_t>(e);
  }
}

template <typename Index>
bool within(const Tensor& dst, const Ranges& ranges) {
  const auto* to = static_cast<const Index*>(dst.const_data_ptr());
  const int64_t size = ranges.bounds[ranges.count];
  return std::all_of(to, to + dst.numel(), [&](int64_t node) { return 0 <= node && node < size; });
}

template <typename Index>
void count_blocks(const Index* dst, int64_t num_edges, int64_t block, const Ranges& ranges,
                  int64_t* counts) {
  for (int64_t begin = 0; begin < num_edges; begin += block, counts += ranges.count) {
    const int64_t end = std::min(num_edges, begin + block);
    for (int64_t e = begin; e < end; ++e) ++counts[ranges.of(dst[e])];
  }
}

template <typename Index>
void group(const Tensor& dst, const Tensor& src, int64_t block, const Ranges& ranges,
           Tensor& counts, Tensor& dst_out, Tensor& src_out, Tensor& order) {
  const int64_t num_edges = dst.numel(), blocks = counts.size(0);
  const auto* to = static_cast<const Index*>(dst.const_data_ptr());
  const auto* from = static_cast<const Index*>(src.const_data_ptr());
  auto* count = static_cast<int64_t*>(counts.mutable_data_ptr());
  std::fill(count, count + blocks * ranges.count, 0);
  count_blocks(to, num_edges, block, ranges, count);
  std::vector<int64_t> next(static_cast<size_t>(ranges.count) + 1, 0);
  for (int64_t i = 0; i < blocks * ranges.count; ++i) {
    next[static_cast<size_t>(i % ranges.count) + 1] += count[i];
  }
  for (size_t r = 1; r < next.size(); ++r) next[r] += next[r - 1];
  auto* near = static_cast<int32_t*>(dst_out.mutable_data_ptr());
  auto* position = static_cast<int32_t*>(order.mutable_data_ptr());
  if (src_out.scalar_type() == ScalarType::Int) {
    place(to, from, num_edges, ranges, next, near,
          static_cast<int32_t*>(src_out.mutable_data_ptr()), position);
  } else {
    place(to, from, num_edges, ranges, next, near,
          static_cast<int64_t*>(src_out.mutable_data_ptr()), position);
  }
}

// Returns (destination minus the beginning of its range, source, position in the chunk) by range,
// and the number of edges that each block of the chunk has in each range, [blocks, ranges].
std::tuple<Tensor, Tensor, Tensor, Tensor> edge_buckets(Tensor dst, Tensor src, Tensor bounds,
                                                        Tensor table, int64_t shift, int64_t block,
                                                        bool wide) {
  const int64_t num_edges = dst.numel(), count = bounds.numel() - 1;
  check(dst.is_cpu() && src.is_cpu() && dst.is_contiguous() && src.is_contiguous() &&
            src.numel() == num_edges && dst.scalar_type() == src.scalar_type(),
        "dst and src must be contiguous, of one dtype and length, on the CPU");
  check(num_edges <= INT32_MAX && block > 0, "a chunk must be smaller, and block above 0");
  check(count > 0, "bounds must be of a range");
  const bool long_ids = int_column(dst, "dst").wide;
  check(table.is_cpu() && table.is_contiguous() && table.scalar_type() == ScalarType::Int,
        "table must be contiguous int32, on the CPU");
  check(0 <= shift && shift < 63, "shift must be from 0 to 62");
  const Ranges ranges{int64_data(bounds, count + 1, "bounds"), count,
                      table.const_data_ptr<int32_t>(), shift};
  check(ranges.bounds[0] == 0 && std::is_sorted(ranges.bounds, ranges.bounds + count + 1),
        "bounds must rise from 0");
  const int64_t bins = ranges.bounds[count] ? ((ranges.bounds[count] - 1) >> shift) + 1 : 0;
  check(table.numel() >= bins, "table must have every bin");
  check(std::all_of(ranges.table, ranges.table + table.numel(),
                    [&](int32_t range) { return range < count; }),
        "table has a range that there is not");
  check(long_ids ? within<int64_t>(dst, ranges) : within<int32_t>(dst, ranges),
        "a destination is outside of the ranges");
  const int64_t blocks = num_edges ? (num_edges - 1) / block + 1 : 0;
  Tensor counts = pool_empty({blocks, count}, ScalarType::Long);
  Tensor dst_out = pool_empty({num_edges}, ScalarType::Int);
  Tensor src_out = pool_empty({num_edges}, wide ? ScalarType::Long : ScalarType::Int);
  Tensor order = pool_empty({num_edges}, ScalarType::Int);
  long_ids ? group<int64_t>(dst, src, block, ranges, counts, dst_out, src_out, order)
           : group<int32_t>(dst, src, block, ranges, counts, dst_out, src_out, order);
  return {dst_out, src_out, order, counts};
}

constexpr int64_t kFar = 32, kNear = 16;  // edges ahead whose memory is asked for

// Writes source and edge id of a bucket's edges behind the earlier edges of their destinations.
template <typename Source, typename T>
void place_in_bucket(const int32_t* dst, const Source* src, const uint16_t* offset,
                     const int64_t* first, const int64_t* count, int64_t num_blocks, int64_t* next,
                     T* pair) {
  int64_t e = 0, num_edges = 0;
  for (int64_t block = 0; block < num_blocks; ++block) num_edges += count[block];
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (const int64_t end = e + count[block]; e < end; ++e) {
      if (e + kFar < num_edges) {
        __builtin_prefetch(next + dst[e + kFar], 1);
        __builtin_prefetch(pair + 2 * next[dst[e + kNear]], 1);
      }
      T* entry = pair + 2 * next[dst[e]]++;
      entry[0] = static_cast<T>(src[e]);
      entry[1] = static_cast<T>(first[block] + offset[e]);
    }
  }
}

// The edges of a bucket by destination: where the edges of each destination begin, and (source,
// edge id) of each edge. `first` and `count` describe the blocks of the bucket, see
// pyg_scale/convert/bucket_files.py.
std::tuple<Tensor, Tensor> edge_group(Tensor dst, Tensor src, Tensor offset, Tensor first,
                                      Tensor count, int64_t num_dst, bool wide) {
  const int64_t num_edges = dst.numel(), num_blocks = first.numel();
  check(dst.is_cpu() && dst.is_contiguous() && dst.scalar_type() == ScalarType::Int &&
            src.is_cpu() && src.is_contiguous() && src.numel() == num_edges && offset.is_cpu() &&
            offset.is_contiguous() && offset.numel() == num_edges &&
            offset.scalar_type() == ScalarType::Short,
        "dst, src and offset must be contiguous and of one length, on the CPU");
  const bool wide_src = int_column(src, "src").wide;
  check(wide || !wide_src, "pairs must be int64 where sources are");
  const int64_t* begins = int64_data(first, num_blocks, "first");
  const int64_t* counts = int64_data(count, num_blocks, "count");
  int64_t sum = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    check(counts[block] >= 0 && counts[block] <= num_edges - sum,
          "count must be the edges of each block, together as many as there are");
    sum += counts[block];
    check_count(begins[block], "first");
  }
  check(sum == num_edges, "count must be the edges of each block, together as many as there are");
  check_count(num_dst, "num_dst");
  const auto* to = dst.const_data_ptr<int32_t>();
  Tensor cursor = huge_empty({num_dst + 2}, ScalarType::Long);
  int64_t* next = cursor.mutable_data_ptr<int64_t>();
  std::fill(next, next + num_dst + 2, 0);
  for (int64_t e = 0; e < num_edges; ++e) {
    if (to[e] < 0 || to[e] >= num_dst) [[unlikely]]
      fail("a destination is outside of the bucket");
    if (e + kFar < num_edges) __builtin_prefetch(next + 2 + to[e + kFar], 1);
    ++next[to[e] + 2];
  }
  for (int64_t v = 0; v < num_dst; ++v) next[v + 2] += next[v + 1];
  Tensor pair = huge_empty({num_edges, 2}, wide ? ScalarType::Long : ScalarType::Int);
  const auto* offsets = static_cast<const uint16_t*>(offset.const_data_ptr());
  const void* from = src.const_data_ptr();
  void* out = pair.mutable_data_ptr();
  if (!wide) {
    place_in_bucket(to, static_cast<const int32_t*>(from), offsets, begins, counts, num_blocks,
                    next + 1, static_cast<int32_t*>(out));
  } else if (wide_src) {
    place_in_bucket(to, static_cast<const int64_t*>(from), offsets, begins, counts, num_blocks,
                    next + 1, static_cast<int64_t*>(out));
  } else {
    place_in_bucket(to, static_cast<const int32_t*>(from), offsets, begins, counts, num_blocks,
                    next + 1, static_cast<int64_t*>(out));
  }
  return {torch::stable::narrow(cursor, 0, 0, num_dst + 1), pair};
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "edge_buckets(Tensor dst, Tensor src, Tensor bounds, Tensor table, int shift, int block, "
      "bool wide) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "edge_group(Tensor dst, Tensor src, Tensor offset, Tensor first, Tensor count, int num_dst, "
      "bool wide) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("edge_buckets", TORCH_BOX(&pyg_scale::edge_buckets));
  m.impl("edge_group", TORCH_BOX(&pyg_scale::edge_group));
}
