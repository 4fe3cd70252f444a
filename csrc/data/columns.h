// Columns of values that are already in memory (Arrow), and what becomes of numbers: the same keys and features as the
// same values in a text file (parse.h).
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
  kLogSquare,  // x > 2: floor(ln(x)^2), else floor(x): the rule of Criteo's contest
};

// x -> [sign(x) log(1 + |x|)] -> (x - mean) * inverse_deviation -> float32, or the number of its bucket. In doubles, by
// arithmetic that gives the same bits on every machine.
struct NumberRule {
  bool log = false;
  double mean = 0;
  double inverse_deviation = 1;
  Bucket bucket = Bucket::kNone;
  double width = 0;
};

// Throws Error for a rule without sense (a width of zero, a mean that is not finite): names `column`.
void check_rule(const NumberRule& rule, std::string_view column);

// False: the result does not fit (float32, or a bucket number of 64 bits).
bool number_feature(const NumberRule& rule, double x, float& out);
bool number_bucket(const NumberRule& rule, double x, int64_t& out);

// What to_keys and to_dense do when a value is missing (`valid` 0, or NaN): the key of "", and 0. `valid` null: none
// is.
struct Validity {
  const uint8_t* valid;
  bool at(size_t i) const { return valid == nullptr || valid[i] != 0; }
};

// Value i is data[offsets[i], offsets[i + 1]). Offset: int32_t, int64_t. Throws when offsets leave the data.
template <typename Offset>
Grown<uint64_t> hash_strings(std::string_view field, const Offset* offsets, size_t n, const uint8_t* data, size_t bytes,
                             Validity valid);
// Number: int64_t, uint64_t, float, double.
template <typename Number>
Grown<uint64_t> hash_numbers(std::string_view field, const Number* values, size_t n, Validity valid);

// Throw for an infinite value or a result that does not fit; Bucket::kNone hashes the shortest text.
Grown<float> number_dense(const NumberRule& rule, const double* values, size_t n, Validity valid);
Grown<uint64_t> number_keys(std::string_view field, const NumberRule& rule, const double* values, size_t n,
                            Validity valid);

}  // namespace thermocline
