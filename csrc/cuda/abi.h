// What the host hands to the kernels: raw pointers and numbers, no type of torch's.
//
// Every function of the C interface takes the stream last, launches, and returns 0, or a code that
// pyg_scale_cuda_error explains.
#pragma once

#if defined(__CUDACC_RTC__)
using int32_t = int;
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define PYG_SCALE_BOTH __host__ __device__
#else
#define PYG_SCALE_BOTH
#endif

namespace pyg_scale::cuda {

constexpr int kBlockThreads = 256;  // of every kernel
constexpr int kWarp = 32;
constexpr int kLoadBytes = 16;  // the widest load of a thread

// In a row of more loads than a warp has lanes, a lane keeps sums of so many numbers, so that few
// groups read the same indices.
constexpr int kSumsHeld = 16, kExtremesHeld = 8, kChannelsHeld = 8;

// The loads of a lane whose sums it keeps, if a load brings `count` numbers.
PYG_SCALE_BOTH constexpr int loads_held(int count, int numbers) {
  return numbers <= count ? 1 : numbers / count < 8 ? numbers / count : 8;
}

// Where kernels run: a stream of a device.
struct Stream {
  void* handle;
  int32_t device;
};

// The types of features; those of torch in another numbering.
enum class Type : int32_t { kFloat, kDouble, kBfloat16, kHalf };

// int32 or int64 numbers. Without data, number i is i.
struct Column {
  const void* data;
  bool wide;  // int64

