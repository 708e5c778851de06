// csr_group_padded and csr_transpose_few on a device, see pyg_scale/ops/adjacency.py.

#include "adjacency.h"

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>

#include "tensors.h"

namespace pyg_scale::cuda {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

void check_size(int64_t value, int64_t least, int64_t most, const char* name) {
  check(value >= least && value <= most, std::string(name) + " must be from " +
                                             std::to_string(least) + " to " + std::to_string(most) +
                                             " (got " + std::to_string(value) + ")");
}

// The memory of a grouping, of which `args` has the pointers.
class Groups {
 public:
  Groups(const OnDevice& device, const Tensor& like, Grouping& args)
      : device_(device), like_(like), args_(args) {}

  // Edges are grouped by this end, too. Returns the pointers.
  Tensor by(End& end) {
    Tensor indptr = empty_like(like_, {end.rows + 1}, ScalarType::Long);
    end.indptr = data_of<int64_t>(indptr);
    grouped_.push_back(&end);
    return indptr;
  }
  Tensor numbers(ScalarType type = ScalarType::Int) {
    return empty_like(like_, {args_.num_edges}, type);
  }

  void run(const char* name) {
    const int64_t most_hubs = args_.num_edges / kHub;
    int64_t size = 1;
    for (const End* end : grouped_) size += end->rows + end->num_tiles() * kTileApart + 1;
    Tensor counts = empty_like(like_, {size + static_cast<int64_t>(grouped_.size()) * most_hubs},
                               ScalarType::Int);
    args_.counts = data_of<int32_t>(counts);
    args_.num_counts = size;
    int32_t *at = args_.counts, *hubs = at + size;
    args_.arrived = at++;
    for (End* end : grouped_) {
      end->cursor = at;
      end->tiles = at + end->rows;
      end->num_hubs = end->tiles + end->num_tiles() * kTileApart;
      end->hubs = hubs;
      at = end->num_hubs + 1;
      hubs += most_hubs;
    }
    Tensor by_destination = numbers(), by_source = numbers(ScalarType::Long);
    args_.by_destination = data_of<int32_t>(by_destination);
    Tensor row_at = numbers();
    args_.row_at = data_of<int32_t>(row_at);
    args_.by_source = reinterpret_cast<uint64_t*>(data_of<int64_t>(by_source));
    device_.done(pyg_scale_cuda_group(&args_, device_.stream()), name);
  }

 private:
  const OnDevice& device_;
  const Tensor& like_;
  Grouping& args_;
  std::vector<End*> grouped_;
};

// One end of an edge list.
Column column_at(const Tensor& edge_index, int64_t row) {
  const auto* data = static_cast<const char*>(edge_index.const_data_ptr());
  const bool wide = edge_index.scalar_type() == ScalarType::Long;
  return {data + row * edge_index.stride(0) * (wide ? 8 : 4), wide};
}

using Grouped = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Grouped csr_group_padded(Tensor edge_index, int64_t num_src, int64_t num_dst, int64_t num_loops,
                         bool by_source) {
  const OnDevice device(edge_index);
  const ScalarType type = edge_index.scalar_type();
  check(edge_index.dim() == 2 && edge_index.size(0) == 2 &&
            (type == ScalarType::Long || type == ScalarType::Int),
        "edge_index must be an int64 or int32 tensor [2, num_edges]");
  check_size(num_src, 0, kMost - 1, "num_src");
  check_size(num_dst, 0, kMost - 1, "num_dst");
  check_size(num_loops, -1, std::min(num_src, num_dst), "num_loops");
  const int64_t added = std::max<int64_t>(num_loops, 0), given = edge_index.size(1);
  check_size(given + added, 0, kMost, "the number of edges");
  if (given && edge_index.stride(1) != 1) edge_index = torch::stable::contiguous(edge_index);
  Grouping args{};
  if (given) args.from = column_at(edge_index, 0), args.to = column_at(edge_index, 1);
  args.num_given = given;
  args.num_edges = given + added;
  args.loops = num_loops >= 0;
  args.destinations.rows = num_dst + (args.loops ? 1 : 0);
  args.sources.rows = num_src;
  Groups groups(device, edge_index, args);
  Tensor indptr = groups.by(args.destinations), indices = groups.numbers(),
         edge_id = groups.numbers();
  args.indices = data_of<int32_t>(indices);
  args.edge_id = data_of<int32_t>(edge_id);
  Tensor pointers = empty_like(edge_index, {0}, ScalarType::Long);
  Tensor rows = empty_like(edge_index, {0}, ScalarType::Int), position = rows;
  if (by_source) {
    pointers = groups.by(args.sources);
    rows = groups.numbers();
    position = groups.numbers();
    args.rows = data_of(rows);
    args.position = data_of<int32_t>(position);
  }
  groups.run("csr_group_padded");
  return {indptr, indices, edge_id, pointers, rows, position};
}

std::tuple<Tensor, Tensor, Tensor> csr_transpose_few(Tensor indptr, Tensor indices,
                                                     int64_t num_src) {
  const OnDevice device(indptr);
  check(indptr.numel() > 0, "indptr must have one number more than there are destinations");
  const int64_t num_dst = indptr.numel() - 1;
  const Tensor pointers = dense(device, indptr, ScalarType::Long, num_dst + 1, "indptr");
  const Tensor sources = integers(device, indices, -1, "indices");
  check_size(num_src, 0, kMost, "num_src");
  check_size(num_dst, sources.numel() ? 1 : 0, kMost, "the number of destinations");
  check_size(sources.numel(), 0, kMost, "the number of edges");
  Grouping args{};
  args.from = column_of(sources);
  args.grouped = data_of<int64_t>(pointers);
  args.num_given = args.num_edges = sources.numel();
  args.destinations.rows = num_dst;
  args.sources.rows = num_src;
  args.wide = sources.scalar_type() == ScalarType::Long;
  Groups groups(device, indptr, args);
  Tensor by_source = groups.by(args.sources), rows = groups.numbers(sources.scalar_type()),
         position = groups.numbers();
  args.rows = data_of(rows);
  args.position = data_of<int32_t>(position);
  groups.run("csr_transpose_few");
  return {by_source, rows, position};
}

}  // namespace
}  // namespace pyg_scale::cuda

PYG_SCALE_DEVICE_LIBRARY(m) {
  m.impl("csr_group_padded", TORCH_BOX(&pyg_scale::cuda::csr_group_padded));
  m.impl("csr_transpose_few", TORCH_BOX(&pyg_scale::cuda::csr_transpose_few));
}
