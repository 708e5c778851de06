// A graph without directions, loops and copies, see pyg_scale/ops/undirected.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "graph_view.h"
#include "keys.h"
#include "parallel.h"
#include "prefetch.h"

namespace pyg_scale {
namespace {

constexpr int64_t kAhead = 24;             // entries whose memory is asked for
constexpr int64_t kTaskEntries = 1 << 16;  // fewer are not worth a thread

void check_range(const int64_t* indptr, int64_t size, int64_t num_entries, int64_t begin,
                 int64_t end) {
  check(0 <= begin && begin <= end && end <= size, "there are no such nodes");
  check(indptr[begin] >= 0 && indptr[begin] <= indptr[end] && indptr[end] <= num_entries,
        "indptr does not fit indices");
}

// Ranges of the nodes [begin, end) with about as many entries each.
std::vector<int64_t> ranges(const int64_t* indptr, int64_t begin, int64_t end, int64_t threads) {
  const int64_t size = indptr[end] - indptr[begin];
  const int64_t tasks = std::max<int64_t>(1, std::min(threads, size / kTaskEntries));
  std::vector<int64_t> out{begin};
  for (int64_t task = 1; task < tasks; ++task) {
    const int64_t wanted = indptr[begin] + size / tasks * task;
    out.push_back(std::max(
        out.back(),
        static_cast<int64_t>(std::lower_bound(indptr + begin, indptr + end, wanted) - indptr)));
  }
  out.push_back(end);
  return out;
}

// Finds repeated numbers with a hash table, which stays in the cache for small rows.
class Repeats {
 public:
  template <typename F>
  bool any(int64_t size, const F& number) {
    const int bits = 64 - __builtin_clzll(static_cast<uint64_t>(2 * size));  // at most half full
    slot_.assign(size_t{1} << bits, -1);
    const uint64_t mask = slot_.size() - 1;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t x = number(i);
      uint64_t at = (static_cast<uint64_t>(x) * kGolden) >> (64 - bits);
      while (slot_[at] >= 0 && slot_[at] != x) at = (at + 1) & mask;
      if (slot_[at] == x) return true;
      slot_[at] = x;
    }
    return false;
  }

 private:
  std::vector<int64_t> slot_;
};

// Facts about the nodes [begin, end): ascending, self-loops, duplicates, and the sums of hashes of
// their entries (v, u) and of the reversed entries (u, v).
std::tuple<bool, bool, bool, int64_t, int64_t> adjacency_facts(Tensor indptr, Tensor indices,
                                                               int64_t begin, int64_t end,
                                                               int64_t num_threads) {
  const int64_t size = num_pointed(indptr);
  const int64_t* pointer = int64_data(indptr, size + 1, "indptr");
  const IntColumn column = int_column(indices, "indices");
  check_range(pointer, size, indices.numel(), begin, end);
  const auto bound = ranges(pointer, begin, end, num_threads);
  const auto tasks = static_cast<int64_t>(bound.size()) - 1;
  struct Found {
    bool ascending = true, loops = false, copies = false;
    uint64_t out = 0, in = 0;
  };
  std::vector<Found> found(static_cast<size_t>(tasks));
  for_each_task(tasks, [&](int64_t task) {
    Found mine;
    Repeats repeats;
    for (int64_t v = bound[task]; v < bound[task + 1]; ++v) {
      check_entries(v, pointer[v], pointer[v + 1], indices.numel());
      const uint64_t of_v = mix(static_cast<uint64_t>(v) + kGolden);
      int64_t before = -1;
      bool rises = true;
      for (int64_t i = pointer[v]; i < pointer[v + 1]; ++i) {
        const int64_t u = column[i];
        if (static_cast<uint64_t>(u) >= static_cast<uint64_t>(size)) [[unlikely]] {
          fail("node " + std::to_string(v) + " has the neighbour " + std::to_string(u) +
               ", but there are " + std::to_string(size) + " nodes");
        }
        rises &= u >= before;
        mine.copies |= u == before;
        mine.loops |= u == v;
        before = u;
        const uint64_t of_u = mix(static_cast<uint64_t>(u) + kGolden);
        mine.out += mix(of_v + static_cast<uint64_t>(u) * kGolden);
        mine.in += mix(of_u + static_cast<uint64_t>(v) * kGolden);
      }
      if (rises) continue;
      mine.ascending = false;
      if (mine.copies) continue;
      const int64_t first = pointer[v];
      mine.copies =
          repeats.any(pointer[v + 1] - first, [&](int64_t i) { return column[first + i]; });
    }
    found[static_cast<size_t>(task)] = mine;
  });
  Found all;
  for (const Found& each : found) {
    all.ascending &= each.ascending;
    all.loops |= each.loops;
    all.copies |= each.copies;
    all.out += each.out;
    all.in += each.in;
  }
  return {all.ascending, all.loops, all.copies, static_cast<int64_t>(all.out),
          static_cast<int64_t>(all.in)};
}

// The edges of some nodes of one type, in a numbering of all types: node i is dst_offset + i, or
// dst_offset + rows[i] if there are rows.
struct Block {
  const int64_t* indptr;
  IntColumn indices, rows;
  bool named;
  int64_t dst_offset, src_offset, num_nodes, num_edges;

