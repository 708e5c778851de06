// Writes consecutive rows into a large batch: past the caches, line by line.
//
// Rows may end in the middle of lines. Such lines are put together first, as storing a part of a
// line costs more than passing the caches saves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "prefetch.h"
#include "row_copy.h"
#include "stream.h"

namespace pyg_scale {

// Rows that end within a line, put together before they are written.
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

// Rows of whole lines, which go straight to their place.
class LineWriter {
 public:
  explicit LineWriter(char* to) : to_(to) {}

  void put(const char* row, int64_t bytes) {
    put_row(to_, row, bytes);
    to_ += bytes;
  }

  // Call it after the last row, before another thread is told that rows are there.
  void finish() { streams_end(); }

 private:
  char* to_;
};

// Whether rows are written past the caches, measured on processors that need one store for a line
// (Sapphire Rapids), two or four (Milan): shorter rows and smaller outputs are written faster as
// usual. Rows that end within a line are put together first, which pays with few stores a line.
inline bool passes_caches(int64_t row_bytes, int64_t all_bytes) {
  constexpr int64_t kMegabyte = 1 << 20;
  if (row_bytes <= kLine) return false;
  if (row_bytes % kLine == 0) {
#ifdef __SSE2__
    return all_bytes >= 2 * kMegabyte;
#else
    return false;
#endif
  }
#ifdef PYG_SCALE_WIDE_STORES
  const bool halves = has_avx2() && row_bytes >= 4 * kLine;
  return (has_wide_stores() || halves) && all_bytes >= 8 * kMegabyte;
#else
  return false;
#endif
}

// Asks for rows before they are written: for their pages first, then for their lines. It has a copy
// of `at`, as the compiler would look again after every store for what a reference leads to.
template <typename At>
class RowsAhead {
 public:
  PYG_SCALE_PREFETCH RowsAhead(int64_t n, int64_t bytes, const At& at)
      : n_(n), bytes_(bytes), ahead_(rows_ahead(bytes)), at_(at) {
    for (int64_t i = 0; i < ahead_; ++i) lines(i);
  }

  // Call it before row i is written.
  PYG_SCALE_PREFETCH void before(int64_t i) const {
    if (i % kPagesAtOnce == 0) {
      const int64_t first = i + ahead_ + kPagesAtOnce;
      for (int64_t j = first; j < std::min(first + kPagesAtOnce, n_); ++j) {
        __builtin_prefetch(at_(j), 0, 2);
      }
    }
    lines(i + ahead_);
  }

 private:
  PYG_SCALE_PREFETCH void lines(int64_t i) const {
    if (const char* coming = i < n_ ? at_(i) : nullptr) prefetch_row_start(coming, bytes_);
  }

  const int64_t n_, bytes_, ahead_;
  const At at_;
};

template <typename Writer, typename At>
int64_t write_rows_with(int64_t n, int64_t bytes, char* out, const At& at) {
  const At own = at;
  const RowsAhead<At> ahead(n, bytes, own);
  Writer writer(out);
  for (int64_t i = 0; i < n; ++i) {
    ahead.before(i);
    const char* row = own(i);
    if (!row) [[unlikely]]
      return i;
    writer.put(row, bytes);
  }
  writer.finish();
  return n;
}

#ifdef PYG_SCALE_WIDE_STORES
// Rows of whole lines, which go straight to their place, a line in two stores.
template <typename At>
[[gnu::target("avx2")]] int64_t write_rows_in_halves(int64_t n, int64_t bytes, char* out,
                                                     const At& at) {
  const At own = at;
  const RowsAhead<At> ahead(n, bytes, own);
  for (int64_t i = 0; i < n; ++i, out += bytes) {
    ahead.before(i);
    const char* row = own(i);
    if (!row) [[unlikely]]
      return i;
    stream_halves(out, row, bytes);
  }
  streams_end();
  return n;
}
#endif

// Writes the rows at(0), at(1), ... one after the other, where passes_caches() says so. Returns the
// number of the first row that is null, or `n`. `at` must always be inlined, see prefetch.h, and
// hold values rather than references.
template <typename At>
int64_t write_rows(int64_t n, int64_t bytes, char* out, const At& at) {
  if (bytes % kLine) return write_rows_with<RowWriter>(n, bytes, out, at);
#ifdef PYG_SCALE_WIDE_STORES
  if (!has_wide_stores() && has_avx2() && offset_in_line(out) == 0) {
    return write_rows_in_halves(n, bytes, out, at);
  }
#endif
  return write_rows_with<LineWriter>(n, bytes, out, at);
}

}  // namespace pyg_scale
