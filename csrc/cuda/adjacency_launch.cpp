// Launches the kernel that groups edges.

#include <algorithm>

#include "adjacency.h"
#include "launch.h"

using namespace pyg_scale::cuda;

extern "C" int pyg_scale_cuda_group(const Grouping* args, Stream stream) {
  const int result = clear(stream, args->counts, args->num_counts);
  if (result) return result;
  int64_t tiles = 0;
  for (const End& end : {args->destinations, args->sources}) {
    if (end.cursor) tiles += end.num_tiles();
  }
  const int64_t blocks = std::max(tiles, ceil_div(args->num_edges, kBlockThreads));
  return launch_together(stream, {"adjacency", ""}, "group", blocks, args);
}
