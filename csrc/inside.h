// The edges of some nodes whose other ends are among these nodes, too.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "buffer.h"
#include "eights.h"
#include "graph_view.h"
#include "prefetch.h"
#include "row_writer.h"
#include "vectors.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace pyg_scale {

// Writes how many bits are set before each of `n` words, and in all of them to `*count`. A loop
// that counts bits is dispatched, as portable code calls a function for every word.
struct CountBefore {
  template <typename Word, typename Count>
  PYG_SCALE_INLINE void operator()(const Word* bits, int64_t n, Count* before,
                                   int64_t* count) const {
    int64_t sum = 0;
    for (int64_t w = 0; w < n; ++w) {
      before[w] = static_cast<Count>(sum);
      sum += std::popcount(bits[w]);
    }
    *count = sum;
  }
};

// A set of nodes, a bit each: for a graph of any size small, and so in a cache near by. Its members
// have places, ascending.
class Chosen {
 public:
  explicit Chosen(int64_t num_nodes) : num_nodes_(num_nodes), size_(num_nodes / 32 + 1) {
    bits_.reserve(size_);
    first_.reserve(size_);
    std::fill_n(bits_.data(), size_, uint32_t{0});
  }

  void add(int64_t v) { bits_[v >> 5] |= uint32_t{1} << (v & 31); }

  // Gives the members their places. Returns how many there are.
  int64_t number() {
    int64_t count = 0;
    dispatch(CountBefore{}, bits_.data(), size_, first_.data(), &count);
    check(count < int64_t{1} << 32, "a batch has 2**32 nodes or more");
    return count;
  }

  void write(int64_t* node) const {
    for (int64_t w = 0; w < size_; ++w) {
      for (uint32_t left = bits_[w]; left; left &= left - 1) {
        *node++ = w * 32 + std::countr_zero(left);
      }
    }
  }

  int64_t num_nodes() const { return num_nodes_; }
  // Bit v % 32 of word v / 32 is that of node v.
  const uint32_t* bits() const { return bits_.data(); }

  PYG_SCALE_INLINE bool has(int64_t v) const { return bits_[v >> 5] >> (v & 31) & 1; }

  // Of a member.
  PYG_SCALE_INLINE int64_t place(int64_t v) const {
    const uint32_t before = bits_[v >> 5] & ((uint32_t{1} << (v & 31)) - 1);
    return int64_t{first_[v >> 5]} + std::popcount(before);
  }

 private:
  int64_t num_nodes_, size_;
  Buffer<uint32_t> bits_;
  Buffer<uint32_t> first_;  // the place of the first member of each word
};

// The edges of a graph, grouped by one end.
struct EdgeTable {
  int64_t num_nodes, num_edges;
  const int64_t* pointer;
  IntColumn target;
  IntColumn id;  // of the type and stride of `target`; absent if nobody wants it
};

// Which edges lead to chosen nodes ###########################################################

constexpr int64_t kBits = 64;         // edges of a word of answers
constexpr int64_t kRoomForEnds = 16;  // ends that may be written beyond those that were found
constexpr int64_t kRoomForWords = 2;  // words that may be written beyond those that are full

template <typename T>
[[noreturn, gnu::noinline, gnu::cold]] void fail_end(const T* target, int64_t stride, int64_t n,
                                                     int64_t num_nodes) {
  for (int64_t i = 0; i < n; ++i) {
    const auto u = static_cast<int64_t>(target[i * stride]);
    if (u < 0 || u >= num_nodes) fail_missing("index: node", u, num_nodes);
  }
  fail("index: the ends of edges changed while they were read");
}

// Writes the ends of `n` edges that are chosen nodes, in order, a bit for each edge to `inside`,
// and how many there are to `*count`. Both have room for some more.
template <typename T, int kStride>
struct EndsInside {
  PYG_SCALE_INLINE void operator()(const T* target, int64_t n, const Chosen* chosen, T* out,
                                   uint64_t* inside, int64_t* count) const {
    const auto num_nodes = static_cast<uint64_t>(chosen->num_nodes());
    int64_t found = 0;
    for (int64_t begin = 0; begin < n; begin += kBits) {
      const int64_t size = std::min(kBits, n - begin);
      uint64_t word = 0;
      for (int64_t i = 0; i < size; ++i) {
        const T u = target[(begin + i) * kStride];
        if (static_cast<uint64_t>(static_cast<int64_t>(u)) >= num_nodes) [[unlikely]]
          fail_end(target, kStride, n, chosen->num_nodes());
        const bool has = chosen->has(u);
        out[found] = u;
        found += has;
        word |= static_cast<uint64_t>(has) << i;
      }
      *inside++ = word;
    }
    *count = found;
  }
};

