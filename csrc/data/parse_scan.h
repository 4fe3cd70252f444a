// Positions of up to three delimiter bytes in a block, found a few KB ahead of the parser.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace thermocline {

// Writes `first` + position of every byte of text[0, n) that is `a`, `b` or `c`, in order, and returns their number.
// Reads no byte outside. `out` has n + kScanSlack elements. All implementations have the same result.
using ScanFunction = size_t (*)(const char* text, size_t n, uint32_t first, char a, char b, char c, uint32_t* out);
inline constexpr size_t kScanSlack = 64;

size_t scan_base(const char* text, size_t n, uint32_t first, char a, char b, char c, uint32_t* out);
#if defined(__x86_64__) && defined(__GNUC__)
#define THERMOCLINE_SCAN_AVX2 1
// Requires AVX2.
size_t scan_avx2(const char* text, size_t n, uint32_t first, char a, char b, char c, uint32_t* out);
#endif

// The fastest implementation of this machine; the portable one if THERMOCLINE_ISA=base.
ScanFunction best_scan();

// A cursor over the delimiters of one block of less than 4 GiB. Not thread-safe.
class Delimiters {
 public:
  // `line`: maximum argument of ahead().
  Delimiters(std::string_view block, char a, char b, char c, size_t line = 0)
      : begin_(block.data()),
        end_(block.data() + block.size()),
        scanned_(block.data()),
        scan_(best_scan()),
        a_(a),
        b_(b),
        c_(c),
        positions_(new uint32_t[line + kAhead + kScanSlack]) {}

  // Returns the next delimiter, or the end of the block.
  const char* next() {
    if (i_ == count_ && !refill()) [[unlikely]]
      return end_;
    return begin_ + positions_[i_++];
  }

  // Returns the positions, relative to the start of the block, of the next `n` delimiters; null: there are fewer. The
  // caller may write to the array.
  uint32_t* ahead(size_t n) {
    while (count_ - i_ < n) {
      if (!refill()) return nullptr;
    }
    return positions_.get() + i_;
  }
  void skip(size_t n) { i_ += n; }

  // Skips delimiters before `p`.
  void seek(const char* p) {
    for (;;) {
      while (i_ < count_ && begin_ + positions_[i_] < p) ++i_;
      if (i_ < count_) return;
      if (p > scanned_) scanned_ = p;
      if (!refill()) return;
    }
  }

 private:
  static constexpr size_t kAhead = 4096;  // bytes: their positions stay in the L1 cache

  // Scans further; false: no more delimiters.
  bool refill();

  const char* const begin_;
  const char* const end_;
  const char* scanned_;
  const ScanFunction scan_;
  const char a_, b_, c_;
  size_t i_ = 0, count_ = 0;
  const std::unique_ptr<uint32_t[]> positions_;
};

}  // namespace thermocline
