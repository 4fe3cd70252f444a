// Weights as codes: how rows of less than fp32 are stored, defined to the bit, the same on every device.
//
//   fp16, bf16   IEEE half precision, bfloat16: 16 bits each
//   int, b bits  w = code * D in fp32, b = 2..8 or 16, codes two's complement from -2^(b-1) to 2^(b-1) - 1. D is the
//                table's, or the row's own (its first word): largest |w| of the row / (2^(b-1) - 1)
// Element i is the bits i * b to i * b + b - 1 of the row's code words, lowest bit first; bits past the last are zero.
//
// Encoding x (fp32, every operation rounded by itself):
//   int          q = x / D, NaN as 0, clamped to the codes; f = floor(q); nearest: f + 1 if q - f >= 0.5, else f;
//                stochastic: f + 1 if u / 2^24 < q - f, else f
//   fp16, bf16   nearest: to the nearest, ties to even; stochastic: bf16 and normal fp16 numbers: the bits that go are
//                added to as many of u's, its highest, and the carry rounds up; below fp16's smallest normal number: up
//                if u / 2^24 is below the fraction that goes. Infinities and NaN stay
//   u            24 bits: counter_bits(row_mix(row_mix(t, key), step), i) >> 40 (random.h), t of the table, `step` the
//                number of the step that wrote the row; 0: the initial row
//
// The gradient of a table's step: of the loss that rounding adds, to second order with g^2 for the curvature, by the
// straight-through estimator. It is the sum over all weights x that a step has made of g^2 * (c - q) * e: g the
// weight's summed gradient times the step's scale, q = x / D, c its code; e, what c * D changes by with D, is c - q
// inside the codes' range (finer steps, less noise) and c outside (a wider range, less clamping). To first order
// rounding by chance adds nothing: its mean is x. The sum is one of integers, the same in any order: each term clamped
// to 2^-8 either way, NaN as 0, times 2^44, cut to an integer: 2^27 weights of a step cannot overflow it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dram/random.h"
#include "dram/row_layout.h"

namespace thermocline {

// Constant but for the step of a table that learns it.
struct Codec {
  RowLayout layout;
  uint64_t table_mix = 0;

  bool plain() const { return layout.precision.kind == WeightKind::kFp32; }
  float least() const { return -static_cast<float>(1u << (layout.precision.bits - 1)); }
  float most() const { return static_cast<float>((1u << (layout.precision.bits - 1)) - 1); }
  // What the rounding of a row depends on, beside the element.
  uint64_t stream(uint64_t key, uint64_t step) const { return row_mix(row_mix(table_mix, key), step); }
};

// Where the terms of rows go while they are encoded: row r of them has the gradients sums[r * dim ..].
struct StepGradient {
  const float* sums;
  float scale;
  int64_t total;
};

}  // namespace thermocline
