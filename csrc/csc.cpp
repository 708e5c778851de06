// Edges grouped by destination from an edge list, see pyg_scale/ops/csc.py.
//
// Where threads share the work, each has a range of destinations: edges stay in their order
// without atomics, and no thread needs memory of its own.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <tuple>
#include <vector>

#include "graph_view.h"
#include "pool.h"

namespace pyg_scale {
namespace {

constexpr int64_t kTaskEdges = 1 << 16;  // fewer are not worth a thread
constexpr int64_t kFar = 32, kNear = 16;  // edges ahead whose memory is asked for

// Calls f(task) for each of `tasks`, in parallel.
template <typename F>
void for_tasks(int64_t tasks, const F& f) {
  if (tasks <= 1) return f(0);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) f(task);
  });
}

int64_t tasks_for(int64_t num_edges, int64_t num_threads) {
  return std::max<int64_t>(1, std::min(num_threads, num_edges / kTaskEdges));
}

// Where the part of a task begins, if `size` things are shared.
int64_t share(int64_t size, int64_t task, int64_t tasks) {
  return size / tasks * task + size % tasks * task / tasks;
}

// Ranges of destinations with about as many edges each; `begin` rises, one entry a destination.
std::vector<int64_t> bounds(const int64_t* begin, int64_t num_dst, int64_t num_edges,
                            int64_t tasks) {
  std::vector<int64_t> out{0};
  for (int64_t task = 1; task < tasks; ++task) {
    const int64_t* at = std::lower_bound(begin, begin + num_dst, share(num_edges, task, tasks));
    out.push_back(at - begin);
  }
  out.push_back(num_dst);
  return out;
}

void lower(std::atomic<int64_t>& least, int64_t value) {
  int64_t before = least.load();
  while (value < before && !least.compare_exchange_weak(before, value)) {
  }
}

// A writable column; int_column has checked it.
template <typename T>
struct Column {
  T* data;
  int64_t stride;
  T& operator[](int64_t i) const { return data[i * stride]; }
};

template <typename T>
Column<T> column(const Tensor& tensor) {
  return {tensor.numel() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr,
          tensor.numel() ? tensor.stride(0) : 1};
}

// The first edge with a node out of range, and the first with a smaller destination than the one
// before it; -1 if there is none.
std::tuple<int64_t, int64_t> csc_scan(Tensor dst, Tensor src, int64_t num_dst, int64_t num_src,
                                      int64_t num_threads) {
  const IntColumn to = int_column(dst, "dst"), from = int_column(src, "src");
  const int64_t num_edges = dst.numel();
  check(src.numel() == num_edges, "dst and src must have the same number of entries");
  std::atomic<int64_t> wrong{num_edges}, descent{num_edges};
  const int64_t tasks = tasks_for(num_edges, num_threads);
  for_tasks(tasks, [&](int64_t task) {
    const int64_t end = share(num_edges, task + 1, tasks);
    int64_t e = share(num_edges, task, tasks);
    int64_t before = e ? to[e - 1] : 0;
    bool down = false;
    for (; e < end; ++e) {
      const int64_t v = to[e], u = from[e];
      if (static_cast<uint64_t>(v) >= static_cast<uint64_t>(num_dst) ||
          static_cast<uint64_t>(u) >= static_cast<uint64_t>(num_src)) [[unlikely]] {
        lower(wrong, e);
        return;
      }
      if (v < before && !down) [[unlikely]] {
        lower(descent, e);
        down = true;
      }
      before = v;
    }
  });
  return {wrong < num_edges ? wrong.load() : -1, descent < num_edges ? descent.load() : -1};
}

// Where the edges of each destination begin; `dst` is sorted and in range.
Tensor csc_pointers(Tensor dst, int64_t num_dst, int64_t num_threads) {
  const IntColumn to = int_column(dst, "dst");
  const int64_t num_edges = dst.numel();
  Tensor out = huge_empty({num_dst + 1}, ScalarType::Long);
  int64_t* indptr = out.mutable_data_ptr<int64_t>();
  const int64_t tasks = tasks_for(num_edges, num_threads);
  for_tasks(tasks, [&](int64_t task) {
    const int64_t end = share(num_edges, task + 1, tasks);
    int64_t e = share(num_edges, task, tasks);
    int64_t v = e ? to[e - 1] : -1;
    for (; e < end; ++e) {
      for (const int64_t next = to[e]; v < next;) indptr[++v] = e;
    }
  });
  for (int64_t v = num_edges ? to[num_edges - 1] : -1; v < num_dst;) indptr[++v] = num_edges;
  return out;
}

