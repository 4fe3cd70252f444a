// Keys of values: xxh64(value bytes, seed = xxh64(field name, 0)). Persisted in models: these functions never change.
//
// The bytes of a value are its text, so that a CSV and a Parquet file with the same rows have the same keys. Integers:
// decimal text. Booleans: "0" and "1". Missing values: "". Floats without a fraction, up to 2^53: the text of the
// integer (1.0 is "1", -0.0 is "0"), because integer columns with missing values are often stored as floats. Other
// floats: the shortest text with the same value. Bucketed numbers: the bucket number as decimal text.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "util/hash.h"

namespace thermocline {

inline uint64_t field_seed(std::string_view field) { return xxh64(field.data(), field.size(), 0); }

inline uint64_t hash_value(const char* p, size_t n, uint64_t seed) { return xxh64(p, n, seed); }

// hash_value() of eight bytes, the length of most values of the Criteo data.
inline uint64_t hash_eight(uint64_t word, uint64_t seed) { return xxh64(&word, 8, seed); }

template <typename Number>  // integers, float, double
uint64_t hash_number(Number number, uint64_t seed) {
  if constexpr (std::is_floating_point_v<Number>) {
    if (number >= Number{-0x1p53} && number <= Number{0x1p53} && number == std::trunc(number)) {
      return hash_number(static_cast<int64_t>(number), seed);
    }
  }
  char text[32];
  const char* end = std::to_chars(text, text + sizeof text, number).ptr;
  return hash_value(text, static_cast<size_t>(end - text), seed);
}

}  // namespace thermocline
