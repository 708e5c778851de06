// Edges grouped by destination from an edge list, see pyg_scale/ops/csc.py.
//
// Where threads share the work, each has a range of destinations: edges stay in their order
// without atomics, and no thread needs memory of its own.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "graph_view.h"
#include "parallel.h"
#include "pool.h"
#include "prefetch.h"

namespace pyg_scale {
namespace {

constexpr int64_t kTaskEdges = 1 << 16;   // fewer are not worth a thread
constexpr int64_t kFar = 32, kNear = 16;  // edges ahead whose memory is asked for

// Calls f(task) for each of `tasks`, in parallel.
template <typename F>
void for_tasks(int64_t tasks, const F& f) {
  tasks <= 1 ? f(0) : for_each_task(tasks, f);
}

int64_t tasks_for(int64_t num_edges, int64_t num_threads) {
  return std::max<int64_t>(1, std::min(usable_threads(num_threads), num_edges / kTaskEdges));
}

// Where the part of a task begins, if `size` things are shared.
int64_t share(int64_t size, int64_t task, int64_t tasks) {
  return size / tasks * task + size % tasks * task / tasks;
}

// Ranges of destinations with about equally many edges, if `begin` rises. It has one entry for each
// destination.
std::vector<int64_t> bounds(const int64_t* begin, int64_t num_dst, int64_t num_edges,
                            int64_t tasks) {
  std::vector<int64_t> out{0};
  for (int64_t task = 1; task < tasks; ++task) {
    const int64_t* at = std::lower_bound(begin, begin + num_dst, share(num_edges, task, tasks));
    out.push_back(std::max(out.back(), static_cast<int64_t>(at - begin)));
  }
  out.push_back(num_dst);
  return out;
}

void lower(std::atomic<int64_t>& least, int64_t value) {
  int64_t before = least.load();
  while (value < before && !least.compare_exchange_weak(before, value)) {
  }
}

// a - b modulo 2^64. It is large if a is smaller, so one comparison checks both ends of a range.
uint64_t less(int64_t a, int64_t b) { return static_cast<uint64_t>(a) - static_cast<uint64_t>(b); }

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

// The first edge with a node out of range, and the first edge whose destination is smaller than
// that of the edge before it; -1 if there is none.
std::tuple<int64_t, int64_t> csc_scan(Tensor dst, Tensor src, int64_t num_dst, int64_t num_src,
                                      int64_t num_threads) {
  const IntColumn to = int_column(dst, "dst"), from = int_column(src, "src");
  const int64_t num_edges = dst.numel();
  check(src.numel() == num_edges, "dst and src must have the same number of entries");
  check_count(num_dst, "num_dst");
  check_count(num_src, "num_src");
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

[[noreturn]] void not_sorted(int64_t num_dst) {
  fail("dst must be sorted, from 0 to num_dst - 1 = " + std::to_string(num_dst - 1));
}

// Where the edges of each destination begin; `dst` must be sorted and in range.
Tensor csc_pointers(Tensor dst, int64_t num_dst, int64_t num_threads) {
  const IntColumn to = int_column(dst, "dst");
  const int64_t num_edges = dst.numel();
  check_count(num_dst, "num_dst");
  Tensor out = huge_empty({num_dst + 1}, ScalarType::Long);
  int64_t* indptr = out.mutable_data_ptr<int64_t>();
  const int64_t tasks = tasks_for(num_edges, num_threads);
  for_tasks(tasks, [&](int64_t task) {
    const int64_t end = share(num_edges, task + 1, tasks);
    int64_t e = share(num_edges, task, tasks);
    int64_t v = e ? to[e - 1] : -1;
    if (v < -1) not_sorted(num_dst);
    for (; e < end; ++e) {
      const int64_t next = to[e];
      if (next < v || static_cast<uint64_t>(next) >= static_cast<uint64_t>(num_dst)) [[unlikely]] {
        not_sorted(num_dst);
      }
      while (v < next) indptr[++v] = e;
    }
  });
  for (int64_t v = num_edges ? to[num_edges - 1] : -1; v < num_dst;) indptr[++v] = num_edges;
  return out;
}

// For csc_place: entry v + 1 is where the edges of v begin, the first entry is 0.
Tensor csc_cursor(Tensor dst, int64_t num_dst, int64_t num_threads) {
  const IntColumn to = int_column(dst, "dst");
  const int64_t num_edges = dst.numel();
  check_count(num_dst, "num_dst");
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
        const auto coming = less(to[e + kFar], first);
        if (coming < mine) __builtin_prefetch(count + coming, 1);
      }
      const auto v = less(to[e], first);
      if (v < mine) ++count[v];
    }
  });
  for (int64_t v = 0; v < num_dst; ++v) cursor[v + 2] += cursor[v + 1];
  if (cursor[num_dst + 1] != num_edges) {
    fail("dst must be from 0 to num_dst - 1 = " + std::to_string(num_dst - 1));
  }
  return out;
}