  PYG_SCALE_BOTH int64_t operator[](int64_t i) const {
    if (!data) return i;
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The edges of each row (see pyg_scale/ops/adjacency.py), and where long rows are cut (see
// rows.cuh).
struct Graph {
  const int64_t* indptr;
  Column indices;  // of rows of features, [0, num_columns)
  Column edge_id;
  int64_t num_rows, num_edges, num_columns;
  int64_t chunk;  // edges; rows with more are cut at multiples of it

  // The number of chunks; 0 if no row can be long.
  PYG_SCALE_BOTH int64_t num_chunks() const {
    return num_edges > chunk ? (num_edges + chunk - 1) / chunk : 0;
  }
  // Each chunk may have the end of one long row and the beginning of another.
  PYG_SCALE_BOTH int64_t num_slots() const { return 2 * num_chunks(); }
  PYG_SCALE_BOTH int64_t num_units() const { return num_slots() + num_rows; }
};

// Rows of features: contiguous, `stride` numbers apart. Absent if `data` is null.
struct Matrix {
  const void* data;
  int64_t stride;
};

// The number of edges of a chunk. The partial results of long rows take about 64 MiB at most, and a
// chunk is a small part of the work. It depends on the shapes alone, so that the bits of a result
// do, too.
PYG_SCALE_BOTH inline int64_t chunk_of(int64_t num_edges, int64_t row_size) {
#if defined(PYG_SCALE_CHUNK)
  (void)num_edges, (void)row_size;
  return PYG_SCALE_CHUNK;
#else
  int64_t chunk = 256;
  while (chunk < (int64_t{1} << 40) && num_edges / chunk * row_size > (int64_t{1} << 23)) {
    chunk *= 2;
  }
  return chunk;
#endif
}

// csr_sum: see pyg_scale/ops/aggregate_rules.py for the ops of these names.
struct Sum {
  Graph graph;
  Matrix x;
  const void* weight;  // [num_edges, heads] by id, or null
  int64_t heads, size;
  bool mean;
  void* out;      // [num_rows, size]
  void* partial;  // [num_slots, size] accumulators
};

// csr_extreme.
struct Extreme {
  Graph graph;
  Matrix x;
  const void* weight;  // [num_edges, heads] by id, or null
  int64_t heads, size;
  bool minimum;
  void* out;             // [num_rows, size]
  int32_t* arg;          // [num_rows, size]
  void* partial;         // [num_slots, size] accumulators
  int32_t* partial_arg;  // [num_slots, size]
};

// csr_extreme_grad.
struct ExtremeGrad {
  Graph graph;            // by source; its ids are positions by destination
  const int64_t* indptr;  // by destination
  Column edge_id;         // of positions by destination
  Matrix grad;            // of destinations
  const int32_t* arg;     // [destinations, size]
  const void* weight;     // [num_edges, heads] by id, or null
  int64_t heads, size;
  void* out;      // [num_rows, size]
  void* partial;  // [num_slots, size] accumulators
};

// csr_weight_grad.
struct WeightGrad {
  Graph graph;
  Matrix x, grad;
  const int32_t* arg;  // [num_rows, size] of an extreme, or null
  int64_t heads, size;
  bool mean;
  void* out;  // [num_edges, heads] accumulators, by id
};

// Attention dropout, see keep_mask in pyg_scale/ops/attention_plain.py; off without a seed.
struct Dropout {
  const int64_t* seed;  // on the device
  uint64_t below;       // the probability times 2^32
  double scale;         // what weights that stay are multiplied with
};

// The inputs of the logits. gat: `value` is x, and the parts of logits are a_src, a_dst and a_edge.
// gatv2: `value` is x_src, `query` x_dst, `edge` x_edge. dot: all four matrices. `number` is the
// slope or the scale.
struct AttentionInput {
  Matrix value, key, query, edge;      // rows of [heads, channels]
  const void* att;                     // [heads, channels] accumulators
  const void *a_src, *a_dst, *a_edge;  // [*, heads] accumulators; the last one may be null
  double number;
  int64_t heads, channels;
  Dropout dropout;
};

enum class Attention : int32_t { kGat, kGatv2, kDot };

// The forward pass.
struct AttentionForward {
  Graph graph;
  AttentionInput in;
  void* out;      // [num_rows, heads, channels]
  void* lse;      // [num_rows, heads] accumulators
  void* weights;  // [num_edges, heads] accumulators by id, or null
  void* partial;  // [num_slots, heads, 2 + channels] accumulators
};

// The backward pass. Pointers that a kind of attention does not use are null.
struct AttentionBackward {
  Graph graph;       // by destination
  Graph transposed;  // by source; its ids are positions by destination
  AttentionInput in;
  Matrix out, out_grad;
  const void* lse;
  const void *weights, *weights_grad;  // [num_edges, heads] by id, or null
  void* mean;                          // [destinations, heads] accumulators
  void* value_grad;                    // gat, gatv2: [sources, heads, channels]
  void* query_grad;                    // gatv2, dot: [destinations, heads, channels]
  void* edge_grad;                     // gatv2, dot: [num_edges, heads, channels] by id, or null
  void* source_grad;                   // gat: [sources, heads] accumulators
  void* att_grad;                      // gatv2: [heads, channels] accumulators
  void* logits_grad;     // [num_edges, heads] accumulators; gat: by id, others: by position
  void* stays;           // gatv2, dot: [num_edges, heads] accumulators by position
  void* partial;         // gatv2, dot: [num_slots of graph, heads, channels] accumulators
  void* partial_value;   // gat, gatv2: [num_slots of transposed, heads, channels] accumulators
  void* partial_source;  // gat: [num_slots of transposed, heads] accumulators
  void* partial_att;     // gatv2: [num_workers + kAttSegments, heads, channels] accumulators
  int64_t workers;       // gatv2, dot: how many groups of lanes share the rows
};

// Adds up segments of rows: out[s] = in[s * each] + ... + in[s * each + each - 1].
struct SumSegments {
  const void* in;  // [rows, size] accumulators
  int64_t rows, size, each;
  void* out;  // [segments, size]
};

constexpr int64_t kAttSegments = 512;

// The number of groups of lanes that share the rows to add up the attention vector's gradient, of
// `size` numbers: of a short vector many groups, as few threads are in each. What they add up takes
// 8 MiB, or 4096 vectors.
PYG_SCALE_BOTH inline int64_t num_workers(const Graph& graph, int64_t size) {
  const int64_t of_short = (int64_t{1} << 21) / (size > 0 ? size : 1);
  const int64_t most = of_short > 4096 ? of_short : 4096;
  return graph.num_units() < most ? graph.num_units() : most;
}

}  // namespace pyg_scale::cuda

#if !defined(__CUDACC__)  // of the host
extern "C" {
const char* pyg_scale_cuda_error(int code);  // of the last call of this thread that failed
int pyg_scale_cuda_sum(const pyg_scale::cuda::Sum* args, int32_t type,
                       pyg_scale::cuda::Stream stream);
int pyg_scale_cuda_extreme(const pyg_scale::cuda::Extreme* args, int32_t type,
                           pyg_scale::cuda::Stream stream);
int pyg_scale_cuda_extreme_grad(const pyg_scale::cuda::ExtremeGrad* args, int32_t type,
                                pyg_scale::cuda::Stream stream);
int pyg_scale_cuda_weight_grad(const pyg_scale::cuda::WeightGrad* args, int32_t type,
                               pyg_scale::cuda::Stream stream);
int pyg_scale_cuda_attention(const pyg_scale::cuda::AttentionForward* args, int32_t kind,
                             int32_t type, pyg_scale::cuda::Stream stream);
int pyg_scale_cuda_attention_grad(const pyg_scale::cuda::AttentionBackward* args, int32_t kind,
                                  int32_t type, pyg_scale::cuda::Stream stream);
}
#endif
