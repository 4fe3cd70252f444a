#include "mem/initial.h"

#include <algorithm>

#include "util/hash.h"

namespace thermocline {
namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

inline uint64_t bits(uint64_t row_mix, uint64_t counter) { return mix64(row_mix + (counter + 1) * kGolden); }

inline int32_t words(uint64_t x) {
  return static_cast<int32_t>((x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48));
}

// Powers of two: exact unless `scale` is so small that the product is denormal.
float factor_of(const Initial& initial) {
  switch (initial.kind) {
    case InitialKind::kConstant:
      return initial.scale;
    case InitialKind::kUniform:
      return initial.scale * 0x1p-24f;
    case InitialKind::kNormal:
      return initial.scale * 0x1p-16f;
  }
  return 0;
}

}  // namespace

InitialRows::InitialRows(const Initial& initial, const RowLayout& layout)
    : initial_(initial),
      layout_(layout),
      table_mix_(mix64((mix64(initial.seed + kGolden) ^ initial.table) + kGolden)),
      factor_(factor_of(initial)) {}

void InitialRows::write(uint64_t key, float* row) const {
  const uint64_t s = mix64((table_mix_ ^ key) + kGolden);
  const uint32_t dim = layout_.dim;
  switch (initial_.kind) {
    case InitialKind::kConstant:
      std::fill_n(row, dim, factor_);
      break;
    case InitialKind::kUniform:
      for (uint32_t i = 0; i < dim; ++i) {
        const auto u = static_cast<int32_t>(bits(s, i) >> 40);
        row[i] = static_cast<float>(2 * u - 0xffffff) * factor_;
      }
      break;
    case InitialKind::kNormal:
      for (uint32_t i = 0; i < dim; ++i) {
        const uint64_t c = uint64_t{3} * i;
        const int32_t n = words(bits(s, c)) + words(bits(s, c + 1)) + words(bits(s, c + 2));
        row[i] = static_cast<float>(n - 6 * 65535) * factor_;
      }
      break;
  }
  std::fill_n(row + dim, layout_.state_floats(), initial_.state);
}

}  // namespace thermocline
