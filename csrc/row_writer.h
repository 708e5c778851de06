// Rows one after the other, written past the caches.
//
// A batch is larger than the caches: what its lines held before need not be fetched to be
// overwritten, and nothing that is used again should make room for it. Rows end in the middle of
// lines, so whole ones are put together first; a store of half a line costs more than it saves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define PYG_SCALE_ROW_WRITER 1
#include <immintrin.h>
#endif

namespace pyg_scale {

class RowWriter {
 public:
  // Whether it is worth it: smaller rows or outputs are faster written as usual, and so are all
  // where a store has less than a line (measured on Sapphire Rapids: 1.2 times as fast with 64
  // bytes at a time, slower with 16).
  static bool suits(int64_t row_bytes, int64_t all_bytes) {
#ifdef PYG_SCALE_ROW_WRITER
    static const bool lines = __builtin_cpu_supports("avx512f");
    return lines && row_bytes > kLine && all_bytes >= kWorth;
#else
    (void)row_bytes, (void)all_bytes;
    return false;
#endif
  }

  explicit RowWriter(char* to) : line_(to - offset(to)), first_(offset(to)), size_(first_) {}

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
#ifdef PYG_SCALE_ROW_WRITER
    _mm_sfence();
#endif
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int64_t kHeld = 8192;                 // a part of the first-level cache
  static constexpr int64_t kWorth = int64_t{8} << 20;    // bytes, more than is still cached later

  static int64_t offset(const char* to) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLine);
  }

  // Writes what is held: whole lines past the caches, and what others have a part of as usual.
  void flush() {
    int64_t begin = first_;
    if (begin > 0) {
      const int64_t end = std::min(kLine, size_);
      std::memcpy(line_ + begin, held_ + begin, static_cast<size_t>(end - begin));
      begin = end;
    }
    const int64_t whole = size_ / kLine * kLine;
    if (begin < whole) {
      stream(line_ + begin, held_ + begin, whole - begin);
      begin = whole;
    }
    std::memcpy(line_ + begin, held_ + begin, static_cast<size_t>(size_ - begin));
    line_ += whole;
    first_ = size_ = size_ - whole;
  }

#ifdef PYG_SCALE_ROW_WRITER
  [[gnu::target("avx512f")]] static void stream(char* to, const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kLine) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_load_si512(from + at));
    }
  }
#else
  static void stream(char* to, const char* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
#endif

  char* line_;     // where the line is to which the first held byte belongs
  int64_t first_;  // the first byte held of it
  int64_t size_;   // the end of what is held
  alignas(kLine) char held_[kHeld];
};

}  // namespace pyg_scale
