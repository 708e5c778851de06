// Streaming partitioning: nodes placed one after the other, see pyg_scale/ops/stream_partition.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "graph_view.h"
#include "prefetch.h"

namespace pyg_scale {
namespace {

constexpr int64_t kAhead = 32;         // entries whose part is asked for
constexpr int64_t kRowsAhead = 6;      // nodes whose entries are asked for
constexpr int64_t kRowEntries = 256;   // of one node
constexpr int kFraction = 20;          // bits behind the point of scores and shares
constexpr int64_t kNarrowParts = 127;  // that int8 can name
constexpr int64_t kNever = INT64_MIN;

// A contiguous table of `rows` by `columns`.
template <typename T>
T* table(Tensor& tensor, int64_t rows, int64_t columns, ScalarType type, const char* name) {
  check(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type &&
            tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns,
        std::string(name) + " must be a contiguous table of the right type and shape");
  return static_cast<T*>(tensor.mutable_data_ptr());
}

constexpr int64_t kMost = int64_t{1} << 60;  // of weights, loads and capacities

[[noreturn, gnu::noinline, gnu::cold]] void fail_heavy(int64_t node) {
  fail("the weight of node " + std::to_string(node) +
       " times the coefficient exceeds 63 bits: make weights smaller");
}

[[noreturn, gnu::noinline, gnu::cold]] void fail_penalty(double coefficient, int64_t load) {
  fail("coefficient and load: " + std::to_string(coefficient) + " times the root of " +
       std::to_string(load) + " is no number below 2**62");
}

template <typename Wide>
Wide floor_div(Wide a, int64_t b) {  // b > 0; as Python's //
  const Wide q = a / b;
  return q - (a % b < 0);
}

// The share of `left` in a capacity. Where 64 bits do not hold it, it is as large as they hold.
int64_t share_of(int64_t left, int64_t capacity) {
  constexpr int64_t kFits = int64_t{1} << (63 - kFraction);
  if (-kFits <= left && left < kFits) [[likely]] {
    return floor_div(left * (int64_t{1} << kFraction), capacity);
  }
  const __int128 share = floor_div(static_cast<__int128>(left) * (1 << kFraction), capacity);
  return static_cast<int64_t>(std::clamp<__int128>(share, kNever + 1, INT64_MAX));
}

// The data by which nodes are placed, for any type of neighbours and parts.
struct Loads {
  const int64_t* weights;
  int64_t weight_row, weight_column;  // strides
  int64_t num_parts, columns;
  int64_t *load, *capacity;
  double* coefficient;
  bool ldg;
  std::vector<int64_t> penalty;
  std::vector<int64_t> count;   // neighbours of the node: those without a part, then by part
  std::vector<int64_t> active;  // columns in which the node weighs something

  int64_t neighbors(int64_t p) const { return count[p + 1]; }

  void set_active(int64_t v) {
    active.clear();
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t w = weight(v, c);
      if (w >= kMost) [[unlikely]]
        fail("weights must be less than 2**60");
      if (w > 0) active.push_back(c);
    }
  }

  int64_t weight(int64_t v, int64_t c) const { return weights[v * weight_row + c * weight_column]; }

  void set_penalty(int64_t p, int64_t c) {
    const int64_t i = p * columns + c;
    // one product, then cut off: a compiler has nothing to contract
    const double found = coefficient[i] * std::sqrt(static_cast<double>(load[i]));
    if (!(found > -0x1p62 && found < 0x1p62)) [[unlikely]]
      fail_penalty(coefficient[i], load[i]);
    penalty[i] = static_cast<int64_t>(found);
  }

  void add(int64_t v, int64_t p, int64_t sign) {
    for (const int64_t c : active) {
      int64_t& there = load[p * columns + c];
      there += sign * weight(v, c);
      if (there < 0 || there >= kMost) [[unlikely]] {
        fail("load does not fit part and weights, or is 2**60 or more");
      }
      if (!ldg) set_penalty(p, c);
    }
  }

  // The share of a part's capacity that is left once it has the node; negative if it is too full.
  int64_t room(int64_t v, int64_t p) const {
    int64_t least = int64_t{1} << kFraction;
    for (const int64_t c : active) {
      const int64_t i = p * columns + c;
      const int64_t left = capacity[i] - load[i] - weight(v, c);
      const int64_t share = share_of(left, capacity[i] > 0 ? capacity[i] : 1);
      if (share < least) least = share;
    }
    return least;
  }

  bool fits(int64_t v, int64_t p) const {
    for (const int64_t c : active) {
      const int64_t i = p * columns + c;
      if (capacity[i] - load[i] < weight(v, c)) return false;
    }
    return true;
  }

  int64_t score(int64_t v, int64_t p, int64_t room) const {
    if (ldg) return neighbors(p) ? neighbors(p) * (room + 1) : 0;
    int64_t found = neighbors(p) << kFraction, price = 0;
    bool wraps = false;
    for (const int64_t c : active) {
      wraps |= __builtin_mul_overflow(weight(v, c), penalty[p * columns + c], &price);
      wraps |= __builtin_sub_overflow(found, price, &found);
    }
    if (wraps) [[unlikely]]
      fail_heavy(v);
    return found;
  }

