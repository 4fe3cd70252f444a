// Keys and features of columns in memory (Arrow), equal to those of the same values in a text file (parse.h), and the
// rules for numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "data/grown.h"

namespace thermocline {

enum class Bucket : uint8_t {
  kNone,       // the text itself is the value
  kWidth,      // floor(x / width)
  kLogSquare,  // x > 2: floor(ln(x)^2), else floor(x), as in the Criteo contest
};

// x -> [sign(x) log(1 + |x|)] -> (x - mean) * inverse_deviation -> float32 or bucket number. Computed in double with
// the same bits on every machine.
struct NumberRule {
  bool log = false;
  double mean = 0;
  double inverse_deviation = 1;
  Bucket bucket = Bucket::kNone;
  double width = 0;
};

// Throws Error for an invalid rule (a width of zero, a mean that is not finite); the message has `column`.
void check_rule(const NumberRule& rule, std::string_view column);

// False: the result is out of range of float32, or of a 64-bit bucket number.
bool number_feature(const NumberRule& rule, double x, float& out);
bool number_bucket(const NumberRule& rule, double x, int64_t& out);

// Mask of a column: valid[i] == 0 means that value i is missing; null: no value is. NaN is missing too. A missing value
// has the key of "" and the dense feature 0.
struct Validity {
  const uint8_t* valid;
  bool at(size_t i) const { return valid == nullptr || valid[i] != 0; }
};

// Value i is data[offsets[i], offsets[i + 1]). Offset: int32_t, int64_t. Throws Error if an offset is out of range.
template <typename Offset>
Grown<uint64_t> hash_strings(std::string_view field, const Offset* offsets, size_t n, const uint8_t* data, size_t bytes,
                             Validity valid);
// Number: int64_t, uint64_t, float, double.
template <typename Number>
Grown<uint64_t> hash_numbers(std::string_view field, const Number* values, size_t n, Validity valid);

// Throw Error for an infinite value or a result out of range. Bucket::kNone hashes the shortest text.
Grown<float> number_dense(const NumberRule& rule, const double* values, size_t n, Validity valid);
Grown<uint64_t> number_keys(std::string_view field, const NumberRule& rule, const double* values, size_t n,
                            Validity valid);

}  // namespace thermocline
