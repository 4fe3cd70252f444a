// The row of a key that was never trained: a function of (seed, table, key), the same on every device.
//
// All arithmetic is on integers until one last fp32 multiplication, and that integer is exact in fp32: a GPU gives the
// same bits. With t, s and bits(s, c) of random.h:
//   uniform, element i: u = bits(s, i) >> 40;                  w = fp32(2 u - (2^24 - 1)) * fp32(scale * 2^-24)
//   normal,  element i: n = sum of the twelve 16-bit words of bits(s, 3 i), bits(s, 3 i + 1), bits(s, 3 i + 2);
//                                                           w = fp32(n - 12 * 65535 / 2) * fp32(scale * 2^-16)
//   constant:                                               w = scale
// Uniform lies inside (-scale, scale); normal has deviation `scale` (a sum of twelve uniforms reaches 6 deviations).
// Optimizer state begins as one constant. Rows of codes (codec.h) are these rows, encoded as by step 0. These functions
// never change: rows not yet stored depend on them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dram/codec.h"

namespace thermocline {

enum class InitialKind : uint8_t { kConstant = 0, kUniform = 1, kNormal = 2 };

struct Initial {
  InitialKind kind = InitialKind::kConstant;
  float scale = 0;
  float state = 0;  // every element of the optimizer state
  uint64_t seed = 0;
  uint64_t table = 0;
};

// Writes whole rows: thread-safe, no state.
class InitialRows {
 public:
  InitialRows(const Initial& initial, const RowLayout& layout);
  // As fp32, before it is encoded.
  void write(uint64_t key, float* row) const;
  // As it is stored.
  void store(uint64_t key, uint8_t* row) const;

 private:
  Initial initial_;
  Codec codec_;  // with the step a table began with: what rows begin with does not depend on when
  float factor_;
};

}  // namespace thermocline
