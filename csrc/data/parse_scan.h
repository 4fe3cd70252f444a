// Where lines and fields end: positions of up to three bytes in a block, found a few KB ahead of the parser.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace thermocline {

// Writes first + the positions of all bytes of text[0, n) that are `a`, `b` or `c`, in order; returns how many. Reads
// nothing outside; `out` has room for n + kScanSlack. All implementations give the same.
using ScanFunction = size_t (*)(const char* text, size_t n, uint32_t first, char a, char b, char c, uint32_t* out);
inline constexpr size_t kScanSlack = 64;

size_t scan_base(const char* text, size_t n, uint32_t first, char a, char b, char c, uint32_t* out);
#if defined(__x86_64__) && defined(__GNUC__)
#define THERMOCLINE_SCAN_AVX2 1
// Only where the processor has AVX2.
size_t scan_avx2(const char* text, size_t n, uint32_t first, char a, char b, char c, uint32_t* out);
#endif

// The best this machine has; THERMOCLINE_ISA=base asks for the portable one.
ScanFunction best_scan();

// A cursor over the delimiters of one block of less than 4 GiB.
class Delimiters {
 public:
  // `line`: how many ahead() may be asked for.
  Delimiters(std::string_view block, char a, char b, char c, size_t line = 0)
      : begin_(block.data()),
        end_(block.data() + block.size()),
        scanned_(block.data()),
        scan_(best_scan()),
        a_(a),
        b_(b),
        c_(c),
        positions_(new uint32_t[line + kAhead + kScanSlack]) {}

  // The next delimiter, or the block's end.
  const char* next() {
    if (i_ == count_ && !refill()) [[unlikely]]
      return end_;
    return begin_ + positions_[i_++];
  }

  // The positions of the next `n`, which next() will give, relative to the block's begin; null: there are fewer. May be
  // written to.
  uint32_t* ahead(size_t n) {
    while (count_ - i_ < n) {
      if (!refill()) return nullptr;
    }
    return positions_.get() + i_;
  }
  void skip(size_t n) { i_ += n; }

  // From here on next() gives only delimiters at or after `p`.
  void seek(const char* p) {
    for (;;) {
      while (i_ < count_ && begin_ + positions_[i_] < p) ++i_;
      if (i_ < count_) return;
      if (p > scanned_) scanned_ = p;
      if (!refill()) return;
    }
  }

 private:
  static constexpr size_t kAhead = 4096;  // bytes: what is found in them stays in the L1 cache

  // Finds more; false: there are none.
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