#if defined(__x86_64__) && defined(__GNUC__)
// The same, sixteen edges at a time. Returns how many there are. `look` says which of sixteen ends
// are chosen, and returns what is written of them.
template <typename Look>
[[gnu::target("avx512f,popcnt")]] int64_t ends_inside_sixteens(const int32_t* target, int64_t n,
                                                               int64_t num_nodes, const Look& look,
                                                               int32_t* out, uint64_t* inside) {
  // A processor that reads on by itself stops where pages end, and is too late.
  constexpr int64_t kFar = 1024;  // edges that are asked for before they are read
  const Look own = look;          // a copy: what is written might be a part of anything else
  const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(num_nodes));
  int64_t found = 0;
  for (int64_t begin = 0; begin < n; begin += kBits) {
    if (begin + kFar + kBits <= n) {
      prefetch_lines<kBits * 4 / 64, 3>(reinterpret_cast<const char*>(target + begin + kFar));
    }
    const int64_t size = std::min(kBits, n - begin);
    uint64_t word = 0;
    for (int64_t i = 0; i < size; i += 16) {
      const auto these = static_cast<__mmask16>(size - i >= 16 ? 0xFFFF : (1u << (size - i)) - 1);
      const __m512i u = _mm512_maskz_loadu_epi32(these, target + begin + i);
      if (_mm512_mask_cmpge_epu32_mask(these, u, limit)) [[unlikely]]
        fail_end(target, 1, n, num_nodes);
      __mmask16 has;
      const __m512i written = own.sixteen(u, these, &has);
      _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi32(has, written));
      found += std::popcount(static_cast<uint32_t>(has));
      word |= uint64_t{has} << i;
    }
    *inside++ = word;
  }
  return found;
}

// Looks up a bit of each end.
struct BitOfEach {
  const Chosen* chosen;

  [[gnu::target("avx512f,popcnt"), gnu::always_inline]] inline __m512i sixteen(
      __m512i u, __mmask16 these, __mmask16* has) const {
    const int* bits = reinterpret_cast<const int*>(chosen->bits());
    const __m512i at = _mm512_maskz_srli_epi32(0xFFFF, u, 5);
    const __m512i held = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), these, at, bits, 4);
    const __m512i low = _mm512_and_si512(u, _mm512_set1_epi32(31));
    *has = _mm512_test_epi32_mask(held, _mm512_maskz_sllv_epi32(0xFFFF, _mm512_set1_epi32(1), low));
    return u;
  }
};

// The ends that are chosen.
struct ChosenOfEight {
  const int32_t* target;
  int64_t n, num_nodes;
  const uint32_t* bits;

  [[gnu::target("avx2"), gnu::always_inline]] inline uint32_t take(int64_t from, uint32_t these,
                                                                   int32_t* out) const {
    const __m256i u = load_eight<1>(target + from);
    const __m256i limit = _mm256_set1_epi32(static_cast<int32_t>(num_nodes));
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_max_epu32(u, limit), u))) [[unlikely]]
      fail_end(target, 1, n, num_nodes);
    const uint32_t has = bits_of_eight(bits, u) & these;
    store_those(out, u, has);
    return has;
  }
};

#endif

// True if ends are looked up eight at a time where there are as many.
inline bool in_eights(int64_t stride, const Chosen& chosen) {
#if defined(__x86_64__) && defined(__GNUC__)
  return stride == 1 && !has_avx512() && has_avx2() && chosen.num_nodes() <= INT32_MAX;
#else
  (void)stride, (void)chosen;
  return false;
#endif
}

template <typename T>
int64_t ends_inside(const T* target, int64_t stride, int64_t n, const Chosen& chosen, T* out,
                    uint64_t* inside) {
#if defined(__x86_64__) && defined(__GNUC__)
  if constexpr (std::is_same_v<T, int32_t>) {
    if (stride == 1 && has_avx512() && chosen.num_nodes() <= INT32_MAX) {
      return ends_inside_sixteens(target, n, chosen.num_nodes(), BitOfEach{&chosen}, out, inside);
    }
    if (n >= 8 && in_eights(stride, chosen)) {
      const ChosenOfEight those{target, n, chosen.num_nodes(), chosen.bits()};
      return take_eights(n, those, out, inside);
    }
  }
#endif
  int64_t count;
  stride == 2 ? dispatch(EndsInside<T, 2>{}, target, n, &chosen, out, inside, &count)
              : dispatch(EndsInside<T, 1>{}, target, n, &chosen, out, inside, &count);
  return count;
}