struct Range {
  int64_t begin, end;
};

// Writes neighbour and edge id of some edges behind the earlier edges of their destinations, of
// those in `nodes`. Returns how many edges it wrote; `room` is the space for all of them.
template <typename T>
int64_t place(const IntColumn& to, const IntColumn& from, int64_t* cursor, T* pair, int64_t room,
              Range edges, Range nodes) {
  const int64_t first = nodes.begin;
  const auto mine = static_cast<uint64_t>(nodes.end - first);
  int64_t* next = cursor + 1 + first;
  int64_t placed = 0;
  for (int64_t e = edges.begin; e < edges.end; ++e) {
    if (e + kFar < edges.end) {
      const auto far = less(to[e + kFar], first);
      if (far < mine) __builtin_prefetch(next + far, 1);
      const auto near = less(to[e + kNear], first);
      if (near < mine) prefetch_entry<1>(reinterpret_cast<const T(*)[2]>(pair), next[near]);
    }
    const auto v = less(to[e], first);
    if (v >= mine) continue;
    const int64_t at = next[v];
    if (static_cast<uint64_t>(at) >= static_cast<uint64_t>(room)) [[unlikely]] {
      fail("cursor is not of these edges: it leads to place " + std::to_string(at));
    }
    next[v] = at + 1;
    pair[2 * at] = static_cast<T>(from[e]);
    pair[2 * at + 1] = static_cast<T>(e);
    ++placed;
  }
  return placed;
}

void csc_place(Tensor dst, Tensor src, Tensor cursor, Tensor pair, int64_t begin, int64_t end,
               int64_t num_threads) {
  const IntColumn to = int_column(dst, "dst"), from = int_column(src, "src");
  const int64_t num_edges = dst.numel(), num_dst = cursor.numel() - 2;
  check(num_dst >= 0, "cursor must hold two numbers more than there are destinations");
  int64_data(cursor, num_dst + 2, "cursor");
  auto* next = static_cast<int64_t*>(cursor.mutable_data_ptr());
  const bool wide = pair.scalar_type() == ScalarType::Long;
  check(pair.is_cpu() && pair.is_contiguous() && pair.numel() == 2 * num_edges &&
            (wide || pair.scalar_type() == ScalarType::Int),
        "pair must be contiguous, int32 or int64, with two numbers an edge, on the CPU");
  check(src.numel() == num_edges, "dst and src must have the same number of entries");
  check_apart(cursor, "cursor", {&dst, &src, &pair});
  check_apart(pair, "pair", {&dst, &src});
  check(0 <= begin && begin <= end && end <= num_edges, "there are no such edges");
  const int64_t tasks = tasks_for(end - begin, num_threads);
  const auto bound = bounds(next + 1, num_dst, num_edges, tasks);
  std::atomic<int64_t> placed{0};
  for_tasks(tasks, [&](int64_t task) {
    const Range edges{begin, end}, nodes{bound[task], bound[task + 1]};
    void* pairs = pair.mutable_data_ptr();
    placed += wide ? place(to, from, next, static_cast<int64_t*>(pairs), num_edges, edges, nodes)
                   : place(to, from, next, static_cast<int32_t*>(pairs), num_edges, edges, nodes);
  });
  check(placed == end - begin, "dst has destinations that cursor has no place for");
}

// Calls f(first, last) for ranges of destinations.
template <typename F>
void for_destinations(const int64_t* indptr, int64_t num_dst, int64_t num_threads, const F& f) {
  const int64_t num_edges = std::max<int64_t>(0, indptr[num_dst]);
  const int64_t tasks = tasks_for(num_edges, num_threads);
  const auto bound = bounds(indptr, num_dst, num_edges, tasks);
  for_tasks(tasks, [&](int64_t task) { f(bound[task], bound[task + 1]); });
}