  // The best part for a node whose neighbours have been counted. It was in part `before`; -1: none.
  int64_t best_part(int64_t v, int64_t before) const {
    // the first of equals wins: begin with its own part, or with one that differs by node
    const int64_t start = before >= 0 ? before : v % num_parts;
    int64_t best = -1, best_score = kNever, best_room = kNever;
    for (int64_t i = 0, p = start; i < num_parts; ++i, p = p + 1 < num_parts ? p + 1 : 0) {
      if (!fits(v, p)) continue;
      // room costs a division, so it is only looked at where it decides
      if (ldg && best_score > 0 && neighbors(p) == 0) continue;
      int64_t left = ldg && neighbors(p) ? room(v, p) : kNever;
      const int64_t found = score(v, p, left);
      if (found < best_score || (found == best_score && best == before)) continue;
      if (found == best_score) {
        if (best_room == kNever) best_room = room(v, best);
        if (left == kNever) left = room(v, p);
        if (left <= best_room) continue;
      }
      best = p, best_score = found, best_room = left;
    }
    if (best < 0) {  // no part has room: the one that lacks the least
      for (int64_t i = 0, p = start; i < num_parts; ++i, p = p + 1 < num_parts ? p + 1 : 0) {
        const int64_t left = room(v, p);
        if (best < 0 || left > best_room) best = p, best_room = left;
      }
    }
    return best;
  }
};

template <typename Index, typename Part>
struct Stream {
  Loads& loads;
  const int64_t* indptr;
  const Index* indices;
  int64_t stride, size, entries;
  Part* part;
  static constexpr int64_t kLineEntries = 64 / sizeof(Index);

  PYG_SCALE_PREFETCH void ask_for_row(int64_t v) const {
    if (v < 0 || v >= size) return;
    const int64_t first = std::clamp<int64_t>(indptr[v], 0, entries);
    const int64_t last = std::min({indptr[v + 1], first + kRowEntries, entries});
    for (int64_t e = first; e < last; e += kLineEntries) {
      __builtin_prefetch(indices + e * stride);
    }
  }

  // Checks the neighbours of a node that comes soon, and prefetches their parts.
  void coming(int64_t v) const {
    if (v < 0 || v >= size) fail("order: there is no node " + std::to_string(v));
    check_entries(v, indptr[v], indptr[v + 1], entries);
    for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
      const auto u = static_cast<int64_t>(indices[e * stride]);
      if (static_cast<uint64_t>(u) >= static_cast<uint64_t>(size)) [[unlikely]] {
        fail("there is no node " + std::to_string(u));
      }
      __builtin_prefetch(part + u);
    }
  }

  // Places a node. Returns whether its part changed.
  bool place(int64_t v) {
    loads.set_active(v);
    const int64_t before = part[v];
    if (before >= 0) loads.add(v, before, -1);
    const int64_t first = indptr[v], last = indptr[v + 1];
    int64_t* count = loads.count.data();
    for (int64_t e = first; e < last; ++e) ++count[part[indices[e * stride]] + 1];
    const int64_t best = loads.best_part(v, before);
    if (last - first < loads.num_parts) {
      for (int64_t e = first; e < last; ++e) count[part[indices[e * stride]] + 1] = 0;
    } else {
      std::fill_n(count, loads.num_parts + 1, 0);
    }
    part[v] = static_cast<Part>(best);
    loads.add(v, best, 1);
    return best != before;
  }

  template <typename Node>
  int64_t run(int64_t begin, int64_t end, bool ordered, const Node& node) {
    int64_t moved = 0, asked = begin, seen = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (ordered) {  // else rows follow one another
        if (asked + 2 * kRowsAhead < end) {
          prefetch_ends(indptr, node(asked + 2 * kRowsAhead));
        }
        if (asked + kRowsAhead < end) ask_for_row(node(asked + kRowsAhead));
      }
      while (asked < end && (asked <= i || seen < kAhead)) {
        const int64_t v = node(asked++);
        coming(v);
        seen += indptr[v + 1] - indptr[v];
      }
      const int64_t v = node(i);
      seen -= indptr[v + 1] - indptr[v];
      moved += place(v);
    }
    return moved;
  }
};

