// What a row is: `dim` fp32 weights, then the optimizer's fp32 state. Row bytes are kept in stores: never change this.
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

struct RowLayout {
  uint32_t dim;
  Optimizer optimizer;

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
  size_t floats() const { return dim + state_floats(); }
  size_t bytes() const { return floats() * sizeof(float); }
};

}  // namespace thermocline
