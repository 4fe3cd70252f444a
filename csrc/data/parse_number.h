// Parsing of numbers: [+-] digits [. digits] [e [+-] digits], with a digit before or after the point; surrounding
// spaces are allowed. No hexadecimal, "inf", "nan" or locale.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace thermocline {

enum class NumberStatus : uint8_t { kOk, kMissing, kNotANumber, kOutOfRange };

// kMissing: only spaces. kOutOfRange: larger than any double. Numbers that are too small become zero.
NumberStatus parse_number(const char* p, const char* end, double& out);

// Parses a float32; kOutOfRange if the number is too large for it.
NumberStatus parse_float(const char* p, const char* end, float& out);

// Loads eight bytes at p, the first byte lowest. Bytes at or after `limit` are not read; they are zero.
inline uint64_t load_word(const char* p, const char* limit) {
  uint64_t word = 0;
  if (limit - p >= 8) [[likely]] {
    std::memcpy(&word, p, 8);
  } else {
    std::memcpy(&word, p, static_cast<size_t>(limit - p));
  }
  return word;
}

// The first nonzero byte of the result is the first byte that is not a decimal digit; later bytes are undefined.
inline uint64_t non_digits(uint64_t word) {
  constexpr uint64_t kHigh = 0xf0f0f0f0f0f0f0f0ULL, kSix = 0x0606060606060606ULL, kThree = 0x3333333333333333ULL;
  return ((word & kHigh) | (((word + kSix) & kHigh) >> 4)) ^ kThree;
}

// The value of eight decimal digits.
inline uint32_t eight_digits(uint64_t word) {
  word -= 0x3030303030303030ULL;
  word = word * 10 + (word >> 8);
  constexpr uint64_t kMask = 0x000000ff000000ffULL;
  return static_cast<uint32_t>(
      ((word & kMask) * 0x000f424000000064ULL + ((word >> 16) & kMask) * 0x0000271000000001ULL) >> 32);
}

// Parses the n <= 8 digits at p; n = 0 is the number 0. `limit` as in load_word. No branch depends on n.
inline bool parse_up_to_8(const char* p, size_t n, const char* limit, uint32_t& out) {
  const size_t half = 4 * (8 - n), rest = 4 * n;  // two shifts each: a shift by 64 bits is undefined
  const uint64_t zeros = 0x3030303030303030ULL >> rest >> rest;
  const uint64_t word = load_word(p, limit) << half << half | zeros;
  if (non_digits(word) != 0) return false;
  out = eight_digits(word);
  return true;
}

// Number of decimal digits at the start of [p, end); `limit` as in load_word.
inline size_t leading_digits(const char* p, const char* end, const char* limit) {
  const char* q = p;
  for (;;) {
    const uint64_t other = non_digits(load_word(q, limit));
    if (other != 0) {
      q += std::countr_zero(other) / 8;
      return static_cast<size_t>((q < end ? q : end) - p);
    }
    q += 8;
    if (q >= end) return static_cast<size_t>(end - p);
  }
}

// Parses a key: only decimal digits, at least one, a value below 2^64; else kMissing, kNotANumber or kOutOfRange.
NumberStatus parse_key(const char* p, const char* end, uint64_t& out);

}  // namespace thermocline
