// Layout of a row: `dim` weights, as fp32 or as codes (codec.h), then the optimizer's fp32 state, then, if rows catch
// up (kernels.h), the number of the last step that the row includes, as uint32, then the statistics of the row
// (statistics.h). Stores contain these bytes: the layout never changes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

enum class Optimizer : uint8_t {
  kSgd = 0,                 // no state
  kAdagrad = 1,             // dim sums of squares
  kRowWiseAdagrad = 2,      // one sum of mean squares
  kAdam = 3,                // dim first moments, dim second moments
  kPartialRowWiseAdam = 4,  // dim first moments, one second moment
};

// Optimizers whose step has bias corrections, and which change rows without a gradient.
constexpr bool has_moments(Optimizer optimizer) {
  return optimizer == Optimizer::kAdam || optimizer == Optimizer::kPartialRowWiseAdam;
}

enum class WeightKind : uint8_t { kFp32 = 0, kFp16 = 1, kBf16 = 2, kInt = 3 };

// Stored form of the weights.
struct Precision {
  WeightKind kind = WeightKind::kFp32;
  uint8_t bits = 32;
  bool stochastic = false;  // stochastic rounding, else to nearest
  bool row_scaled = false;  // kInt: every row has a scale, its first word; else the table has one
  float scale = 0;          // kInt, not row_scaled: a weight is code * scale
  bool learned = false;     // kInt, not row_scaled: the scale has a gradient
};

// Statistics that a row may have, as bits of RowLayout::statistics; a row has them in this order.
enum Statistic : uint8_t {
  kFrequency = 1,  // uint32: occurrences, at most 2^32 - 1
  kLastStep = 2,   // uint32: number of the step that last changed the row
  kLastTime = 4,   // int64: event time of that step
  kShow = 8,       // float: decayed number of occurrences
  kClick = 16,     // float: decayed sum of labels
};

struct RowLayout {
  uint32_t dim;
  Optimizer optimizer;
  Precision precision{};
  bool catch_up = false;   // fp32 only
  uint8_t statistics = 0;  // bits of Statistic

  // Rows with kShow or kClick end with a uint32: the number of decays that both include.
  bool decays() const { return statistics & (kShow | kClick); }
  size_t statistics_words() const {
    const auto has = [this](Statistic s) { return size_t{(statistics & s) != 0}; };
    return has(kFrequency) + has(kLastStep) + 2 * has(kLastTime) + has(kShow) + has(kClick) + decays();
  }
  // Words of the state: the optimizer's floats and the last step.
  size_t state_floats() const { return optimizer_floats() + catch_up; }
  size_t optimizer_floats() const {
    switch (optimizer) {
      case Optimizer::kSgd:
        return 0;
      case Optimizer::kAdagrad:
        return dim;
      case Optimizer::kRowWiseAdagrad:
        return 1;
      case Optimizer::kAdam:
        return size_t{2} * dim;
      case Optimizer::kPartialRowWiseAdam:
        return size_t{dim} + 1;
    }
    return 0;
  }
  // Words after the weights: state and statistics, which codecs leave unchanged.
  size_t tail_words() const { return state_floats() + statistics_words(); }
  // Decoded row: weights, state and the words of the statistics.
  size_t floats() const { return dim + tail_words(); }
  // Stored row: whole words of four bytes.
  size_t weight_bytes() const {
    return (precision.row_scaled + (size_t{precision.bits} * dim + 31) / 32) * sizeof(uint32_t);
  }
  size_t bytes() const { return weight_bytes() + tail_words() * sizeof(float); }
};

// Bytes from row to row in memory, not in stores: rounded up to a multiple of 64 or 32 if that adds at most a 32nd, so
// that the weights of fewer rows begin near the end of a cache line.
inline size_t row_stride(size_t row_bytes) {
  for (size_t line : {64, 32}) {
    const size_t stride = (row_bytes + line - 1) / line * line;
    if ((stride - row_bytes) * 32 <= row_bytes) return stride;
  }
  return row_bytes;
}

}  // namespace thermocline
