#include "data/parse_scan.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

#include "util/cpu.h"

#ifdef THERMOCLINE_SCAN_AVX2
#include <immintrin.h>
#endif

namespace thermocline {
namespace {

constexpr uint64_t repeat(char byte) { return 0x0101010101010101ULL * static_cast<uint8_t>(byte); }

// 0x80 in every byte of x that is zero. Exact: no borrow propagates to the next byte.
constexpr uint64_t zero_bytes(uint64_t x) {
  constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7fULL;
  return ~(((x & kLow) + kLow) | x | kLow);
}

}  // namespace

size_t scan_base(const char* text, size_t n, uint32_t first, char a, char b, char c, uint32_t* out) {
  const uint64_t pa = repeat(a), pb = repeat(b), pc = repeat(c);
  uint32_t* o = out;
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t word;
    std::memcpy(&word, text + i, 8);
    for (uint64_t hits = zero_bytes(word ^ pa) | zero_bytes(word ^ pb) | zero_bytes(word ^ pc); hits; hits &= hits - 1)
      *o++ = first + static_cast<uint32_t>(i + static_cast<size_t>(std::countr_zero(hits)) / 8);
  }
  for (; i < n; ++i) {
    if (text[i] == a || text[i] == b || text[i] == c) *o++ = first + static_cast<uint32_t>(i);
  }
  return static_cast<size_t>(o - out);
}

#ifdef THERMOCLINE_SCAN_AVX2
__attribute__((target("avx2,bmi,popcnt"))) size_t scan_avx2(const char* text, size_t n, uint32_t first, char a, char b,
                                                            char c, uint32_t* out) {
  const __m256i va = _mm256_set1_epi8(a), vb = _mm256_set1_epi8(b), vc = _mm256_set1_epi8(c);
  uint32_t* o = out;
  for (size_t i = 0; i < n; i += 64) {
    alignas(32) char tail[64];
    const char* p = text + i;
    if (n - i < 64) {
      std::memcpy(tail, p, n - i);
      p = tail;
    }
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    const __m256i hx =
        _mm256_or_si256(_mm256_or_si256(_mm256_cmpeq_epi8(x, va), _mm256_cmpeq_epi8(x, vb)), _mm256_cmpeq_epi8(x, vc));
    const __m256i hy =
        _mm256_or_si256(_mm256_or_si256(_mm256_cmpeq_epi8(y, va), _mm256_cmpeq_epi8(y, vb)), _mm256_cmpeq_epi8(y, vc));
    uint64_t hits = static_cast<uint32_t>(_mm256_movemask_epi8(hx)) |
                    static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(hy))) << 32;
    if (n - i < 64) hits &= (uint64_t{1} << (n - i)) - 1;
    const auto found = static_cast<size_t>(_mm_popcnt_u64(hits));
    const uint32_t at = first + static_cast<uint32_t>(i);
    // Eight at a time without a branch per hit: elements after `found` are overwritten or never read.
    for (size_t k = 0; k < found; k += 8) {
      for (size_t j = 0; j < 8; ++j) {
        o[k + j] = at + static_cast<uint32_t>(_tzcnt_u64(hits));
        hits = _blsr_u64(hits);
      }
    }
    o += found;
  }
  return static_cast<size_t>(o - out);
}
#endif

ScanFunction best_scan() {
  static const ScanFunction best = [] {
#ifdef THERMOCLINE_SCAN_AVX2
    const char* requested = std::getenv("THERMOCLINE_ISA");
    const bool base = requested && std::string_view(requested) == "base";
    const CpuFeatures& cpu = cpu_features();
    if (!base && cpu.avx2 && cpu.bmi && cpu.popcnt) return &scan_avx2;
#endif
    return &scan_base;
  }();
  return best;
}

bool Delimiters::refill() {
  std::copy(positions_.get() + i_, positions_.get() + count_, positions_.get());
  count_ -= i_;
  i_ = 0;
  const size_t before = count_;
  while (scanned_ < end_ && count_ == before) {
    const size_t n = std::min(kAhead, static_cast<size_t>(end_ - scanned_));
    count_ += scan_(scanned_, n, static_cast<uint32_t>(scanned_ - begin_), a_, b_, c_, positions_.get() + count_);
    scanned_ += n;
  }
  return count_ > before;
}

}  // namespace thermocline
