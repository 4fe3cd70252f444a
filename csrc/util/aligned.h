// Page-aligned memory for O_DIRECT.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#include "util/fs.h"

namespace thermocline {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes) : bytes_((bytes + kSector - 1) / kSector * kSector) {
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kSector, bytes_));
    if (!data_) throw std::bad_alloc();
  }
  AlignedBuffer(AlignedBuffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
    other.bytes_ = 0;
  }
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~AlignedBuffer() { std::free(data_); }

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace thermocline