// Some ranges of nodes, each of which has places in a row.
class Ranges {
 public:
  explicit Ranges(int64_t num_nodes) : num_nodes_(num_nodes) {}

  // Nodes [begin, end), not empty, of which the first has place `place`.
  void add(int64_t begin, int64_t end, int64_t place) {
    if (count_ > 0 && count_ <= kMost) {
      Range& last = range_[count_ - 1];
      if (last.begin + last.size == begin && last.begin + last.by + last.size == place) {
        last.size += end - begin;
        return;
      }
    }
    if (count_ < kMost) range_[count_] = {begin, end - begin, place - begin};
    ++count_;
  }

  // Makes them ready to be looked up. Returns false if they are too many, or overlap. Nodes and
  // places have 31 bits.
  bool sort() {
    if (count_ > kMost) return false;
    std::sort(range_, range_ + count_,
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    top_ = static_cast<int>(std::bit_ceil(static_cast<unsigned>(count_)) / 2);
    for (int r = 1; r < count_; ++r) {
      if (range_[r - 1].begin + range_[r - 1].size > range_[r].begin) return false;
    }
    for (int r = 0; r < kMost; ++r) {
      const Range own = r < count_ ? range_[r] : Range{INT32_MAX, 0, 0};
      begin_[r] = static_cast<int32_t>(own.begin);
      size_[r] = static_cast<int32_t>(own.size);
      by_[r] = static_cast<int32_t>(own.by);
    }
    return true;
  }

  int64_t num_nodes() const { return num_nodes_; }

 private:
  static constexpr int kMost = 16;  // as many as a vector has numbers
  struct Range {
    int64_t begin, size, by;  // its nodes are numbered by more as places
  };
  Range range_[kMost];
  int count_ = 0, top_ = 0;  // top_: the highest bit of their numbers
  int64_t num_nodes_;
  int32_t begin_[kMost], size_[kMost], by_[kMost];

#if defined(__x86_64__) && defined(__GNUC__)
  // The numbers at some places of a table.
  [[gnu::target("avx512f,popcnt"), gnu::always_inline]] static inline __m512i at(
      __m512i place, const int32_t* table) {
    return _mm512_maskz_permutexvar_epi32(0xFFFF, place, _mm512_loadu_si512(table));
  }

 public:
  // Finds the range of each of sixteen ends by bisection, and returns their places.
  [[gnu::target("avx512f,popcnt"), gnu::always_inline]] inline __m512i sixteen(
      __m512i u, __mmask16 these, __mmask16* has) const {
    // The last range that begins at u or before, or the first one.
    __m512i range = _mm512_setzero_si512();
    for (int bit = top_; bit > 0; bit /= 2) {
      const __m512i next = _mm512_or_si512(range, _mm512_set1_epi32(bit));
      range = _mm512_mask_mov_epi32(range, _mm512_cmpge_epu32_mask(u, at(next, begin_)), next);
    }
    const __m512i after = _mm512_maskz_sub_epi32(these, u, at(range, begin_));
    *has = _mm512_mask_cmplt_epu32_mask(these, after, at(range, size_));
    return _mm512_mask_add_epi32(u, *has, u, at(range, by_));
  }
#endif
};

inline bool takes_ranges() {
#if defined(__x86_64__) && defined(__GNUC__)
  return has_avx512();
#else
  return false;
#endif
}

// The same for ranges, of places instead of ends. Only where takes_ranges(), and ends and places
// have 32 bits.
inline int64_t ends_inside(const int32_t* target, int64_t, int64_t n, const Ranges& ranges,
                           int32_t* out, uint64_t* inside) {
#if defined(__x86_64__) && defined(__GNUC__)
  return ends_inside_sixteens(target, n, ranges.num_nodes(), ranges, out, inside);
#else
  (void)target, (void)n, (void)ranges, (void)out, (void)inside;
  fail("ranges are compared with AVX-512 alone");
#endif
}

// The edges that were found, node by node: memory that a thread uses again.
template <typename T>
class FoundEdges {
 public:
  int64_t size() const { return other_.size(); }

  // Finds those of nodes in any order.
  void of_nodes(const EdgeTable& table, const Chosen& chosen, const int64_t* node, int64_t count) {
#if defined(__x86_64__) && defined(__GNUC__)
    if constexpr (std::is_same_v<T, int32_t>) {
      if (in_eights(table.target.stride, chosen)) {
        return of_nodes_in_eights(table, chosen, node, count);
      }
    }
#endif
    const auto* target = static_cast<const T*>(table.target.data);
    const int64_t stride = table.target.stride;
    for (int64_t i = 0; i < count; ++i) {
      const Entries own = entries_of(table, node, i, count);
      note(table, own, scan(target + own.from * stride, stride, own.to - own.from, chosen));
    }
  }

