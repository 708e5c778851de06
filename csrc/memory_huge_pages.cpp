// Memory that is read at random, moved to huge pages where it lies.

#include <fcntl.h>
#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older kernels refuse it, which is fine
#endif

namespace pyg_scale {
namespace {

using torch::stable::Tensor;
using Clock = std::chrono::steady_clock;

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
constexpr uintptr_t kAtOnce = 32 * kHugePage;
constexpr std::chrono::seconds kLongest{10};  // a gigabyte takes about one

#ifdef __linux__
// The kernel's table of this process's pages: a number for each.
class PageTable {
 public:
  PageTable()
      : file_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)),
        page_(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE))) {}
  ~PageTable() {
    if (file_ >= 0) close(file_);
  }
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;

  // True if all pages of the huge page at `begin` are in memory, and this process's alone: those
  // of a file belong to everybody who has it open, and those that a forked process has too would
  // be there twice.
  bool has_alone(uintptr_t begin) const {
    constexpr uint64_t kPresent = uint64_t{1} << 63, kOfFile = uint64_t{1} << 61,
                       kAlone = uint64_t{1} << 56;
    std::array<uint64_t, kHugePage / 4096> pages;
    const size_t count = kHugePage / page_, size = count * sizeof(uint64_t);
    const auto at = static_cast<off_t>(begin / page_ * sizeof(uint64_t));
    if (count > pages.size() || pread(file_, pages.data(), size, at) != static_cast<ssize_t>(size))
      return false;
    return std::all_of(pages.begin(), pages.begin() + static_cast<int64_t>(count),
                       [](uint64_t p) { return (p & kPresent) && (p & kAlone) && !(p & kOfFile); });
  }

 private:
  int file_;
  uintptr_t page_;
};

void move(uintptr_t begin, uintptr_t end) {
  auto* const data = reinterpret_cast<void*>(begin);
  if (madvise(data, end - begin, MADV_HUGEPAGE) == 0) madvise(data, end - begin, MADV_COLLAPSE);
}
#endif

// Moves the memory of a tensor to huge pages where possible. Its content and address stay.
void prefer_huge_pages(Tensor tensor) {
#ifdef __linux__
  if (tensor.numel() == 0 || !tensor.is_cpu() || !tensor.is_contiguous()) return;
  const auto data = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t first = (data + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (data + static_cast<uintptr_t>(tensor.numel()) * tensor.element_size()) /
                         kHugePage * kHugePage;
  const PageTable pages;
  const auto limit = Clock::now() + kLongest;
  for (uintptr_t at = first; at < last && Clock::now() < limit;) {
    const uintptr_t begin = at, most = std::min(last, at + kAtOnce);
    while (at < most && pages.has_alone(at)) at += kHugePage;
    if (begin < at) {
      move(begin, at);
    } else {
      at += kHugePage;
    }
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
