// What a row is: `dim` weights, as fp32 or as codes (codec.h), then the optimizer's fp32 state. Row bytes are kept in
// stores: never change this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

enum class Optimizer : uint8_t {
  kSgd = 0,             // no state
  kAdagrad = 1,         // dim sums of squares
  kRowWiseAdagrad = 2,  // one sum of mean squares
  kAdam = 3,            // dim first moments, dim second moments
};

enum class WeightKind : uint8_t { kFp32 = 0, kFp16 = 1, kBf16 = 2, kInt = 3 };

// How weights are stored.
struct Precision {
  WeightKind kind = WeightKind::kFp32;
  uint8_t bits = 32;
  bool stochastic = false;  // rounded by chance, else to the nearest
  bool row_scaled = false;  // kInt: every row has a step of its own, its first word; else the table has one
  float step = 0;           // kInt, not row_scaled: what a code is multiplied by
  bool learned = false;     // likewise: the step has a gradient
};

struct RowLayout {
  uint32_t dim;
  Optimizer optimizer;
  Precision precision{};

  size_t state_floats() const {
    switch (optimizer) {
      case Optimizer::kSgd:
        return 0;
      case Optimizer::kAdagrad:
        return dim;
      case Optimizer::kRowWiseAdagrad:
        return 1;
      case Optimizer::kAdam:
        return size_t{2} * dim;
    }
    return 0;
  }
  // Of a row as training sees it.
  size_t floats() const { return dim + state_floats(); }
  // Of a row as it is stored: whole words of four bytes.
  size_t weight_bytes() const {
    return (precision.row_scaled + (size_t{precision.bits} * dim + 31) / 32) * sizeof(uint32_t);
  }
  size_t bytes() const { return weight_bytes() + state_floats() * sizeof(float); }
};

}  // namespace thermocline