// For csc_place: entry v + 1 is where the edges of v begin, the first entry is 0.
Tensor csc_cursor(Tensor dst, int64_t num_dst, int64_t num_threads) {
  const IntColumn to = int_column(dst, "dst");
  const int64_t num_edges = dst.numel();
  Tensor out = huge_empty({num_dst + 2}, ScalarType::Long);
  int64_t* cursor = out.mutable_data_ptr<int64_t>();
  std::fill(cursor, cursor + num_dst + 2, 0);
  const int64_t tasks = tasks_for(num_edges, num_threads);
  for_tasks(tasks, [&](int64_t task) {
    const int64_t first = share(num_dst, task, tasks), last = share(num_dst, task + 1, tasks);
    const auto mine = static_cast<uint64_t>(last - first);
    int64_t* count = cursor + 2 + first;
    for (int64_t e = 0; e < num_edges; ++e) {
      if (e + kFar < num_edges) {
        const auto coming = static_cast<uint64_t>(to[e + kFar] - first);
        if (coming < mine) __builtin_prefetch(count + coming, 1);
      }
      const auto v = static_cast<uint64_t>(to[e] - first);
      if (v < mine) ++count[v];
    }
  });
  for (int64_t v = 0; v < num_dst; ++v) cursor[v + 2] += cursor[v + 1];
  return out;
}

// Puts the edges [begin, end) behind the earlier ones of their destinations: neighbour, edge id.
template <typename T>
void place(const IntColumn& to, const IntColumn& from, int64_t* cursor, T* pair, int64_t begin,
           int64_t end, int64_t first, int64_t last) {
  const auto mine = static_cast<uint64_t>(last - first);
  int64_t* next = cursor + 1 + first;
  for (int64_t e = begin; e < end; ++e) {
    if (e + kFar < end) {
      const auto far = static_cast<uint64_t>(to[e + kFar] - first);
      if (far < mine) __builtin_prefetch(next + far, 1);
      const auto near = static_cast<uint64_t>(to[e + kNear] - first);
      if (near < mine) __builtin_prefetch(pair + 2 * next[near], 1);
    }
    const auto v = static_cast<uint64_t>(to[e] - first);
    if (v >= mine) continue;
    T* entry = pair + 2 * next[v]++;
    entry[0] = static_cast<T>(from[e]);
    entry[1] = static_cast<T>(e);
  }
}

void csc_place(Tensor dst, Tensor src, Tensor cursor, Tensor pair, int64_t begin, int64_t end,
               int64_t num_threads) {
  const IntColumn to = int_column(dst, "dst"), from = int_column(src, "src");
  const int64_t num_edges = dst.numel(), num_dst = cursor.numel() - 2;
  int64_data(cursor, num_dst + 2, "cursor");
  auto* next = static_cast<int64_t*>(cursor.mutable_data_ptr());
  check(pair.is_contiguous() && pair.numel() == 2 * num_edges && src.numel() == num_edges,
        "pair must be contiguous and have two numbers an edge");
  check(0 <= begin && begin <= end && end <= num_edges, "there are no such edges");
  const bool wide = pair.scalar_type() == ScalarType::Long;
  const int64_t tasks = tasks_for(end - begin, num_threads);
  const auto bound = bounds(next + 1, num_dst, num_edges, tasks);
  for_tasks(tasks, [&](int64_t task) {
    const int64_t first = bound[task], last = bound[task + 1];
    wide ? place(to, from, next, static_cast<int64_t*>(pair.mutable_data_ptr()), begin, end,
                 first, last)
         : place(to, from, next, static_cast<int32_t*>(pair.mutable_data_ptr()), begin, end,
                 first, last);
  });
}

// Calls f(first, last) for ranges of destinations.
template <typename F>
void for_destinations(const int64_t* indptr, int64_t num_dst, int64_t num_threads, const F& f) {
  const int64_t tasks = tasks_for(indptr[num_dst], num_threads);
  const auto bound = bounds(indptr, num_dst, indptr[num_dst], tasks);
  for_tasks(tasks, [&](int64_t task) { f(bound[task], bound[task + 1]); });
}

struct TimedEdge {
  int64_t time, neighbor, id;
};

template <typename T>
void sort_by_time(Column<T> indices, Column<T> edge_id, const int64_t* time, bool of_edges,
                  int64_t begin, int64_t end, std::vector<TimedEdge>& edges) {
  edges.clear();
  for (int64_t e = begin; e < end; ++e) {
    edges.push_back({time[of_edges ? edge_id[e] : indices[e]], indices[e], edge_id[e]});
  }
  std::stable_sort(edges.begin(), edges.end(),
                   [](const TimedEdge& a, const TimedEdge& b) { return a.time < b.time; });
  for (int64_t e = begin; e < end; ++e) {
    indices[e] = static_cast<T>(edges[e - begin].neighbor);
    edge_id[e] = static_cast<T>(edges[e - begin].id);
  }
}