// Edges grouped by destination, of which the ids of positions may be given.
struct Grouped {
  Grouped(const Tensor& indptr, const Tensor& indices, const Tensor& edge_id)
      : num_dst(num_pointed(indptr)), num_edges(indices.numel()) {
    begin = int64_data(indptr, num_dst + 1, "indptr");
    neighbor = int_column(indices, "indices");
    id = int_column(edge_id, "edge_id");
    if (edge_id.numel() == 0) id.data = nullptr;
    check(
        begin[0] == 0 && begin[num_dst] == num_edges && (!id.data || edge_id.numel() == num_edges),
        "indptr must go from 0 to the number of edges");
  }

  template <typename T>
  void copy(int64_t v, int64_t first_id, T* out) const {
    for (int64_t e = begin[v]; e < begin[v + 1]; ++e, out += 2) {
      const int64_t of = id.data ? id[e] : e;
      if (static_cast<uint64_t>(of) >= static_cast<uint64_t>(num_edges)) [[unlikely]]
        none(of, e);
      out[0] = static_cast<T>(neighbor[e]);
      out[1] = static_cast<T>(of + first_id);
    }
  }

  [[noreturn]] __attribute__((noinline)) void none(int64_t of, int64_t e) const {
    fail("edge_id[" + std::to_string(e) + "] is " + std::to_string(of) + ", but there are only " +
         std::to_string(num_edges) + " edges");
  }

  int64_t num_dst, num_edges;
  const int64_t* begin;
  IntColumn neighbor, id;
};

template <typename T>
void merge(const Grouped& first, const Grouped& second, T* pair, int64_t num_threads) {
  for_destinations(first.begin, first.num_dst, num_threads, [&](int64_t low, int64_t high) {
    for (int64_t v = low; v < high; ++v) {
      check_entries(v, first.begin[v], first.begin[v + 1], first.num_edges);
      check_entries(v, second.begin[v], second.begin[v + 1], second.num_edges);
      first.copy(v, 0, pair + 2 * (first.begin[v] + second.begin[v]));
      second.copy(v, first.num_edges, pair + 2 * (first.begin[v + 1] + second.begin[v]));
    }
  });
}

// Writes neighbour and id of the edges of each destination: those of the first, then those of the
// second, whose ids continue.
void csc_merge(Tensor first_indptr, Tensor first_indices, Tensor first_id, Tensor second_indptr,
               Tensor second_indices, Tensor second_id, Tensor pair, int64_t num_threads) {
  const Grouped first(first_indptr, first_indices, first_id);
  const Grouped second(second_indptr, second_indices, second_id);
  check(first.num_dst == second.num_dst, "both must have the same number of destinations");
  const bool wide = pair.scalar_type() == ScalarType::Long;
  check(pair.is_cpu() && pair.is_contiguous() &&
            pair.numel() == 2 * (first.num_edges + second.num_edges) &&
            (wide || pair.scalar_type() == ScalarType::Int),
        "pair must be contiguous, int32 or int64, with two numbers an edge, on the CPU");
  check_apart(
      pair, "pair",
      {&first_indptr, &first_indices, &first_id, &second_indptr, &second_indices, &second_id});
  wide ? merge(first, second, static_cast<int64_t*>(pair.mutable_data_ptr()), num_threads)
       : merge(first, second, static_cast<int32_t*>(pair.mutable_data_ptr()), num_threads);
}

struct TimedEdge {
  int64_t time, neighbor, id;
};

// The times of edges or of nodes. Each edge reads one of them.
struct Times {
  const int64_t* data;
  int64_t size;
  bool of_edges;

  // The time with number `of`, to which the edge at position `e` refers.
  int64_t at(int64_t of, int64_t e) const {
    if (static_cast<uint64_t>(of) >= static_cast<uint64_t>(size)) [[unlikely]]
      none(of, e);
    return data[of];
  }

  [[noreturn]] __attribute__((noinline)) void none(int64_t of, int64_t e) const {
    fail(std::string(of_edges ? "edge_id" : "indices") + "[" + std::to_string(e) + "] is " +
         std::to_string(of) + ", but there are only " + std::to_string(size) + " times");
  }
};