  Block(const Tensor& pointers, const Tensor& neighbors, const Tensor& names, int64_t dst,
        int64_t src, int64_t nodes, int64_t begin, int64_t end)
      : indices(int_column(neighbors, "indices")),
        rows(int_column(names, "rows")),
        named(names.numel() > 0),
        dst_offset(dst),
        src_offset(src),
        num_nodes(nodes),
        num_edges(neighbors.numel()) {
    const int64_t size = num_pointed(pointers);
    indptr = int64_data(pointers, size + 1, "indptr");
    check(!named || names.numel() == size, "rows must name every node");
    check_range(indptr, size, neighbors.numel(), begin, end);
    check_count(dst_offset, "dst_offset");
    check_count(src_offset, "src_offset");
  }

  // The sum wraps round past the largest number to a negative one, which is no node.
  static int64_t moved(int64_t node, int64_t offset) {
    return static_cast<int64_t>(static_cast<uint64_t>(node) + static_cast<uint64_t>(offset));
  }

  template <typename F>
  void each(int64_t begin, int64_t end, const F& f) const {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t v = moved(named ? rows[i] : i, dst_offset);
      if (v < 0 || v >= num_nodes) [[unlikely]]
        fail("there is no node " + std::to_string(v));
      check_entries(i, indptr[i], indptr[i + 1], num_edges);
      for (int64_t e = indptr[i]; e < indptr[i + 1]; ++e) {
        const int64_t u = moved(indices[e], src_offset);
        if (u < 0 || u >= num_nodes) [[unlikely]]
          fail("there is no node " + std::to_string(u));
        f(v, u, e);
      }
    }
  }
};

int64_t* cursor_data(Tensor& cursor, int64_t num_nodes) {
  check(num_nodes >= 0, "cursor must hold two numbers more than there are nodes");
  int64_data(cursor, num_nodes + 2, "cursor");
  return static_cast<int64_t*>(cursor.mutable_data_ptr());
}

// Adds to cursor[v + 2] the entries that v gets from the nodes [begin, end) of a block.
void undirected_count(Tensor indptr, Tensor indices, Tensor rows, int64_t dst_offset,
                      int64_t src_offset, int64_t begin, int64_t end, Tensor cursor) {
  const int64_t num_nodes = cursor.numel() - 2;
  const Block block(indptr, indices, rows, dst_offset, src_offset, num_nodes, begin, end);
  check_apart(cursor, "cursor", {&indptr, &indices, &rows});
  // unsigned, so that counting on from any number is defined
  auto* count = reinterpret_cast<uint64_t*>(cursor_data(cursor, num_nodes)) + 2;
  const int64_t last = block.indptr[end];
  block.each(begin, end, [&](int64_t v, int64_t u, int64_t e) {
    if (e + kAhead < last) {
      prefetch_entry<1>(count, Block::moved(block.indices[e + kAhead], src_offset));
    }
    if (u == v) return;
    ++count[v];
    ++count[u];
  });
}

// Whether entries to be written are int64; else they are int32.
bool is_wide(const Tensor& entries, const char* name) {
  const ScalarType type = entries.scalar_type();
  check(entries.is_cpu() && entries.is_contiguous() &&
            (type == ScalarType::Long || type == ScalarType::Int),
        std::string(name) + " must be contiguous, int32 or int64, on the CPU");
  return type == ScalarType::Long;
}

template <typename T>
void place(const Block& block, int64_t begin, int64_t end, int64_t* next, T* out, uint64_t room) {
  const int64_t last = block.indptr[end];
  block.each(begin, end, [&](int64_t v, int64_t u, int64_t e) {
    if (e + 2 * kAhead < last) {
      prefetch_entry<1>(next, Block::moved(block.indices[e + 2 * kAhead], block.src_offset));
      const int64_t near = Block::moved(block.indices[e + kAhead], block.src_offset);
      if (near >= 0 && near < block.num_nodes) prefetch_entry<1>(out, next[near]);
    }
    if (u == v) return;
    if (static_cast<uint64_t>(next[v]) >= room || static_cast<uint64_t>(next[u]) >= room)
        [[unlikely]] {
      fail("cursor is not of these edges: it leads out of out");
    }
    out[next[v]++] = static_cast<T>(u);
    out[next[u]++] = static_cast<T>(v);
  });
}

