// Random bits as a function of (seed, index): every example has its own stream, and threads share no state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "util/hash.h"

namespace thermocline {

// Not thread-safe.
class Stream {
 public:
  Stream(uint64_t seed, uint64_t index) : state_(mix64((mix64(seed + kGolden) ^ index) + kGolden)) {}

  uint64_t operator()() {
    state_ += kGolden;
    return mix64(state_);
  }
  // Returns a number in [0, n), n > 0, with a bias below n / 2^64.
  uint64_t below(uint64_t n) { return static_cast<uint64_t>((static_cast<unsigned __int128>((*this)()) * n) >> 64); }
  // In [0, 1), 53 bits.
  double uniform() { return static_cast<double>((*this)() >> 11) * 0x1p-53; }
  // Mean 0, standard deviation 1, absolute value below 6: a sum of twelve uniform words, rounded once.
  float normal() {
    int32_t sum = 0;
    for (int i = 0; i < 3; ++i) {
      const uint64_t x = (*this)();
      sum += static_cast<int32_t>((x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48));
    }
    return static_cast<float>(sum - 6 * 65535) * 0x1p-16f;
  }

 private:
  static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
  uint64_t state_;
};

}  // namespace thermocline
