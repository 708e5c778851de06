// Launches the kernels that group edges.

#include "adjacency.h"
#include "launch.h"

using namespace pyg_scale::cuda;

extern "C" int pyg_scale_cuda_group(const Grouping* args, Stream stream) {
  int result = 0;
  const auto run = [&](const char* kernel, int64_t blocks) {
    if (!result) result = launch(stream, {"adjacency", ""}, kernel, blocks, 1, args, 1);
  };
  const int64_t edges = ceil_div(args->num_edges, kBlockThreads);
  int64_t tiles = 0;
  for (const End& end : {args->destinations, args->sources}) {
    if (end.cursor) tiles += end.num_tiles();
  }
  run("group_zero", ceil_div(args->num_counts, kBlockThreads));
  run("group_count", edges);
  run("group_scan", tiles);
  run("group_place", edges);
  run("group_order", edges);
  return result;
}