// Places the nodes order[begin] to order[end - 1] (the nodes themselves if `order` is empty).
int64_t stream_partition(Tensor indptr, Tensor indices, Tensor weights, Tensor order, Tensor part,
                         Tensor load, Tensor capacity, Tensor coefficient, bool ldg, int64_t begin,
                         int64_t end) {
  const int64_t size = num_pointed(indptr);
  const int64_t* pointers = int64_data(indptr, size + 1, "indptr");
  const IntColumn neighbors = int_column(indices, "indices");
  check(pointers[0] >= 0 && pointers[size] <= indices.numel(), "indptr does not fit indices");
  check(weights.is_cpu() && weights.dim() == 2 && weights.size(0) == size &&
            weights.scalar_type() == ScalarType::Long,
        "weights must be an int64 table with a row for each node");
  Loads loads;
  loads.weights = static_cast<const int64_t*>(weights.const_data_ptr());
  loads.weight_row = weights.stride(0);
  loads.weight_column = weights.stride(1);
  loads.columns = weights.size(1);
  loads.num_parts = load.dim() == 2 ? load.size(0) : 0;
  check(loads.num_parts >= 1, "load must have a row for each part");
  const int64_t parts = loads.num_parts, columns = loads.columns;
  loads.load = table<int64_t>(load, parts, columns, ScalarType::Long, "load");
  loads.capacity = table<int64_t>(capacity, parts, columns, ScalarType::Long, "capacity");
  loads.coefficient = table<double>(coefficient, parts, columns, ScalarType::Double, "coefficient");
  loads.ldg = ldg;
  for (int64_t i = 0; i < parts * columns; ++i) {
    check(0 <= loads.load[i] && loads.load[i] < kMost, "load must be from 0 to 2**60 - 1");
    check(-kMost < loads.capacity[i] && loads.capacity[i] < kMost,
          "capacity must be less than 2**60");
  }
  check_apart(load, "load", {&indptr, &indices, &weights, &order, &part, &capacity, &coefficient});
  check_apart(part, "part", {&indptr, &indices, &weights, &order, &capacity, &coefficient});
  loads.penalty.resize(static_cast<size_t>(parts * columns));
  loads.count.assign(static_cast<size_t>(parts + 1), 0);
  for (int64_t p = 0; p < parts; ++p) {
    for (int64_t c = 0; c < columns && !ldg; ++c) loads.set_penalty(p, c);
  }
  const bool narrow = part.scalar_type() == ScalarType::Char;
  check(part.is_cpu() && part.dim() == 1 && part.is_contiguous() && part.numel() == size &&
            (narrow || part.scalar_type() == ScalarType::Int),
        "part must be a contiguous int8 or int32 tensor with an entry for each node");
  check(!narrow || parts <= kNarrowParts, "there are too many parts for int8");
  const bool ordered = order.numel() > 0;
  const IntColumn nodes = int_column(order, "order");
  check(!ordered || order.numel() == size, "order must name every node");
  check(0 <= begin && begin <= end && end <= size, "there are no such nodes");
  const auto run = [&](const auto* index, auto* of) {
    bool known = true;  // of all nodes at once, as this is done for every chunk
    for (int64_t v = 0; v < size; ++v) known &= of[v] >= -1 && of[v] < parts;
    check(known, "part: there is no such part");
    using Index = std::remove_cv_t<std::remove_pointer_t<decltype(index)>>;
    using Part = std::remove_pointer_t<decltype(of)>;
    Stream<Index, Part> stream{loads, pointers, index, neighbors.stride, size, indices.numel(), of};
    return stream.run(begin, end, ordered, [&](int64_t i) { return ordered ? nodes[i] : i; });
  };
  const auto with_parts = [&](const auto* index) {
    void* of = part.mutable_data_ptr();
    return narrow ? run(index, static_cast<int8_t*>(of)) : run(index, static_cast<int32_t*>(of));
  };
  return neighbors.wide ? with_parts(static_cast<const int64_t*>(neighbors.data))
                        : with_parts(static_cast<const int32_t*>(neighbors.data));
}

// The nodes breadth first: component after component, each from its smallest node.
Tensor breadth_first(Tensor indptr, Tensor indices) {
  const int64_t size = num_pointed(indptr);
  const int64_t* pointer = int64_data(indptr, size + 1, "indptr");
  const IntColumn neighbor = int_column(indices, "indices");
  check(pointer[size] <= indices.numel(), "indptr does not fit indices");
  Tensor out = torch::stable::empty({size}, ScalarType::Long);
  int64_t* queue = out.mutable_data_ptr<int64_t>();
  std::vector<bool> seen(static_cast<size_t>(size));
  int64_t head = 0, tail = 0;
  for (int64_t start = 0; start < size; ++start) {
    if (seen[static_cast<size_t>(start)]) continue;
    seen[static_cast<size_t>(start)] = true;
    queue[tail++] = start;
    for (; head < tail; ++head) {
      const int64_t before = tail, v = queue[head];
      check_entries(v, pointer[v], pointer[v + 1], indices.numel());
      for (int64_t e = pointer[v]; e < pointer[v + 1]; ++e) {
        const int64_t u = neighbor[e];
        if (u < 0 || u >= size) fail("there is no node " + std::to_string(u));
        if (seen[static_cast<size_t>(u)]) continue;
        seen[static_cast<size_t>(u)] = true;
        queue[tail++] = u;
      }
      std::sort(queue + before, queue + tail);  // whatever the order of neighbours
    }
  }
  return out;
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "stream_partition(Tensor indptr, Tensor indices, Tensor weights, Tensor order, "
      "Tensor(a!) part, Tensor(b!) load, Tensor capacity, Tensor coefficient, bool ldg, int begin, "
      "int end) -> int");
  m.def("breadth_first(Tensor indptr, Tensor indices) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("stream_partition", TORCH_BOX(&pyg_scale::stream_partition));
  m.impl("breadth_first", TORCH_BOX(&pyg_scale::breadth_first));
}
