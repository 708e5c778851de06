// Writes consecutive rows into a large batch: past the caches, line by line.
//
// Rows end in the middle of lines. Such lines are put together first, as storing a part of a line
// costs more than passing the caches saves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "prefetch.h"
#include "stream.h"

namespace pyg_scale {

class RowWriter {
 public:
  explicit RowWriter(char* to)
      : line_(to - offset_in_line(to)), first_(offset_in_line(to)), size_(first_) {}

  void put(const char* row, int64_t bytes) {
    while (bytes > 0) {
      const int64_t n = std::min(bytes, kHeld - size_);
      std::memcpy(held_ + size_, row, static_cast<size_t>(n));
      size_ += n;
      row += n;
      bytes -= n;
      if (size_ == kHeld) flush();
    }
  }

  // Call it after the last row, before another thread is told that rows are there.
  void finish() {
    flush();
    streams_end();
  }

 private:
  static constexpr int64_t kHeld = 8192;  // a part of the first-level cache

  // Writes what is held: whole lines past the caches, and lines that others share as usual.
  void flush() {
    int64_t begin = first_;
    if (begin > 0) {
      const int64_t end = std::min(kLine, size_);
      std::memcpy(line_ + begin, held_ + begin, static_cast<size_t>(end - begin));
      begin = end;
    }
    const int64_t whole = size_ / kLine * kLine;
    if (begin < whole) {
      stream_lines(line_ + begin, held_ + begin, whole - begin);
      begin = whole;
    }
    std::memcpy(line_ + begin, held_ + begin, static_cast<size_t>(size_ - begin));
    line_ += whole;
    first_ = size_ = size_ - whole;
  }

  char* line_;     // the line that the first held byte belongs to
  int64_t first_;  // the first held byte of that line
  int64_t size_;   // the end of what is held
  alignas(kLine) char held_[kHeld];
};

#ifdef PYG_SCALE_WIDE_STORES
// The same for rows of at least a line and of whole pieces, on processors that need two stores for
// a line: they go straight to their place, which begins with a piece, and must not change until
// `finish`.
class PieceWriter {
 public:
  explicit PieceWriter(char* to) : to_(to) {}

  [[gnu::target("avx2"), gnu::always_inline]] inline void put(const char* row, int64_t bytes) {
    const char* end = row + bytes;
    if (held_ > 0) {
      stream_both(to_, last_, held_, row);
      row += kLine - held_;
      to_ += kLine;
    } else if (const int64_t before = offset_in_line(to_); before > 0) [[unlikely]] {
      std::memcpy(to_, row, static_cast<size_t>(kLine - before));  // others have a part of the line
      row += kLine - before;
      to_ += kLine - before;
    }
    for (; end - row >= kLine; row += kLine, to_ += kLine) stream_halves(to_, row);
    last_ = row;
    held_ = end - row;
  }

  // Call it after the last row, before another thread is told that rows are there.
  void finish() {
    if (held_ > 0) std::memcpy(to_, last_, static_cast<size_t>(held_));
    streams_end();
  }

 private:
  char* to_;                    // where the next line begins
  const char* last_ = nullptr;  // the end of the last row, which is not written yet
  int64_t held_ = 0;            // its bytes, less than a line
};
#endif

// Whether rows are written past the caches, measured on processors that need one store for a line
// (Sapphire Rapids) and two (Milan): shorter rows and smaller outputs are written faster as usual.
inline bool passes_caches(int64_t row_bytes, int64_t all_bytes) {
#ifdef PYG_SCALE_WIDE_STORES
  constexpr int64_t kWorth = int64_t{8} << 20, kWorthInPieces = int64_t{2} << 20;
  if (has_wide_stores()) return row_bytes > kLine && all_bytes >= kWorth;
  return has_avx2() && row_bytes >= 2 * kLine && row_bytes % kPiece == 0 &&
         all_bytes >= kWorthInPieces;
#else
  return false;
#endif
}

#ifdef PYG_SCALE_WIDE_STORES
template <typename Writer, typename At>
[[gnu::target("avx2")]] int64_t write_rows_with(int64_t n, int64_t bytes, char* out, const At& at) {
  const int64_t ahead = rows_ahead(bytes);
  const auto prefetch = [&](int64_t i) __attribute__((always_inline)) {
    if (const char* coming = i < n ? at(i) : nullptr) prefetch_row_start(coming, bytes);
  };
  for (int64_t i = 0; i < ahead; ++i) prefetch(i);
  Writer writer(out);
  for (int64_t i = 0; i < n; ++i) {
    if (i % kPagesAtOnce == 0) {
      const int64_t first = i + ahead + kPagesAtOnce;
      for (int64_t j = first; j < std::min(first + kPagesAtOnce, n); ++j) {
        __builtin_prefetch(at(j), 0, 2);
      }
    }
    prefetch(i + ahead);
    const char* row = at(i);
    if (!row) [[unlikely]]
      return i;
    writer.put(row, bytes);
  }
  writer.finish();
  return n;
}
#endif

// Writes the rows at(0), at(1), ... one after the other, where passes_caches() says so. Returns the
// number of the first row that is null, or `n`. `at` must always be inlined, see prefetch.h.
template <typename At>
int64_t write_rows(int64_t n, int64_t bytes, char* out, const At& at) {
#ifdef PYG_SCALE_WIDE_STORES
  if (!has_wide_stores()) return write_rows_with<PieceWriter>(n, bytes, out, at);
  return write_rows_with<RowWriter>(n, bytes, out, at);
#else
  fail("rows are not written past the caches on this processor");
#endif
}

}  // namespace pyg_scale
