// Large zeroed memory from mmap, on huge pages if available: rows are accessed at random, and with 4 KiB pages every
// access would also miss the TLB.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace thermocline {

class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    // A mapping is aligned to 4 KiB only: map one huge page more, so that data_ can start on a huge page.
    mapped_ = bytes >= kHugePage ? bytes + kHugePage : bytes;
    void* p = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<uint8_t*>(p);
    data_ = base_;
    if (mapped_ != bytes) {
      data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(base_) + kHugePage - 1) / kHugePage * kHugePage);
      ::madvise(data_, bytes, MADV_HUGEPAGE);  // optional: a failure only costs speed
    }
  }
  HugeBuffer(HugeBuffer&& other) noexcept { *this = std::move(other); }
  HugeBuffer& operator=(HugeBuffer&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  ~HugeBuffer() {
    if (base_) ::munmap(base_, mapped_);
  }

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return bytes_; }

 private:
  static constexpr size_t kHugePage = 2u << 20;
  uint8_t* base_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  size_t mapped_ = 0;
};

}  // namespace thermocline
