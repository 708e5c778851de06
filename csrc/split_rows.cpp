// split_rows: who has each of some rows, and what everyone is asked for (the meaning is in
// pyg_scale/ops/split_rows.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "graph_view.h"
#include "parts.h"
#include "pool.h"

namespace pyg_scale {
namespace {

constexpr int64_t kBlock = 256;  // rows whose places are looked up together
constexpr int kDigit = 11;       // bits that a pass of the sort looks at

// An id and its position, of 32 bits each if all of them fit.
template <typename Id>
struct Entry {
  Id id, at;
};

template <typename Id>
bool same_id(const Entry<Id>& a, const Entry<Id>& b) {
  return a.id == b.id;
}

// Sorts ids by the number of different smaller ids, counted in a bitmap of all ids.
class Ranks {
 public:
  // Whether the bitmap is small enough for `n` ids.
  static bool suit(int64_t n, int64_t largest) { return largest / 64 < 2 * n && n < kMost; }

  // Sets the bits of `n` ids. Returns whether no two are equal.
  template <typename Out>
  bool mark(const Out* ids, int64_t n, int64_t largest) {
    words_ = largest / 64 + 1;
    word_.reserve(words_);
    uint64_t* words = word_.data();
    std::fill_n(words, words_, uint64_t{0});
    uint64_t twice = 0;
    for (int64_t i = 0; i < n; ++i) {
      const auto id = static_cast<uint64_t>(ids[i]);
      const uint64_t bit = uint64_t{1} << (id % 64);
      twice |= words[id / 64] & bit;
      words[id / 64] |= bit;
    }
    return twice == 0;
  }

  // Sorts `from`, whose bits are set, into `to` by id. Equal ids keep their order.
  template <typename Id>
  void sort(const Entry<Id>* from, Entry<Id>* to, int64_t n) {
    before_.reserve(words_);
    uint32_t sum = 0;
    for (int64_t w = 0; w < words_; ++w) {
      before_[w] = sum;
      sum += static_cast<uint32_t>(std::popcount(word_[w]));
    }
    next_.reserve(int64_t{sum} + 1);
    std::fill_n(next_.data(), int64_t{sum} + 1, uint32_t{0});
    for (int64_t i = 0; i < n; ++i) ++next_[rank(from[i].id) + 1];
    for (int64_t r = 1; r < sum; ++r) next_[r] += next_[r - 1];
    for (int64_t i = 0; i < n; ++i) to[next_[rank(from[i].id)]++] = from[i];
  }

  size_t bytes() const { return word_.bytes() + before_.bytes() + next_.bytes(); }

  void release() {
    word_.release();
    before_.release();
    next_.release();
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 31;

  template <typename Id>
  int64_t rank(Id id) const {
    const auto w = static_cast<int64_t>(id / 64);
    return before_[w] + std::popcount(word_[w] & ((uint64_t{1} << (id % 64)) - 1));
  }

  int64_t words_ = 0;
  Buffer<uint64_t> word_;
  Buffer<uint32_t> before_, next_;
};

// What a thread keeps between calls.
template <typename Id>
struct Scratch {
  Buffer<int32_t> group;
  Buffer<Id> id;
  Buffer<Entry<Id>> entry, other;  // of a group with repeated rows
  Ranks ranks;

