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

// Rows that end within a line, put together before they are written: for processors that store a
// line at a time.
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
// (Sapphire Rapids) and several (Milan): shorter rows and smaller outputs are written faster as
// usual, and on the latter rows that end within a line.
inline bool passes_caches(int64_t row_bytes, int64_t all_bytes) {
  constexpr int64_t kMegabyte = 1 << 20;
  const bool whole_lines = row_bytes % kLine == 0;
  if (has_wide_stores()) return row_bytes > kLine && all_bytes >= (whole_lines ? 2 : 8) * kMegabyte;
#ifdef __SSE2__
  return row_bytes > kLine && whole_lines && all_bytes >= 2 * kMegabyte;
#else
  return false;
#endif
}

template <typename Writer, typename At>
int64_t write_rows_with(int64_t n, int64_t bytes, char* out, const At& at) {
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

// Writes the rows at(0), at(1), ... one after the other, where passes_caches() says so. Returns the
// number of the first row that is null, or `n`. `at` must always be inlined, see prefetch.h.
template <typename At>
int64_t write_rows(int64_t n, int64_t bytes, char* out, const At& at) {
  return has_wide_stores() && bytes % kLine ? write_rows_with<RowWriter>(n, bytes, out, at)
                                            : write_rows_with<LineWriter>(n, bytes, out, at);
}

}  // namespace pyg_scale
