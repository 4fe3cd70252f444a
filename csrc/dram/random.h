// Counter-based random bits from (seed, table, key), equal on every device (src/thermocline/kernels/random.py). With
// mix64 of util/hash.h and G = 0x9e3779b97f4a7c15, modulo 2^64:
//   t = mix64((mix64(seed + G) ^ table) + G)      once per table
//   s = mix64((t ^ key) + G)                      once per row
//   bits(s, c) = mix64(s + (c + 1) * G)           a counter c
// These functions never change: initial rows and rounding depend on them.
#pragma once

#include <cstdint>

#include "util/hash.h"

namespace thermocline {

inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

inline constexpr uint64_t table_mix(uint64_t seed, uint64_t table) {
  return mix64((mix64(seed + kGolden) ^ table) + kGolden);
}
// Also the stream of a row in one training step: row_mix(row_mix(t, key), step).
inline constexpr uint64_t row_mix(uint64_t mix, uint64_t key) { return mix64((mix ^ key) + kGolden); }
inline constexpr uint64_t counter_bits(uint64_t mix, uint64_t counter) { return mix64(mix + (counter + 1) * kGolden); }

}  // namespace thermocline
