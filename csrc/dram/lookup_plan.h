// Indices of a batch for training, computed before the step: the slot of every id, and the gradient row and coefficient
// of every occurrence in segment order (dram/kernels.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "util/thread_pool.h"

namespace thermocline {

// out[i] = slots[inverse[i]]
void expand_slots(ThreadPool& pool, const uint32_t* slots, const uint32_t* inverse, size_t ids, uint32_t* out);

struct Bags {
  size_t ids;
  const int64_t* offsets;  // [bags + 1]; null: every id is one bag
  size_t bags;
  const float* weights;  // [ids] or null
  bool mean;
  bool has_coefs() const { return weights || (mean && offsets); }
};

// Throws Error unless the offsets ascend from 0 to the number of ids.
void check_offsets(const Bags& bags);

// For j in segment order, with p = order[j]: grad_rows[j] is the bag of p. With weights or mean, coefs[j] = fp32(w /
// n): w is the weight of p (or 1), n the number of ids of its bag (or 1 without mean).
void plan_gradients(ThreadPool& pool, const Bags& bags, const uint32_t* order, uint32_t* grad_rows, float* coefs);

}  // namespace thermocline
