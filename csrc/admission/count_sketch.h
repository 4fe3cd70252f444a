// A count-min sketch with conservative update: counts of any number of keys in fixed memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "util/hash.h"
#include "util/huge_buffer.h"

namespace thermocline {

// An estimate is never below the true count, up to the largest value of a cell. After N occurrences it exceeds the true
// count by more than e * N / width with probability at most e^-4; conservative update makes it smaller in practice.
class CountSketch {
 public:
  using Cell = uint16_t;
  static constexpr size_t kRows = 4;
  static constexpr uint32_t kMost = std::numeric_limits<Cell>::max();

  explicit CountSketch(size_t bytes)
      : width_(std::max<size_t>(1, bytes / (kRows * sizeof(Cell)))), memory_(kRows * width_ * sizeof(Cell)) {}

  size_t width() const { return width_; }
  size_t size() const { return kRows * width_; }
  size_t bytes() const { return memory_.size(); }
  Cell* cells() { return memory_.as<Cell>(); }
  const Cell* cells() const { return memory_.as<Cell>(); }

  void prefetch(uint64_t key) const {
    for (size_t cell : places(key)) __builtin_prefetch(cells() + cell);
  }

  // Adds one occurrence and returns the new estimate. changed(cell, before) is called for every cell that changes.
  template <typename Fn>
  uint32_t add(uint64_t key, Fn&& changed) {
    const auto at = places(key);
    uint32_t least = kMost;
    for (size_t cell : at) least = std::min<uint32_t>(least, cells()[cell]);
    if (least == kMost) return kMost;
    const auto now = static_cast<Cell>(least + 1);
    for (size_t cell : at) {
      if (cells()[cell] >= now) continue;
      changed(cell, cells()[cell]);
      cells()[cell] = now;
    }
    return now;
  }

 private:
  std::array<size_t, kRows> places(uint64_t key) const {
    std::array<size_t, kRows> at;
    uint64_t h = mem_hash(hash_key(key));
    for (size_t row = 0; row < kRows; ++row) {
      h = mix64(h + 0x9e3779b97f4a7c15ULL);
      at[row] = row * width_ + static_cast<size_t>((static_cast<unsigned __int128>(h) * width_) >> 64);
    }
    return at;
  }

  size_t width_;
  HugeBuffer memory_;
};

}  // namespace thermocline
