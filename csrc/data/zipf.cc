#include "data/zipf.h"

#include <string>

#include "util/error.h"

namespace thermocline {

Zipf::Zipf(uint64_t n, double exponent) : n_(n), exponent_(exponent) {
  if (n < 1 || n > kMaxRanks)
    throw Error("Zipf: the number of ranks is " + std::to_string(n) + "; it must be 1 to 2^63");
  if (!(exponent >= 0 && exponent <= kMaxExponent)) {
    throw Error("Zipf: exponent is " + std::to_string(exponent) + "; it must be from 0 to 20");
  }
  for (int q = 0; q < 4; ++q) {
    const double width = 1.0 / (4 + q);
    chord_[q] = (1 - portable_exp(-exponent * portable_log(1 + width))) / width;
  }
  std::vector<double> weight;
  double total = 0;
  for (uint32_t piece = 0; first_of(piece) <= n; ++piece) {  // 2^63 is the first of the last one, number 247
    const double log_first = portable_log(static_cast<double>(first_of(piece)));
    weight.push_back(portable_exp(-exponent * log_first + shift_of(piece) * (kLn2High + kLn2Low)));
    total += weight.back();
  }
  // Vose's alias method: a cell below the mean weight is filled up from one above it.
  const size_t pieces = weight.size();
  std::vector<uint32_t> light, heavy;
  for (uint32_t i = 0; i < pieces; ++i) {
    weight[i] *= static_cast<double>(pieces) / total;
    (weight[i] < 1 ? light : heavy).push_back(i);
  }
  table_.resize(pieces);
  while (!light.empty() && !heavy.empty()) {
    const uint32_t i = light.back(), donor = heavy.back();
    light.pop_back();
    table_[i] = (static_cast<uint64_t>(weight[i] * 0x1p64) & ~kAliasMask) | donor;
    weight[donor] -= 1 - weight[i];
    if (weight[donor] < 1) {
      heavy.pop_back();
      light.push_back(donor);
    }
  }
  for (const auto& rest : {light, heavy}) {
    for (const uint32_t i : rest) table_[i] = ~kAliasMask | i;  // full: never takes an alias
  }
}

}  // namespace thermocline
