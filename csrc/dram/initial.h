// Initial rows: a function of (seed, table, key), equal on every device.
//
// All arithmetic is on integers, followed by one fp32 multiplication of an integer that is exact in fp32: a GPU
// computes the same bits. With t, s and bits(s, c) of random.h:
//   uniform, element i: u = bits(s, i) >> 40;                  w = fp32(2 u - (2^24 - 1)) * fp32(scale * 2^-24)
//   normal,  element i: n = sum of the twelve 16-bit words of bits(s, 3 i), bits(s, 3 i + 1), bits(s, 3 i + 2);
//                                                           w = fp32(n - 12 * 65535 / 2) * fp32(scale * 2^-16)
//   constant:                                               w = scale
// Uniform values are inside (-scale, scale); normal values have standard deviation `scale` (a sum of twelve uniforms,
// at most 6 deviations). The optimizer state is one constant. Quantized rows (codec.h) are these rows, encoded with
// step number 0. These functions never change: rows that are not stored yet depend on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dram/codec.h"

namespace thermocline {

enum class InitialKind : uint8_t { kConstant = 0, kUniform = 1, kNormal = 2 };

// Initial weights of the keys with these top 16 bits: one of several tables whose rows are stored together
// (embedding/merged_table.py).
struct InitialPart {
  uint16_t prefix;
  InitialKind kind;
  float scale;
};

struct Initial {
  InitialKind kind = InitialKind::kConstant;
  float scale = 0;
  float state = 0;  // every element of the optimizer state
  uint64_t seed = 0;
  uint64_t table = 0;
  std::vector<InitialPart> parts{};  // of unique prefixes; other keys have `kind` and `scale`
};

// Thread safety: all methods may run concurrently.
class InitialRows {
 public:
  InitialRows(const Initial& initial, const RowLayout& layout);
  // Writes the fp32 row.
  void write(uint64_t key, float* row) const;
  // Writes the stored form of the row.
  void store(uint64_t key, uint8_t* row) const;

 private:
  struct Weights {
    InitialKind kind;
    float factor;
  };
  const Weights& weights_of(uint64_t key) const { return weights_[index_.empty() ? 0 : index_[key >> 48]]; }

  float state_;
  Codec codec_;  // with the initial scale of the table: initial rows do not depend on when they are created
  std::vector<Weights> weights_;  // of the table, then of its parts
  std::vector<uint16_t> index_;   // by top 16 bits of a key: index in weights_; empty: there are no parts
};

}  // namespace thermocline
