// Where lines and fields end: positions of up to three bytes in a block, found a few KB ahead of the parser.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace thermocline {

// Writes the positions of all bytes of text[0, n) that are `a`, `b` or `c`, in order; returns how many. Reads nothing
// outside; `out` has room for n + kScanSlack. All implementations give the same.
using ScanFunction = size_t (*)(const char* text, size_t n, char a, char b, char c, uint32_t* out);
inline constexpr size_t kScanSlack = 64;

size_t scan_base(const char* text, size_t n, char a, char b, char c, uint32_t* out);
#if defined(__x86_64__) && defined(__GNUC__)
#define THERMOCLINE_SCAN_AVX2 1
// Only where the processor has AVX2.
size_t scan_avx2(const char* text, size_t n, char a, char b, char c, uint32_t* out);
#endif

// The best this machine has; THERMOCLINE_ISA=base asks for the portable one.
ScanFunction best_scan();

// A cursor over the delimiters of one block.
class Delimiters {
 public:
  Delimiters(std::string_view block, char a, char b, char c)
      : scanned_(block.data()), end_(block.data() + block.size()), scan_(best_scan()), a_(a), b_(b), c_(c) {}

  // The next delimiter, or the block's end.
  const char* next() {
    if (i_ == count_ && !refill()) [[unlikely]]
      return end_;
    return base_ + positions_[i_++];
  }

  // From here on next() gives only delimiters at or after `p`.
  void seek(const char* p) {
    for (;;) {
      while (i_ < count_ && base_ + positions_[i_] < p) ++i_;
      if (i_ < count_) return;
      if (p > scanned_) scanned_ = p;
      if (!refill()) return;
    }
  }

 private:
  static constexpr size_t kAhead = 4096;  // positions stay in the L1 cache

  bool refill();

  const char* base_ = nullptr;
  const char* scanned_;
  const char* const end_;
  const ScanFunction scan_;
  const char a_, b_, c_;
  size_t i_ = 0, count_ = 0;
  uint32_t positions_[kAhead + kScanSlack];
};

}  // namespace thermocline
