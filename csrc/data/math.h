// exp and log with the same bits on every machine, within 2 ulp: plain double arithmetic. The last bit of libm differs
// between versions and between processors with and without FMA.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace thermocline {

inline constexpr double kLn2High = 0x1.62e42fee00000p-1;  // 32 bits: exact when multiplied by an exponent
inline constexpr double kLn2Low = 0x1.a39ef35793c76p-33;

// x is positive, finite and not denormal.
inline double portable_log(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  auto m = std::bit_cast<double>((bits & 0x000fffffffffffffULL) | 0x3ff0000000000000ULL);
  if (m > 0x1.6a09e667f3bcdp+0) {  // sqrt(2): m stays near 1
    m *= 0.5;
    ++exponent;
  }
  const double t = (m - 1) / (m + 1), t2 = t * t;  // log m = 2 atanh t, |t| < 0.172
  double sum = 1.0 / 23;
  for (int odd = 21; odd >= 3; odd -= 2) sum = sum * t2 + 1.0 / odd;
  const double log_m = 2 * t + 2 * t * t2 * sum;
  return exponent * kLn2High + (exponent * kLn2Low + log_m);
}

inline double portable_exp(double x) {
  if (x < -708) return 0;
  if (x > 709) return std::numeric_limits<double>::infinity();
  const int k = static_cast<int>(x * 0x1.71547652b82fep+0 + (x < 0 ? -0.5 : 0.5));
  const double r = (x - k * kLn2High) - k * kLn2Low;  // |r| < 0.347
  constexpr double kInverseFactorial[] = {
      1,         1,          1. / 2,      1. / 6,       1. / 24,       1. / 120,       1. / 720,
      1. / 5040, 1. / 40320, 1. / 362880, 1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
  double sum = kInverseFactorial[13];
  for (int i = 12; i >= 0; --i) sum = sum * r + kInverseFactorial[i];
  return sum * std::bit_cast<double>(static_cast<uint64_t>(1023 + k) << 52);
}

}  // namespace thermocline
