// Memory that is read at random, moved to huge pages where it lies.

#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older kernels refuse it, which is fine
#endif

namespace pyg_scale {
namespace {

using torch::stable::Tensor;

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

// Whether a range lies in one private mapping without a file. The pages of a file belong to
// everybody who has it open, and may not even be in memory.
bool is_private(uintptr_t begin, uintptr_t end) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (!maps) return false;
  bool found = false;
  char line[8192];
  while (!found && std::fgets(line, sizeof line, maps)) {
    uintptr_t from, to;
    char mode[5];
    unsigned long inode;
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %lu", &from, &to, mode, &inode) !=
        4) {
      continue;
    }
    found = from <= begin && end <= to && mode[3] == 'p' && inode == 0;
  }
  std::fclose(maps);
  return found;
}

// Moves the memory of a tensor to huge pages if possible. Its content and address stay.
void prefer_huge_pages(Tensor tensor) {
#ifdef __linux__
  if (tensor.numel() == 0) return;
  const auto data = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t begin = (data + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (data + static_cast<uintptr_t>(tensor.numel()) * tensor.element_size()) /
                        kHugePage * kHugePage;
  if (!tensor.is_contiguous() || begin >= end || !is_private(begin, end)) return;
  if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_COLLAPSE);
  }
#else
  (void)tensor;
#endif
}

}  // namespace
}  // namespace pyg_scale

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_scale, m) { m.def("prefer_huge_pages(Tensor tensor) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(pyg_scale, CompositeExplicitAutograd, m) {
  m.impl("prefer_huge_pages", TORCH_BOX(&pyg_scale::prefer_huge_pages));
}