template <typename T>
void sort_by_time(Column<T> indices, Column<T> edge_id, const Times& times, int64_t begin,
                  int64_t end, int64_t num_edges, std::vector<TimedEdge>& edges) {
  edges.clear();
  for (int64_t e = begin; e < end; ++e) {
    if (e + kFar < num_edges) {
      prefetch_entry(times.data, times.of_edges ? edge_id[e + kFar] : indices[e + kFar]);
    }
    const int64_t neighbor = indices[e], id = edge_id[e];
    edges.push_back({times.at(times.of_edges ? id : neighbor, e), neighbor, id});
  }
  std::stable_sort(edges.begin(), edges.end(),
                   [](const TimedEdge& a, const TimedEdge& b) { return a.time < b.time; });
  for (int64_t e = begin; e < end; ++e) {
    indices[e] = static_cast<T>(edges[e - begin].neighbor);
    edge_id[e] = static_cast<T>(edges[e - begin].id);
  }
}

// Returns whether the edges of every destination were in order of time. With `sort`, they are
// afterwards.
bool csc_by_time(Tensor indptr, Tensor indices, Tensor edge_id, Tensor time, bool of_edges,
                 bool sort, int64_t num_threads) {
  const int64_t num_dst = num_pointed(indptr), num_edges = indices.numel();
  const int64_t* begin = int64_data(indptr, num_dst + 1, "indptr");
  const IntColumn neighbor = int_column(indices, "indices"), id = int_column(edge_id, "edge_id");
  const bool has_id = edge_id.numel() > 0 || num_edges == 0;
  check(!has_id || (edge_id.numel() == num_edges && id.wide == neighbor.wide),
        "edge_id must be as indices");
  check(!sort || has_id, "edges cannot be moved without their ids");
  const int64_t num_times = of_edges ? num_edges : time.numel();
  const Times times{int64_data(time, num_times, "time"), num_times, of_edges};
  if (sort) {  // indices and edge_id may be columns of one table
    check_apart(indices, "indices", {&indptr, &time});
    check_apart(edge_id, "edge_id", {&indptr, &time});
  }
  std::atomic<bool> sorted{true};
  for_destinations(begin, num_dst, num_threads, [&](int64_t first, int64_t last) {
    std::vector<TimedEdge> edges;
    const auto at = [&](int64_t p) {
      return times.at(!of_edges ? neighbor[p] : has_id ? id[p] : p, p);
    };
    for (int64_t v = first; v < last; ++v) {
      const int64_t from = begin[v], to = begin[v + 1];
      check_entries(v, from, to, num_edges);
      if (to - from < 2) continue;
      int64_t e = from + 1;
      for (int64_t before = at(from); e < to; ++e) {
        const int64_t now = at(e);
        if (now < before) break;
        before = now;
      }
      if (e >= to) continue;
      sorted = false;
      if (!sort) return;
      neighbor.wide ? sort_by_time(column<int64_t>(indices), column<int64_t>(edge_id), times, from,
                                   to, num_edges, edges)
                    : sort_by_time(column<int32_t>(indices), column<int32_t>(edge_id), times, from,
                                   to, num_edges, edges);
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
    for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
      const double w = at(e);
      if (!(w >= 0 && w <= std::numeric_limits<double>::max())) [[unlikely]] {
        fail("weight must be finite and not negative (got " + std::to_string(w) + ")");
      }
      largest = std::max(largest, w);
    }
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
  const int64_t num_dst = num_pointed(indptr), num_edges = weight.numel();
  const int64_t* begin = int64_data(indptr, num_dst + 1, "indptr");
  IntColumn id = int_column(edge_id, "edge_id");
  if (edge_id.numel() == 0) id.data = nullptr;
  check(begin[0] == 0 && begin[num_dst] == num_edges && (!id.data || edge_id.numel() == num_edges),
        "indptr must go from 0 to the number of edges, each of which has a weight");
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
      "csc_merge(Tensor first_indptr, Tensor first_indices, Tensor first_id, "
      "Tensor second_indptr, Tensor second_indices, Tensor second_id, Tensor(a!) pair, "
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
  m.impl("csc_merge", TORCH_BOX(&pyg_scale::csc_merge));
  m.impl("csc_by_time", TORCH_BOX(&pyg_scale::csc_by_time));
  m.impl("csc_weight_prefix", TORCH_BOX(&pyg_scale::csc_weight_prefix));
}
