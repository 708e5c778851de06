// split_rows: who has each of some rows, and what everyone is asked for (the meaning is in
// pyg_scale/ops/split_rows.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cstdint>
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

// Of 32 bits where all ids and positions have no more.
template <typename Id>
struct Entry {
  Id id, at;
};

template <typename Id>
bool same_id(const Entry<Id>& a, const Entry<Id>& b) {
  return a.id == b.id;
}

// Sorts ids by how many different ones are smaller, which a bit for every id tells.
class Ranks {
 public:
  // Whether there are not too many bits beside `n` ids.
  static bool suit(int64_t n, int64_t largest) { return largest / 64 < 2 * n && n < kMost; }

  // Sets the bits of `n` ids; whether no two are equal.
  template <typename Id>
  bool mark(const Entry<Id>* from, int64_t n, int64_t largest) {
    words_ = largest / 64 + 1;
    word_.reserve(words_);
    std::fill_n(word_.data(), words_, uint64_t{0});
    uint64_t twice = 0;
    for (int64_t i = 0; i < n; ++i) {
      uint64_t& word = word_[static_cast<int64_t>(from[i].id / 64)];
      const uint64_t bit = uint64_t{1} << (from[i].id % 64);
      twice |= word & bit;
      word |= bit;
    }
    return twice == 0;
  }

  // Writes what is in `from`, whose bits are set, to `to` in the order of ids, keeping that of
  // equal ones.
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
  Buffer<Entry<Id>> entry, other, order;
  Ranks ranks;

  void reserve(int64_t n) {
    group.reserve(n);
    id.reserve(n);
    entry.reserve(n);
    other.reserve(n);
    order.reserve(n);
  }

  // A call of unusual size must not hold its memory for ever.
  void trim() {
    const size_t lists = group.bytes() + id.bytes() + entry.bytes() + other.bytes() + order.bytes();
    if (lists + ranks.bytes() <= size_t{1} << 26) return;
    group.release();
    id.release();
    entry.release();
    other.release();
    order.release();
    ranks.release();
  }
};

// Sorts by id, keeping the order of equal ones; the result is where it returns.
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
  int64_t count = 0, largest = 0, last = -1;
  bool ascending = true;
};

template <typename Id>
std::vector<Tensor> split(const Places& book, int64_t num_rows, const Tensor& index,
                          const int64_t* group_of, const bool* once, int64_t num_groups,
                          bool original) {
  const int64_t n = index.numel();
  const IntColumn row = int_column(index, "index");
  thread_local Scratch<Id> scratch;
  scratch.reserve(n);
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
      of[i] = static_cast<int32_t>(group_of[p]);
      id[i] = static_cast<Id>(own);
      ++group.count;
      group.ascending &= own > group.last;
      group.last = own;
      group.largest = std::max(group.largest, own);
    }
  }

  Tensor counts = pool_empty({num_groups}, ScalarType::Long);
  Tensor different = pool_empty({num_groups}, ScalarType::Long);
  Tensor ids = pool_empty({n}, ScalarType::Long);
  Tensor position = pool_empty({n}, ScalarType::Long);
  int64_t* counts_out = counts.mutable_data_ptr<int64_t>();
  int64_t* different_out = different.mutable_data_ptr<int64_t>();
  int64_t* ids_out = ids.mutable_data_ptr<int64_t>();
  int64_t* position_out = position.mutable_data_ptr<int64_t>();
  std::vector<int64_t> next(groups.size());
  for (size_t g = 1; g < groups.size(); ++g) next[g] = next[g - 1] + groups[g - 1].count;
  Entry<Id>* entries = scratch.entry.data();
  for (int64_t i = 0; i < n; ++i) {
    entries[next[static_cast<size_t>(of[i])]++] = {id[i], static_cast<Id>(i)};
  }
  int64_t written = 0, begin = 0;
  bool all_once = true;
  std::vector<const Entry<Id>*> mine(groups.size());
  for (size_t g = 0; g < groups.size(); begin += groups[g++].count) {
    const Group& group = groups[g];
    const int64_t before = written;
    bool dedupe = once[g] && !group.ascending;
    Entry<Id>* list = entries + begin;
    if (dedupe) {
      Entry<Id>* free = scratch.other.data() + begin;
      if (!Ranks::suit(group.count, group.largest)) {
        std::copy_n(list, group.count, scratch.order.data() + begin);
        list = sorted(list, free, group.count, group.largest);
        dedupe = std::adjacent_find(list, list + group.count, same_id<Id>) != list + group.count;
        if (!dedupe) list = scratch.order.data() + begin;
      } else if (scratch.ranks.mark(list, group.count, group.largest)) {
        dedupe = false;
      } else {
        scratch.ranks.sort(list, free, group.count);
        list = free;
      }
    }
    for (int64_t i = 0; i < group.count; ++i) {
      if (!dedupe || i == 0 || list[i].id != list[i - 1].id) {
        ids_out[written++] = static_cast<int64_t>(list[i].id);
      }
      position_out[begin + i] = static_cast<int64_t>(list[i].at);
    }
    mine[g] = list;
    counts_out[g] = group.count;
    different_out[g] = written - before;
    all_once &= written - before == group.count;
  }
  Tensor take = pool_empty({all_once ? 0 : n}, ScalarType::Long);
  int64_t* take_out = take.mutable_data_ptr<int64_t>();
  for (size_t g = 0; !all_once && g < groups.size(); ++g) {
    const bool dedupe = different_out[g] != groups[g].count;
    for (int64_t i = 0, at = -1; i < groups[g].count; ++i) {
      at += !dedupe || i == 0 || mine[g][i].id != mine[g][i - 1].id;
      *take_out++ = at;
    }
  }
  scratch.trim();
  return {counts, different, torch::stable::narrow(ids, 0, 0, written), position, take};
}

std::vector<Tensor> split_rows(Tensor part, Tensor local, Tensor offsets, Tensor index,
                               Tensor group, Tensor distinct, bool original) {
  const int64_t num_groups = distinct.numel();
  Places book;
  book.num_parts = offsets.numel() - 1;
  check(book.num_parts > 0, "there must be a part");
  book.offsets = int64_data(offsets, offsets.numel(), "offsets");
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
  check(distinct.is_cpu() && distinct.scalar_type() == ScalarType::Bool &&
            distinct.is_contiguous(),
        "distinct must be bool");
  const bool* once = distinct.const_data_ptr<bool>();
  for (int64_t p = 0; p < book.num_parts; ++p) {
    check(group_of[p] >= 0 && group_of[p] < num_groups, "a group is out of range");
  }
  const bool narrow = std::max(num_rows, index.numel()) <= std::numeric_limits<uint32_t>::max();
  return narrow ? split<uint32_t>(book, num_rows, index, group_of, once, num_groups, original)
                : split<int64_t>(book, num_rows, index, group_of, once, num_groups, original);
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) {
  m.def(
      "split_rows(Tensor part, Tensor local, Tensor offsets, Tensor index, Tensor group, "
      "Tensor distinct, bool original) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("split_rows", TORCH_BOX(&pyg_scale::split_rows));
}
