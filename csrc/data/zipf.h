// Zipf's law over up to 2^63 ranks: P(rank r) is proportional to (r + 1)^-exponent, r = 0 .. n - 1.
//
// Rejection sampling from a step function. The ranks (counted from 1) are divided into pieces: 1, 2, .. 7 alone, then
// four pieces of equal length per power of two. An alias table draws a piece with the weight it would have if all its
// ranks were as likely as its first. A rank is drawn uniformly inside it and accepted with probability
// (rank / first)^-exponent, which is at least 0.8^exponent. So every rank has its exact probability (up to rounding of
// doubles), at the same cost for any n; inversion in doubles would never return most ranks above 2^50. All arithmetic
// has the same bits on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "data/math.h"
#include "data/stream.h"

namespace thermocline {

// Thread safety: constant after construction.
class Zipf {
 public:
  static constexpr uint64_t kMaxRanks = uint64_t{1} << 63;
  static constexpr double kMaxExponent = 20;

  Zipf(uint64_t n, double exponent);

  uint64_t operator()(Stream& bits) const {
    for (;;) {
      const auto wide = static_cast<unsigned __int128>(bits()) * table_.size();
      auto piece = static_cast<uint32_t>(wide >> 64);
      const uint64_t cell = table_[piece];
      if (static_cast<uint64_t>(wide) >= (cell & ~kAliasMask)) piece = cell & kAliasMask;
      if (piece < kSingles) return piece;
      const uint32_t shift = shift_of(piece);
      const uint64_t first = first_of(piece);
      const uint64_t offset = bits() >> (64 - shift);
      if (offset > n_ - first) continue;
      const double x = static_cast<double>(offset) / static_cast<double>(first);  // rank / first - 1, below 1/4
      const double coin = bits.uniform();
      // (1 + x)^-s is convex: it is above its tangent at 0 and below its chord over the piece.
      if (coin < 1 - exponent_ * x) return first + offset - 1;
      if (coin >= 1 - chord_[quarter_of(piece)] * x) continue;
      if (coin < portable_exp(-exponent_ * portable_log(1 + x))) return first + offset - 1;
    }
  }

 private:
  static constexpr uint32_t kSingles = 7;
  static constexpr uint64_t kAliasMask = 0xff;  // there are at most 248 pieces

  static uint32_t quarter_of(uint32_t piece) { return (piece - 3) & 3; }
  static uint32_t shift_of(uint32_t piece) { return piece < kSingles ? 0 : (piece - 3) >> 2; }
  static uint64_t first_of(uint32_t piece) {
    return piece < kSingles ? piece + 1 : uint64_t{4 + quarter_of(piece)} << shift_of(piece);
  }

  uint64_t n_;
  double exponent_;
  double chord_[4];
  std::vector<uint64_t> table_;  // per piece: threshold of the fraction (high 56 bits), alias if not below it (low 8)
};

}  // namespace thermocline
