// Memory that is read soon, on its way while something else is done.
//
// Always inlined: GCC treats a function that only prefetches as one without effect, and leaves out
// calls of it.
#pragma once

#include <algorithm>
#include <cstdint>

#define PYG_SCALE_PREFETCH [[gnu::always_inline]] inline

namespace pyg_scale {

// Prefetches entry `i` of a table. `i` has not been checked yet, so the address may be anywhere.
template <int kWrite = 0, int kLocality = 3, typename T>
PYG_SCALE_PREFETCH void prefetch_entry(const T* table, int64_t i) {
  const uintptr_t offset = static_cast<uintptr_t>(i) * sizeof(T);
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(table) + offset),
                     kWrite, kLocality);
}

// Asks for where the entries of a row begin and end. For every eighth row, these are two lines.
PYG_SCALE_PREFETCH void prefetch_ends(const int64_t* indptr, int64_t row) {
  prefetch_entry(indptr, row);
  prefetch_entry(indptr + 1, row);
}

// The rows whose pages are looked up together, before their lines are asked for. A processor looks
// up several pages at a time if it is asked for them one right after the other.
constexpr int64_t kPagesAtOnce = 8;

// The bytes of a row that are prefetched. After them, the processor prefetches by itself.
constexpr int64_t kRowStart = 1024;

// Prefetches a number of lines that is known, without a branch.
template <int64_t kLines, int kLocality>
PYG_SCALE_PREFETCH void prefetch_lines(const char* from) {
#pragma GCC unroll 8
  for (int64_t line = 0; line < kLines; ++line) __builtin_prefetch(from + line * 64, 0, kLocality);
}

// Prefetches entries [from, to) of a column, of `width` bytes each: the first few lines without a
// look at how many there are, as nodes usually have that many edges, and no more than half a
// kilobyte. The entries have not been checked yet, so they may be anywhere.
PYG_SCALE_PREFETCH void prefetch_entries(const void* column, int64_t width, int64_t from,
                                         int64_t to) {
  constexpr uintptr_t kLine = 64, kFew = 4, kMost = 8;
  const auto bytes = [&](int64_t i) {
    return static_cast<uintptr_t>(i) * static_cast<uintptr_t>(width);
  };
  const uintptr_t first = reinterpret_cast<uintptr_t>(column) + bytes(from);
  const uintptr_t lines = std::min((bytes(to) - bytes(from) + kLine - 1) / kLine, kMost);
  prefetch_lines<kFew, 3>(reinterpret_cast<const char*>(first));
  for (uintptr_t line = kFew; line < lines; ++line) {
    __builtin_prefetch(reinterpret_cast<const void*>(first + line * kLine));
  }
}

// Into the second-level cache, which waits for more lines at a time than the first one.
PYG_SCALE_PREFETCH void prefetch_row_start(const char* row, int64_t bytes) {
  const int64_t size = std::min(bytes, kRowStart);
  int64_t at = 0;
  for (; at + 8 * 64 <= size; at += 8 * 64) prefetch_lines<8, 2>(row + at);
  for (; at + 4 * 64 <= size; at += 4 * 64) prefetch_lines<4, 2>(row + at);
  for (; at < size; at += 64) prefetch_lines<1, 2>(row + at);
  if (size > 0) __builtin_prefetch(row + size - 1, 0, 2);  // rows begin anywhere in a line
}

// How many rows ahead of the one that is copied: enough to hide the latency of memory. 64 lines are
// as many as a processor waits for at a time; four times as many take 2 to 10 % longer on Milan.
inline int64_t rows_ahead(int64_t bytes) {
  constexpr int64_t kBytes = 4096, kRows = 32;
  return std::clamp(kBytes / std::clamp(bytes, int64_t{1}, kRowStart), int64_t{1}, kRows);
}

}  // namespace pyg_scale
