#include "dram/initial.h"

#include <algorithm>
#include <vector>

#include "dram/kernels.h"
#include "dram/random.h"

namespace thermocline {
namespace {

// Sum of the four 16-bit words.
inline int32_t sum_words(uint64_t x) {
  return static_cast<int32_t>((x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48));
}

// Multiplications by powers of two: exact unless the product is denormal.
float factor_of(InitialKind kind, float scale) {
  switch (kind) {
    case InitialKind::kConstant:
      return scale;
    case InitialKind::kUniform:
      return scale * 0x1p-24f;
    case InitialKind::kNormal:
      return scale * 0x1p-16f;
  }
  return 0;
}

}  // namespace

InitialRows::InitialRows(const Initial& initial, const RowLayout& layout)
    : state_(initial.state), codec_{layout, table_mix(initial.seed, initial.table)} {
  weights_.push_back({initial.kind, factor_of(initial.kind, initial.scale)});
  if (!initial.parts.empty()) index_.resize(size_t{1} << 16);
  for (const InitialPart& part : initial.parts) {
    index_[part.prefix] = static_cast<uint16_t>(weights_.size());
    weights_.push_back({part.kind, factor_of(part.kind, part.scale)});
  }
}

void InitialRows::store(uint64_t key, uint8_t* row) const {
  if (codec_.plain()) return write(key, reinterpret_cast<float*>(row));
  thread_local std::vector<float> floats;
  floats.resize(codec_.layout.floats());
  write(key, floats.data());
  encode_initial(codec_, key, floats.data(), row);
}

void InitialRows::write(uint64_t key, float* row) const {
  const uint64_t s = row_mix(codec_.table_mix, key);
  const uint32_t dim = codec_.layout.dim;
  const auto [kind, factor] = weights_of(key);
  switch (kind) {
    case InitialKind::kConstant:
      std::fill_n(row, dim, factor);
      break;
    case InitialKind::kUniform:
      for (uint32_t i = 0; i < dim; ++i) {
        const auto u = static_cast<int32_t>(counter_bits(s, i) >> 40);
        row[i] = static_cast<float>(2 * u - 0xffffff) * factor;
      }
      break;
    case InitialKind::kNormal:
      for (uint32_t i = 0; i < dim; ++i) {
        const uint64_t c = uint64_t{3} * i;
        const int32_t n =
            sum_words(counter_bits(s, c)) + sum_words(counter_bits(s, c + 1)) + sum_words(counter_bits(s, c + 2));
        row[i] = static_cast<float>(n - 6 * 65535) * factor;
      }
      break;
  }
  std::fill_n(row + dim, codec_.layout.optimizer_floats(), state_);
  // The last step, as of step 0, and statistics.
  std::fill_n(row + dim + codec_.layout.optimizer_floats(),
              codec_.layout.tail_words() - codec_.layout.optimizer_floats(), 0.0f);
}

}  // namespace thermocline
