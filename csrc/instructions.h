// Which instructions of the processor are used.
#pragma once

#include <cstdlib>
#include <string_view>

#include "graph_view.h"

namespace pyg_scale {

#if defined(__x86_64__) && defined(__GNUC__)
enum class Instructions { kPortable, kAvx2, kAvx512 };

// Those that the processor has, or fewer: PYG_SCALE_INSTRUCTIONS names the most, so that a test can
// compare results.
inline Instructions instructions() {
  static const Instructions found = [] {
    const char* set = std::getenv("PYG_SCALE_INSTRUCTIONS");
    const std::string_view most = set ? set : "";
    check(most.empty() || most == "portable" || most == "avx2" || most == "avx512",
          "PYG_SCALE_INSTRUCTIONS must be portable, avx2 or avx512");
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    if (!avx2 || most == "portable") return Instructions::kPortable;
    return __builtin_cpu_supports("avx512f") && most != "avx2" ? Instructions::kAvx512
                                                               : Instructions::kAvx2;
  }();
  return found;
}

inline bool has_avx2() { return instructions() != Instructions::kPortable; }
inline bool has_avx512() { return instructions() == Instructions::kAvx512; }
#endif

}  // namespace pyg_scale
