// Keys of values: xxh64(value bytes, seed = xxh64(field name, 0)). Persisted in models: never to change.
//
// The value's bytes are its text in the file: what a CSV and a Parquet file of the same rows say alike gives the same
// key. Integers are their decimal text, booleans "0" and "1", a missing value is "". Floats without a fraction, up to
// 2^53, are the text of that integer (1.0 is "1", -0.0 is "0"), for integers with missing values often come as floats;
// other floats are the shortest text that reads back the same. Number features in buckets are the bucket's number as
// decimal text.
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

// The same for eight bytes, the length of most values of Criteo's files.
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