  // Finds those of a range of nodes. Their ids are their positions.
  template <typename Set>
  void of_range(const EdgeTable& table, const Set& chosen, int64_t begin, int64_t end, bool ids) {
    const int64_t* pointer = table.pointer;
    for (int64_t v = begin; v < end; ++v) {
      check_entries(v, pointer[v], pointer[v + 1], table.num_edges);
    }
    const int64_t from = pointer[begin], n = pointer[end] - from;
    const auto* target = static_cast<const T*>(table.target.data);
    const int64_t found = scan(target + from, 1, n, chosen);
    if (ids) push_ids(n, found, [&](int64_t j) { return static_cast<T>(from + j); });
    if (n % kBits == 0) inside_[n / kBits] = 0;  // the scan made room for it
    before_.reserve(n / kBits + 1);
    int64_t all;
    dispatch(CountBefore{}, inside_.data(), n / kBits + 1, before_.data(), &all);
    const int64_t size = degree_.size();
    degree_.reserve(size + end - begin);
    dispatch(CountByNode{}, inside_.data(), before_.data(), pointer + begin, end - begin,
             degree_.data() + size);
    degree_.set_size(size + end - begin);
  }

  // Writes the place of each edge's own node and that of its other end.
  template <typename Place>
  void write(const Place& place, int64_t* own, int64_t* other) const {
    constexpr int64_t kMany = 1 << 16;  // what is in the caches would have to go
    if (has_wide_stores() && size() >= kMany) {
      dispatch(WritePast{}, this, &place, own, other);
    } else {
      dispatch(Write{}, this, &place, own, other);
    }
  }

  void write_ids(int64_t* id) const { std::copy_n(edge_.data(), edge_.size(), id); }

  // A batch of unusual size keeps no memory.
  void clear() {
    constexpr size_t kKeptBytes = size_t{1} << 26;
    other_.clear();
    edge_.clear();
    degree_.clear();
    if (other_.bytes() + edge_.bytes() + inside_.bytes() > kKeptBytes) {
      other_.release();
      edge_.release();
      inside_.release();
    }
  }

 private:
  static constexpr int64_t kAhead = 16;  // nodes whose pointers are asked for
  static constexpr int64_t kSoon = 8;    // nodes whose edges are

  struct Entries {
    int64_t from, to;
  };

  // The edges of node[i]. Asks for those of nodes that come later.
  PYG_SCALE_PREFETCH Entries entries_of(const EdgeTable& table, const int64_t* node, int64_t i,
                                        int64_t count) {
    const int64_t *pointer = table.pointer, bytes = static_cast<int64_t>(sizeof(T));
    if (i + kAhead < count) prefetch_ends(pointer, node[i + kAhead]);
    if (i + kSoon < count) {
      const int64_t* coming = pointer + node[i + kSoon];
      prefetch_entries(table.target.data, table.target.stride * bytes, coming[0], coming[1]);
    }
    const int64_t from = pointer[node[i]], to = pointer[node[i] + 1];
    check_entries(node[i], from, to, table.num_edges);
    return {from, to};
  }

  // Keeps how many edges of a node the last scan found, and their ids.
  PYG_SCALE_INLINE void note(const EdgeTable& table, Entries own, int64_t found) {
    degree_.push(found);
    if (const auto* id = static_cast<const T*>(table.id.data)) {
      const int64_t stride = table.id.stride;
      push_ids(own.to - own.from, found, [&](int64_t j) { return id[(own.from + j) * stride]; });
    }
  }

#if defined(__x86_64__) && defined(__GNUC__)
  // of_nodes() of which everything is inlined: to call a function for every node takes a twentieth
  // longer. It has a copy of the table, as bytes that are written might be a part of that one.
  [[gnu::target("avx2,popcnt")]] void of_nodes_in_eights(EdgeTable table, const Chosen& chosen,
                                                         const int64_t* node, int64_t count) {
    const auto* target = static_cast<const int32_t*>(table.target.data);
    const int64_t num_nodes = chosen.num_nodes();
    const uint32_t* bits = chosen.bits();
    for (int64_t i = 0; i < count; ++i) {
      const Entries own = entries_of(table, node, i, count);
      const int64_t n = own.to - own.from;
      const int32_t* ends = target + own.from;
      if (n < 8) {
        note(table, own, scan(ends, 1, n, chosen));
        continue;
      }
      const ChosenOfEight those{ends, n, num_nodes, bits};
      make_room(n);
      const int64_t size = other_.size();
      const int64_t found = take_eights_inlined(n, those, other_.data() + size, inside_.data());
      other_.set_size(size + found);
      note(table, own, found);
    }
  }
#endif