  // A call of unusual size must not hold its memory for ever.
  void trim() {
    if (group.bytes() + id.bytes() + entry.bytes() + other.bytes() + ranks.bytes() <= size_t{1}
                                                                                          << 26) {
      return;
    }
    group.release();
    id.release();
    entry.release();
    other.release();
    ranks.release();
  }
};

// Sorts by id; equal ids keep their order. Returns the place of the result, `from` or `to`.
template <typename Id>
Entry<Id>* sorted(Entry<Id>* from, Entry<Id>* to, int64_t n, int64_t largest) {
  for (int shift = 0; shift < 63 && (largest >> shift) > 0; shift += kDigit) {
    int64_t start[(1 << kDigit) + 1] = {};
    const auto digit = [&](Id id) {
      return (static_cast<int64_t>(id) >> shift) & ((1 << kDigit) - 1);
    };
    for (int64_t i = 0; i < n; ++i) ++start[digit(from[i].id) + 1];
    for (int d = 0; d < 1 << kDigit; ++d) start[d + 1] += start[d];
    for (int64_t i = 0; i < n; ++i) to[start[digit(from[i].id)]++] = from[i];
    std::swap(from, to);
  }
  return from;
}

// The rows of each group.
struct Group {
  int64_t count = 0, largest = 0, last = -1, different = 0;
  bool ascending = true;
};

// A group's rows in the order of ids, and equal ones in the order of positions; null if no two are
// equal.
template <typename Id, typename Out>
const Entry<Id>* repeats(const Out* id, const int64_t* position, const Group& group,
                         Scratch<Id>& scratch) {
  const int64_t n = group.count;
  const bool by_rank = Ranks::suit(n, group.largest);
  if (by_rank && scratch.ranks.mark(id, n, group.largest)) return nullptr;
  scratch.entry.reserve(n);
  scratch.other.reserve(n);
  Entry<Id>*list = scratch.entry.data(), *free = scratch.other.data();
  for (int64_t i = 0; i < n; ++i) list[i] = {static_cast<Id>(id[i]), static_cast<Id>(position[i])};
  if (by_rank) {
    scratch.ranks.sort(list, free, n);
    return free;
  }
  list = sorted(list, free, n, group.largest);
  return std::adjacent_find(list, list + n, same_id<Id>) == list + n ? nullptr : list;
}

template <typename Id, typename Out>
std::vector<Tensor> split(const Places& book, int64_t num_rows, const Tensor& index,
                          const int64_t* group_of, const bool* once, int64_t num_groups,
                          bool original) {
  const int64_t n = index.numel();
  const IntColumn row = int_column(index, "index");
  auto& scratch = kept_by_thread<Scratch<Id>, struct Split>();
  scratch.group.reserve(n);
  scratch.id.reserve(n);
  int32_t* of = scratch.group.data();
  Id* id = scratch.id.data();
  std::vector<Group> groups(static_cast<size_t>(num_groups));
  for (int64_t from = 0; from < n; from += kBlock) {
    const int64_t end = std::min(n, from + kBlock);
    for (int64_t i = from; i < end; ++i) {
      const int64_t v = row[i];
      if (v >= 0 && v < num_rows) book.prefetch(v);
    }
    for (int64_t i = from; i < end; ++i) {
      const int64_t v = row[i];
      if (v < 0 || v >= num_rows) [[unlikely]] {
        throw std::out_of_range("row " + std::to_string(v) + " does not exist, there are only " +
                                std::to_string(num_rows) + " rows");
      }
      const int64_t p = book.part(v);
      if (p < 0 || p >= book.num_parts) [[unlikely]] {
        fail("the partition book has part " + std::to_string(p));
      }
      Group& group = groups[static_cast<size_t>(group_of[p])];
      const int64_t own = original ? v : book.at(v, p);
      if (own < 0) [[unlikely]] {
        fail("the partition book has row " + std::to_string(v) + " at place " +
             std::to_string(own) + " of part " + std::to_string(p));
      }
      of[i] = static_cast<int32_t>(group_of[p]);
      id[i] = static_cast<Id>(own);
      ++group.count;
      group.ascending &= own > group.last;
      group.last = own;
      group.largest = std::max(group.largest, own);
    }
  }

  for (const Group& group : groups) {
    check(group.largest <= std::numeric_limits<Out>::max(), "a place does not fit into int32");
    check(static_cast<uint64_t>(group.largest) <= std::numeric_limits<Id>::max(),
          "local: a place must be below 2**32 where there are fewer rows");
  }
  constexpr ScalarType type = sizeof(Out) == 4 ? ScalarType::Int : ScalarType::Long;
  Tensor counts = pool_empty({num_groups}, ScalarType::Long);
  Tensor different = pool_empty({num_groups}, ScalarType::Long);
  Tensor ids = pool_empty({n}, type);
  Tensor position = pool_empty({n}, ScalarType::Long);
  int64_t* counts_out = counts.mutable_data_ptr<int64_t>();
  int64_t* different_out = different.mutable_data_ptr<int64_t>();
  Out* ids_out = ids.mutable_data_ptr<Out>();
  int64_t* position_out = position.mutable_data_ptr<int64_t>();
  std::vector<int64_t> next(groups.size());
  for (size_t g = 1; g < groups.size(); ++g) next[g] = next[g - 1] + groups[g - 1].count;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = next[static_cast<size_t>(of[i])]++;
    ids_out[at] = static_cast<Out>(id[i]);
    position_out[at] = i;
  }
  Tensor take = pool_empty({0}, ScalarType::Long);
  int64_t written = 0, begin = 0;
  for (size_t g = 0; g < groups.size(); begin += groups[g++].count) {
    Group& group = groups[g];
    const Entry<Id>* list = nullptr;
    if (once[g] && !group.ascending) {
      list = repeats(ids_out + begin, position_out + begin, group, scratch);
    }
    Out* to = ids_out + written;
    if (!list) {
      if (written < begin) std::memmove(to, ids_out + begin, sizeof(Out) * group.count);
      group.different = group.count;
    } else {
      if (!take.numel()) take = pool_empty({n}, ScalarType::Long);
      int64_t* take_out = take.mutable_data_ptr<int64_t>();
      for (int64_t i = 0; i < group.count; ++i) {
        if (i == 0 || list[i].id != list[i - 1].id) {
          to[group.different++] = static_cast<Out>(list[i].id);
        }
        position_out[begin + i] = static_cast<int64_t>(list[i].at);
        take_out[begin + i] = group.different - 1;
      }
    }
    written += group.different;
    counts_out[g] = group.count;
    different_out[g] = group.different;
  }
  scratch.trim();
  return {counts, different, torch::stable::narrow(ids, 0, 0, written), position, take};
}

std::vector<Tensor> split_rows(Tensor part, Tensor local, Tensor offsets, Tensor index,
                               Tensor group, Tensor distinct, bool original, bool narrow) {
  const int64_t num_groups = distinct.numel();
  Places book;
  book.set_offsets(offsets);
  int64_t num_rows = book.offsets[book.num_parts];
  if (part.numel()) {
    num_rows = part.numel();
    const ScalarType type = part.scalar_type();
    check(part.is_cpu() && part.dim() == 1 && part.is_contiguous() &&
              (type == ScalarType::Byte || type == ScalarType::Int),
          "part must be uint8 or int32, contiguous");
    if (type == ScalarType::Byte) {
      book.narrow = part.const_data_ptr<uint8_t>();
    } else {
      book.wide = part.const_data_ptr<int32_t>();
    }
    if (!original) {
      check(local.numel() == num_rows, "local must have an entry for each row");
      book.local = int_column(local, "local");
    }
  }
  const int64_t* group_of = int64_data(group, book.num_parts, "group");
  check(distinct.is_cpu() && distinct.scalar_type() == ScalarType::Bool && distinct.is_contiguous(),
        "distinct must be bool");
  const bool* once = distinct.const_data_ptr<bool>();
  for (int64_t p = 0; p < book.num_parts; ++p) {
    check(group_of[p] >= 0 && group_of[p] < num_groups, "a group is out of range");
  }
  const auto run = [&]<typename Id>(Id) {
    return narrow ? split<Id, int32_t>(book, num_rows, index, group_of, once, num_groups, original)
                  : split<Id, int64_t>(book, num_rows, index, group_of, once, num_groups, original);
  };
  const int64_t most = std::max(num_rows, index.numel());
  return most <= std::numeric_limits<uint32_t>::max() ? run(uint32_t{}) : run(int64_t{});
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "split_rows(Tensor part, Tensor local, Tensor offsets, Tensor index, Tensor group, "
      "Tensor distinct, bool original, bool narrow) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("split_rows", TORCH_BOX(&pyg_scale::split_rows));
}
