#include "data/columns.h"

#include <cmath>
#include <limits>
#include <string>

#include "data/hash_value.h"
#include "data/math.h"
#include "util/error.h"

namespace thermocline {
namespace {

// log(1 + x) for x >= 0. The quotient undoes the rounding of 1 + x.
double portable_log1p(double x) {
  const double u = 1 + x;
  if (u == 1) return x;
  return std::isfinite(u) ? portable_log(u) * (x / (u - 1)) : u;
}

double transformed(const NumberRule& rule, double x) {
  if (rule.log) x = std::copysign(portable_log1p(std::fabs(x)), x);
  return (x - rule.mean) * rule.inverse_deviation;
}

[[noreturn]] void does_not_fit(std::string_view what, size_t i, double x) {
  throw Error(std::string(what) + ": value " + std::to_string(i) + " of the column, " + std::to_string(x) +
              ", is infinite or too large for its feature");
}

}  // namespace

void check_rule(const NumberRule& rule, std::string_view column) {
  const auto bad = [&](const char* what, double value) {
    throw Error("column \"" + std::string(column) + "\": " + what + ", not " + std::to_string(value));
  };
  if (!std::isfinite(rule.mean)) bad("the mean must be finite", rule.mean);
  if (!std::isfinite(rule.inverse_deviation)) bad("the inverse deviation must be finite", rule.inverse_deviation);
  if (rule.bucket == Bucket::kWidth && !(rule.width > 0 && std::isfinite(rule.width))) {
    bad("a bucket's width must be positive", rule.width);
  }
}

bool number_feature(const NumberRule& rule, double x, float& out) {
  out = static_cast<float>(transformed(rule, x));
  return std::isfinite(out);
}

bool number_bucket(const NumberRule& rule, double x, int64_t& out) {
  x = transformed(rule, x);
  if (rule.bucket == Bucket::kWidth) {
    x /= rule.width;
  } else if (x > 2 && std::isfinite(x)) {
    const double log = portable_log(x);
    x = log * log;
  }
  x = std::floor(x);
  if (!(x >= -0x1p63 && x < 0x1p63)) return false;
  out = static_cast<int64_t>(x);
  return true;
}

template <typename Offset>
Grown<uint64_t> hash_strings(std::string_view field, const Offset* offsets, size_t n, const uint8_t* data, size_t bytes,
                             Validity valid) {
  const uint64_t seed = field_seed(field), missing = hash_value("", 0, seed);
  Grown<uint64_t> keys(n);
  for (size_t i = 0; i < n; ++i) {
    const Offset begin = offsets[i], end = offsets[i + 1];
    if (begin < 0 || end < begin || static_cast<uint64_t>(end) > bytes) {
      throw Error("column \"" + std::string(field) + "\": the offsets of value " + std::to_string(i) + ", " +
                  std::to_string(begin) + " to " + std::to_string(end) + ", leave its " + std::to_string(bytes) +
                  " bytes of data");
    }
    keys[i] = valid.at(i) && begin < end
                  ? hash_value(reinterpret_cast<const char*>(data) + begin, static_cast<size_t>(end - begin), seed)
                  : missing;
  }
  return keys;
}

template <typename Number>
Grown<uint64_t> hash_numbers(std::string_view field, const Number* values, size_t n, Validity valid) {
  const uint64_t seed = field_seed(field), missing = hash_value("", 0, seed);
  Grown<uint64_t> keys(n);
  for (size_t i = 0; i < n; ++i) {
    keys[i] = valid.at(i) && values[i] == values[i] ? hash_number(values[i], seed) : missing;
  }
  return keys;
}

Grown<float> number_dense(const NumberRule& rule, const double* values, size_t n, Validity valid) {
  check_rule(rule, "dense");
  Grown<float> out(n);
  for (size_t i = 0; i < n; ++i) {
    if (!valid.at(i) || std::isnan(values[i])) {
      out[i] = 0;
    } else if (!number_feature(rule, values[i], out[i])) {
      does_not_fit("dense number", i, values[i]);
    }
  }
  return out;
}

Grown<uint64_t> number_keys(std::string_view field, const NumberRule& rule, const double* values, size_t n,
                            Validity valid) {
  check_rule(rule, field);
  if (rule.bucket == Bucket::kNone) return hash_numbers(field, values, n, valid);
  const uint64_t seed = field_seed(field), missing = hash_value("", 0, seed);
  Grown<uint64_t> keys(n);
  for (size_t i = 0; i < n; ++i) {
    int64_t bucket = 0;
    if (!valid.at(i) || std::isnan(values[i])) {
      keys[i] = missing;
    } else if (number_bucket(rule, values[i], bucket)) {
      keys[i] = hash_number(bucket, seed);
    } else {
      does_not_fit("column \"" + std::string(field) + "\"", i, values[i]);
    }
  }
  return keys;
}

template Grown<uint64_t> hash_strings(std::string_view, const int32_t*, size_t, const uint8_t*, size_t, Validity);
template Grown<uint64_t> hash_strings(std::string_view, const int64_t*, size_t, const uint8_t*, size_t, Validity);
template Grown<uint64_t> hash_numbers(std::string_view, const int64_t*, size_t, Validity);
template Grown<uint64_t> hash_numbers(std::string_view, const uint64_t*, size_t, Validity);
template Grown<uint64_t> hash_numbers(std::string_view, const float*, size_t, Validity);
template Grown<uint64_t> hash_numbers(std::string_view, const double*, size_t, Validity);

}  // namespace thermocline
