// Gathers examples of several parsed blocks in any order, for shuffling and batching.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "data/grown.h"

namespace thermocline {

// The arrays of one parsed block (parse.h).
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

// Example i of the result is example order[i] of the concatenated blocks. Throws Error if an element of `order` or an
// offset is out of range.
Gathered gather_examples(const std::vector<Examples>& blocks, size_t fields, size_t dense, const int64_t* order,
                         size_t n);

}  // namespace thermocline