// Places those entries; cursor[v + 1] is where the next of v goes.
void undirected_place(Tensor indptr, Tensor indices, Tensor rows, int64_t dst_offset,
                      int64_t src_offset, int64_t begin, int64_t end, Tensor cursor, Tensor out) {
  const int64_t num_nodes = cursor.numel() - 2;
  const auto room = static_cast<uint64_t>(out.numel());
  const Block block(indptr, indices, rows, dst_offset, src_offset, num_nodes, begin, end);
  int64_t* next = cursor_data(cursor, num_nodes) + 1;
  check_apart(cursor, "cursor", {&indptr, &indices, &rows, &out});
  check_apart(out, "out", {&indptr, &indices, &rows});
  is_wide(out, "out")
      ? place(block, begin, end, next, static_cast<int64_t*>(out.mutable_data_ptr()), room)
      : place(block, begin, end, next, static_cast<int32_t*>(out.mutable_data_ptr()), room);
}

// Sorts the neighbours of the nodes [begin, end) in place and removes copies; degree[v] are left.
template <typename T>
void sort_rows(const int64_t* indptr, T* entries, int64_t num_entries, int64_t begin, int64_t end,
               int64_t* degree, int64_t num_threads) {
  const auto bound = ranges(indptr, begin, end, num_threads);
  for_each_task(static_cast<int64_t>(bound.size()) - 1, [&](int64_t task) {
    for (int64_t v = bound[task]; v < bound[task + 1]; ++v) {
      check_entries(v, indptr[v], indptr[v + 1], num_entries);
      T *first = entries + indptr[v], *last = entries + indptr[v + 1];
      std::sort(first, last);
      degree[v] = std::unique(first, last) - first;
    }
  });
}

void undirected_sort(Tensor indptr, Tensor entries, int64_t begin, int64_t end, Tensor degree,
                     int64_t num_threads) {
  const int64_t size = num_pointed(indptr);
  const int64_t* pointer = int64_data(indptr, size + 1, "indptr");
  int64_data(degree, size, "degree");
  const bool wide = is_wide(entries, "entries");
  check_apart(entries, "entries", {&indptr, &degree});
  check_apart(degree, "degree", {&indptr});
  check_range(pointer, size, entries.numel(), begin, end);
  auto* left = static_cast<int64_t*>(degree.mutable_data_ptr());
  wide ? sort_rows(pointer, static_cast<int64_t*>(entries.mutable_data_ptr()), entries.numel(),
                   begin, end, left, num_threads)
       : sort_rows(pointer, static_cast<int32_t*>(entries.mutable_data_ptr()), entries.numel(),
                   begin, end, left, num_threads);
}

template <typename T>
void compact(const int64_t* from, const int64_t* to, int64_t size, T* entries) {
  for (int64_t v = 0; v < size; ++v) {  // entries never move right, so none is lost
    if (to[v] != from[v]) {
      std::copy(entries + from[v], entries + from[v] + (to[v + 1] - to[v]), entries + to[v]);
    }
  }
}

// Moves the first entries of each node from where `indptr` has them to where `kept` has them.
void undirected_compact(Tensor indptr, Tensor kept, Tensor entries) {
  const int64_t size = num_pointed(indptr);
  const int64_t* from = int64_data(indptr, size + 1, "indptr");
  const int64_t* to = int64_data(kept, size + 1, "kept");
  const bool wide = is_wide(entries, "entries");
  check_apart(entries, "entries", {&indptr, &kept});
  for (int64_t v = 0; v < size; ++v) {
    check_entries(v, from[v], from[v + 1], entries.numel());
    check(0 <= to[v] && to[v] <= from[v] && to[v] <= to[v + 1] &&
              to[v + 1] - to[v] <= from[v + 1] - from[v],
          "kept does not fit indptr");
  }
  wide ? compact(from, to, size, static_cast<int64_t*>(entries.mutable_data_ptr()))
       : compact(from, to, size, static_cast<int32_t*>(entries.mutable_data_ptr()));
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "adjacency_facts(Tensor indptr, Tensor indices, int begin, int end, int num_threads) -> "
      "(bool, bool, bool, int, int)");
  m.def(
      "undirected_count(Tensor indptr, Tensor indices, Tensor rows, int dst_offset, "
      "int src_offset, int begin, int end, Tensor(a!) cursor) -> ()");
  m.def(
      "undirected_place(Tensor indptr, Tensor indices, Tensor rows, int dst_offset, "
      "int src_offset, int begin, int end, Tensor(a!) cursor, Tensor(b!) out) -> ()");
  m.def(
      "undirected_sort(Tensor indptr, Tensor(a!) entries, int begin, int end, Tensor(b!) degree, "
      "int num_threads) -> ()");
  m.def("undirected_compact(Tensor indptr, Tensor kept, Tensor(a!) entries) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("adjacency_facts", TORCH_BOX(&pyg_scale::adjacency_facts));
  m.impl("undirected_count", TORCH_BOX(&pyg_scale::undirected_count));
  m.impl("undirected_place", TORCH_BOX(&pyg_scale::undirected_place));
  m.impl("undirected_sort", TORCH_BOX(&pyg_scale::undirected_sort));
  m.impl("undirected_compact", TORCH_BOX(&pyg_scale::undirected_compact));
}
