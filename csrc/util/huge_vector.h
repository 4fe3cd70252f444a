// A vector whose memory is on huge pages if it is large: with 4 KiB pages, every random access would also miss the TLB.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>
#include <vector>

namespace thermocline {

template <typename T>
struct HugeAllocator {
  using value_type = T;
  static constexpr size_t kHugePage = 2u << 20;

  HugeAllocator() = default;
  template <typename U>
  HugeAllocator(const HugeAllocator<U>&) {}  // NOLINT(google-explicit-constructor): allocators convert

  T* allocate(size_t n) {
    if (n > (std::numeric_limits<size_t>::max() - kHugePage) / sizeof(T)) throw std::bad_alloc();
    size_t bytes = n * sizeof(T);
    if (bytes < kHugePage) return static_cast<T*>(::operator new(bytes));
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* p = std::aligned_alloc(kHugePage, bytes);
    if (p == nullptr) throw std::bad_alloc();
    ::madvise(p, bytes, MADV_HUGEPAGE);  // optional: a failure only costs speed
    return static_cast<T*>(p);
  }
  void deallocate(T* p, size_t n) {
    if (n * sizeof(T) < kHugePage) ::operator delete(p);
    else std::free(p);
  }
  friend bool operator==(const HugeAllocator&, const HugeAllocator&) { return true; }
};

template <typename T>
using HugeVector = std::vector<T, HugeAllocator<T>>;

}  // namespace thermocline
