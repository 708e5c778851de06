// Copies a row into a batch, past the caches if it fills whole lines.
#pragma once

#include <cstdint>
#include <cstring>

#include "stream.h"

namespace pyg_scale {

// Call `streams_end` after the last row.
inline void put_row(char* to, const char* from, int64_t bytes) {
  if (bytes > 0 && bytes % kLine == 0 && offset_in_line(to) == 0) {
    stream_lines(to, from, bytes);
  } else {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

}  // namespace pyg_scale
