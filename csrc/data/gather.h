// Examples of several parsed blocks in any order: shuffling, and cutting into batches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "data/grown.h"

namespace thermocline {

// The arrays of parse.h's Parsed, wherever they are.
struct Examples {
  const uint64_t* ids;
  size_t id_count;
  const int64_t* offsets;  // [examples * fields + 1]
  const float* weights;    // or null: all are 1
  const float* dense;
  const float* labels;
  size_t examples;
};

struct Gathered {
  Grown<uint64_t> ids;
  Grown<int64_t> offsets;
  Grown<float> weights;  // empty when no block has weights
  Grown<float> dense;
  Grown<float> labels;
};

// Example order[i] of the blocks' concatenation becomes example i. Throws Error for a number out of range and for
// offsets that leave the ids.
Gathered gather_examples(const std::vector<Examples>& blocks, size_t fields, size_t dense, const int64_t* order,
                         size_t n);

}  // namespace thermocline
