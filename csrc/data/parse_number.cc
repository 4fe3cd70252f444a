#include "data/parse_number.h"

#include <charconv>
#include <cmath>

namespace thermocline {
namespace {

bool is_digit(char c) { return static_cast<uint8_t>(c - '0') < 10; }

constexpr double kPowers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                              1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

}  // namespace

NumberStatus parse_number(const char* p, const char* end, double& out) {
  while (p < end && *p == ' ') ++p;
  while (p < end && end[-1] == ' ') --end;
  if (p == end) return NumberStatus::kMissing;
  const bool negative = *p == '-';
  if (*p == '-' || *p == '+') ++p;
  const char* const begin = p;

  uint64_t mantissa = 0;
  int64_t digits = 0, significant = 0, fraction = 0;
  int64_t leading = 0;  // exponent of the first nonzero digit: 10^leading
  bool point = false;
  for (; p < end; ++p) {
    if (*p == '.') {
      if (point) return NumberStatus::kNotANumber;
      point = true;
      continue;
    }
    if (!is_digit(*p)) break;
    ++digits;
    fraction += point;
    if (significant > 0 || *p != '0') {
      if (significant == 0) leading = -fraction;
      if (significant < 19) mantissa = mantissa * 10 + static_cast<uint64_t>(*p - '0');
      ++significant;
    }
  }
  if (digits == 0) return NumberStatus::kNotANumber;
  if (significant > 0 && leading == 0) leading = significant - 1 - fraction;
  int64_t exponent = 0;
  if (p < end) {
    if (*p != 'e' && *p != 'E') return NumberStatus::kNotANumber;
    ++p;
    const bool down = p < end && *p == '-';
    if (p < end && (*p == '-' || *p == '+')) ++p;
    if (p == end) return NumberStatus::kNotANumber;
    for (; p < end; ++p) {
      if (!is_digit(*p)) return NumberStatus::kNotANumber;
      if (exponent < 1'000'000'000) exponent = exponent * 10 + (*p - '0');
    }
    if (down) exponent = -exponent;
  }

  double value = 0;
  if (significant == 0) {
    value = 0;
  } else if (significant <= 15 && exponent == 0 && fraction <= 22) {
    value = static_cast<double>(mantissa) / kPowers[fraction];  // both exact, so rounded once
  } else if (leading + exponent > 310) {
    return NumberStatus::kOutOfRange;
  } else if (leading + exponent >= -330) {
    const auto result = std::from_chars(begin, end, value);
    if (result.ec == std::errc::result_out_of_range) {
      if (leading + exponent > 0) return NumberStatus::kOutOfRange;
      value = 0;
    } else if (!std::isfinite(value)) {
      return NumberStatus::kOutOfRange;
    }
  }
  out = negative ? -value : value;
  return NumberStatus::kOk;
}

NumberStatus parse_float(const char* p, const char* end, float& out) {
  double value = 0;
  const NumberStatus status = parse_number(p, end, value);
  if (status != NumberStatus::kOk) return status;
  out = static_cast<float>(value);
  return std::isfinite(out) ? NumberStatus::kOk : NumberStatus::kOutOfRange;
}

NumberStatus parse_key(const char* p, const char* end, uint64_t& out) {
  if (p == end) return NumberStatus::kMissing;
  const auto n = static_cast<size_t>(end - p);
  uint32_t low = 0;
  if (n <= 8) {
    if (!parse_up_to_8(p, n, end, low)) return NumberStatus::kNotANumber;
    out = low;
    return NumberStatus::kOk;
  }
  uint64_t value = 0;
  bool overflow = false;
  while (end - p > 8) {
    const size_t step = (end - p) % 8 == 0 ? 8 : static_cast<size_t>((end - p) % 8);
    if (!parse_up_to_8(p, step, end, low)) return NumberStatus::kNotANumber;
    uint64_t scale = 1;
    for (size_t i = 0; i < step; ++i) scale *= 10;
    overflow |= __builtin_mul_overflow(value, scale, &value) | __builtin_add_overflow(value, low, &value);
    p += step;
  }
  if (!parse_up_to_8(p, 8, end, low)) return NumberStatus::kNotANumber;
  overflow |= __builtin_mul_overflow(value, uint64_t{100'000'000}, &value) | __builtin_add_overflow(value, low, &value);
  if (overflow) return NumberStatus::kOutOfRange;
  out = value;
  return NumberStatus::kOk;
}

}  // namespace thermocline