// Whether the edges of every destination are in the order of time; if `sort`, they are then.
bool csc_by_time(Tensor indptr, Tensor indices, Tensor edge_id, Tensor time, bool of_edges,
                 bool sort, int64_t num_threads) {
  const int64_t num_dst = indptr.numel() - 1, num_edges = indices.numel();
  const int64_t* begin = int64_data(indptr, num_dst + 1, "indptr");
  const IntColumn neighbor = int_column(indices, "indices"), id = int_column(edge_id, "edge_id");
  const bool has_id = edge_id.numel() > 0 || num_edges == 0;
  check(!has_id || (edge_id.numel() == num_edges && id.wide == neighbor.wide),
        "edge_id must be as indices");
  check(!sort || has_id, "edges cannot be moved without their ids");
  const int64_t* when = int64_data(time, of_edges ? num_edges : time.numel(), "time");
  std::atomic<bool> sorted{true};
  for_destinations(begin, num_dst, num_threads, [&](int64_t first, int64_t last) {
    std::vector<TimedEdge> edges;
    for (int64_t v = first; v < last; ++v) {
      int64_t e = begin[v] + 1;
      const auto at = [&](int64_t p) { return when[!of_edges ? neighbor[p] : has_id ? id[p] : p]; };
      while (e < begin[v + 1] && at(e - 1) <= at(e)) ++e;
      if (e >= begin[v + 1]) continue;
      sorted = false;
      if (!sort) return;
      neighbor.wide ? sort_by_time(column<int64_t>(indices), column<int64_t>(edge_id), when,
                                   of_edges, begin[v], begin[v + 1], edges)
                    : sort_by_time(column<int32_t>(indices), column<int32_t>(edge_id), when,
                                   of_edges, begin[v], begin[v + 1], edges);
    }
  });
  return sorted;
}

template <typename W>
void add_weights(const int64_t* indptr, int64_t first, int64_t last, const IntColumn& id,
                 const W* weight, int64_t* out) {
  for (int64_t v = first; v < last; ++v) {
    double largest = 0;
    const auto at = [&](int64_t e) { return static_cast<double>(weight[id.data ? id[e] : e]); };
    for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) largest = std::max(largest, at(e));
    int64_t sum = 0;
    for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
      const double w = at(e);
      if (w > 0) sum += std::max<int64_t>(1, static_cast<int64_t>(w / largest * 0x1p32));
      out[e] = sum;
    }
  }
}

// The running sum of the fixed-point weights of each destination; weights are finite and >= 0.
Tensor csc_weight_prefix(Tensor indptr, Tensor edge_id, Tensor weight, int64_t num_threads) {
  const int64_t num_dst = indptr.numel() - 1, num_edges = weight.numel();
  const int64_t* begin = int64_data(indptr, num_dst + 1, "indptr");
  IntColumn id = int_column(edge_id, "edge_id");
  if (edge_id.numel() == 0) id.data = nullptr;
  check(begin[num_dst] == num_edges && (!id.data || edge_id.numel() == num_edges),
        "there must be one weight an edge");
  for (int64_t v = 0; v < num_dst; ++v) check_entries(v, begin[v], begin[v + 1], num_edges);
  check(!id.data || first_outside(id, num_edges, num_edges) == num_edges,
        "edge_id must be of edges");
  check(weight.is_cpu() && weight.is_contiguous(), "weight must be contiguous, on the CPU");
  const bool single = weight.scalar_type() == ScalarType::Float;
  check(single || weight.scalar_type() == ScalarType::Double, "weight must be floating point");
  Tensor out = huge_empty({num_edges}, ScalarType::Long);
  int64_t* sums = out.mutable_data_ptr<int64_t>();
  const void* weights = weight.const_data_ptr();
  for_destinations(begin, num_dst, num_threads, [&](int64_t first, int64_t last) {
    single ? add_weights(begin, first, last, id, static_cast<const float*>(weights), sums)
           : add_weights(begin, first, last, id, static_cast<const double*>(weights), sums);
  });
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "csc_scan(Tensor dst, Tensor src, int num_dst, int num_src, int num_threads) -> (int, int)");
  m.def("csc_pointers(Tensor dst, int num_dst, int num_threads) -> Tensor");
  m.def("csc_cursor(Tensor dst, int num_dst, int num_threads) -> Tensor");
  m.def(
      "csc_place(Tensor dst, Tensor src, Tensor(a!) cursor, Tensor(b!) pair, int begin, int end, "
      "int num_threads) -> ()");
  m.def(
      "csc_by_time(Tensor indptr, Tensor(a!) indices, Tensor(b!) edge_id, Tensor time, "
      "bool of_edges, bool sort, int num_threads) -> bool");
  m.def(
      "csc_weight_prefix(Tensor indptr, Tensor edge_id, Tensor weight, int num_threads) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("csc_scan", TORCH_BOX(&pyg_scale::csc_scan));
  m.impl("csc_pointers", TORCH_BOX(&pyg_scale::csc_pointers));
  m.impl("csc_cursor", TORCH_BOX(&pyg_scale::csc_cursor));
  m.impl("csc_place", TORCH_BOX(&pyg_scale::csc_place));
  m.impl("csc_by_time", TORCH_BOX(&pyg_scale::csc_by_time));
  m.impl("csc_weight_prefix", TORCH_BOX(&pyg_scale::csc_weight_prefix));
}