  // For the answers of a scan of `n` edges.
  void make_room(int64_t n) {
    other_.reserve(other_.size() + n + kRoomForEnds);
    inside_.reserve(n / kBits + kRoomForWords);
  }

  template <typename Set>
  int64_t scan(const T* target, int64_t stride, int64_t n, const Set& chosen) {
    make_room(n);
    const int64_t size = other_.size();
    const int64_t found =
        ends_inside(target, stride, n, chosen, other_.data() + size, inside_.data());
    other_.set_size(size + found);
    return found;
  }

  // The ids of the edges that the last scan found among `n`.
  template <typename Id>
  void push_ids(int64_t n, int64_t found, const Id& id) {
    int64_t size = edge_.size();
    edge_.reserve(size + found);
    for (int64_t begin = 0; begin < n; begin += kBits) {
      for (uint64_t left = inside_[begin / kBits]; left; left &= left - 1) {
        edge_[size++] = id(begin + std::countr_zero(left));
      }
    }
    edge_.set_size(size);
  }

  // How many of the edges of each of `count` nodes were found, whose pointers are consecutive.
  struct CountByNode {
    PYG_SCALE_INLINE void operator()(const uint64_t* inside, const int64_t* before,
                                     const int64_t* pointer, int64_t count, int64_t* degree) const {
      int64_t last = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t j = pointer[i + 1] - pointer[0];
        const uint64_t word = inside[j / kBits] & ((uint64_t{1} << (j % kBits)) - 1);
        const int64_t now = before[j / kBits] + std::popcount(word);
        degree[i] = now - last;
        last = now;
      }
    }
  };

  struct Write {
    template <typename Place>
    PYG_SCALE_INLINE void operator()(const FoundEdges* found, const Place* place, int64_t* own,
                                     int64_t* other) const {
      constexpr int64_t kUsual = 16;  // are written for every node; the next one writes over them
      const int64_t size = found->size();
      for (int64_t i = 0, at = 0; i < found->degree_.size(); ++i) {
        const int64_t end = at + found->degree_[i];
        if (at + kUsual <= size) {
          for (int64_t j = 0; j < kUsual; ++j) own[at + j] = i;
          at += kUsual;
        }
        for (; at < end; ++at) own[at] = i;
        at = end;
      }
      for (int64_t at = 0; at < size; ++at) other[at] = (*place)(found->other_[at]);
    }
  };

  // The same, past the caches: where the batches before were written, lines are in none any more.
  struct WritePast {
    template <typename Place>
    PYG_SCALE_INLINE void operator()(const FoundEdges* found, const Place* place, int64_t* own,
                                     int64_t* other) const {
      constexpr int64_t kUsual = 16, kHeld = 256, kBytes = kHeld * sizeof(int64_t);
      const int64_t size = found->size();
      int64_t held[kHeld + kUsual], n = 0;
      const char* from = reinterpret_cast<const char*>(held);
      const auto bytes = [](int64_t count) {
        return count * static_cast<int64_t>(sizeof(int64_t));
      };
      RowWriter owns(reinterpret_cast<char*>(own));
      for (int64_t i = 0; i < found->degree_.size(); ++i) {
        for (int64_t left = found->degree_[i]; left > 0; left -= kUsual) {
          for (int64_t j = 0; j < kUsual; ++j) held[n + j] = i;
          n += std::min(left, kUsual);
          if (n < kHeld) continue;
          owns.put(from, kBytes);
          std::copy_n(held + kHeld, kUsual, held);
          n -= kHeld;
        }
      }
      owns.put(from, bytes(n));
      owns.finish();
      RowWriter others(reinterpret_cast<char*>(other));
      for (int64_t begin = 0; begin < size; begin += kHeld) {
        n = std::min(kHeld, size - begin);
        for (int64_t j = 0; j < n; ++j) held[j] = (*place)(found->other_[begin + j]);
        others.put(from, bytes(n));
      }
      others.finish();
    }
  };

  Buffer<T> other_;  // the other end of each edge
  Buffer<T> edge_;   // its id, if that was wanted
  Buffer<int64_t> degree_;
  Buffer<uint64_t> inside_;  // of the edges that were scanned last, a bit each
  Buffer<int64_t> before_;   // how many of them were found before each word
};

}  // namespace pyg_scale
