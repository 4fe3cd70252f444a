// An array of numbers with as many bits each as the largest one needs.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "util/recycled.h"

namespace thermocline {

// Thread safety: constant after construction, except for store_block().
class PackedArray {
 public:
  static constexpr size_t kBlock = 64;  // numbers that occupy whole words

  PackedArray() = default;
  // n numbers up to `most`, set by store_block().
  PackedArray(size_t n, uint32_t most)
      : width_(static_cast<uint32_t>(std::bit_width(most | 1u))),
        mask_((uint64_t{1} << width_) - 1),
        count_((n + kBlock - 1) / kBlock * width_ + 1),  // one word more: operator[] reads eight bytes
        words_(count_) {
    words_[count_ - 1] = 0;
  }

  // The bytes are those of a little-endian machine.
  uint32_t operator[](size_t i) const {
    const size_t bit = i * width_;
    uint64_t word;
    std::memcpy(&word, reinterpret_cast<const uint8_t*>(words_.get()) + bit / 8, sizeof(word));
    return static_cast<uint32_t>(word >> bit % 8 & mask_);
  }

  // Sets the numbers kBlock * block .. + n - 1; n < kBlock only for the last block. Blocks may be set concurrently.
  void store_block(size_t block, const uint32_t* numbers, size_t n) {
    uint64_t* out = words_.get() + block * width_;
    uint64_t* const end = out + width_;
    uint64_t word = 0;
    uint32_t filled = 0;
    for (size_t i = 0; i < n; ++i) {
      word |= uint64_t{numbers[i]} << filled;
      filled += width_;
      if (filled < 64) continue;
      *out++ = word;
      filled -= 64;
      word = filled ? uint64_t{numbers[i]} >> (width_ - filled) : 0;
    }
    for (; out < end; word = 0) *out++ = word;
  }

  size_t bytes() const { return count_ * sizeof(uint64_t); }

 private:
  uint32_t width_ = 1;
  uint64_t mask_ = 1;
  size_t count_ = 0;  // words
  Recycled<uint64_t> words_;
};

}  // namespace thermocline
