// A keyed bijection of the integers of some width: a random permutation of 2^64 columns without a table.
#pragma once

#include <cstdint>

#include "data/stream.h"

namespace thermocline {

// Rounds of xor with a key, multiplication by an odd number and xor with the upper half. Each step is invertible, so
// the whole is a bijection for every seed. At 64 bits two rounds between keys are Murmur3's finaliser. Thread safety:
// constant after construction.
class Permutation {
 public:
  // bits: 2 to 64. Tests use small widths to enumerate all numbers.
  explicit Permutation(uint64_t seed, int bits = 64)
      : mask_(bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1), shift_(bits / 2 + (bits > 2)) {
    Stream keys(seed, static_cast<uint64_t>(bits));
    for (uint64_t& key : keys_) key = keys() & mask_;
  }

  uint64_t operator()(uint64_t x) const {
    for (uint64_t key : keys_) {
      x ^= key;
      x ^= x >> shift_;
      x = (x * 0xff51afd7ed558ccdULL) & mask_;
      x ^= x >> shift_;
      x = (x * 0xc4ceb9fe1a85ec53ULL) & mask_;
      x ^= x >> shift_;
    }
    return x;
  }

 private:
  static constexpr int kKeys = 2;

  uint64_t mask_;
  int shift_;
  uint64_t keys_[kKeys];
};

}  // namespace thermocline
