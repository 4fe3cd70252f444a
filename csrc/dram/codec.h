// Quantized rows: the stored form of weights in less than fp32, defined to the bit and equal on every device.
//
//   fp16, bf16   IEEE half precision, bfloat16: 16 bits each
//   int, b bits  w = code * D in fp32, b = 2..8 or 16; codes are two's complement from -2^(b-1) to 2^(b-1) - 1. The
//                scale D belongs to the table, or to the row: then D is the row's first word, its largest |w| divided
//                by 2^(b-1) - 1
// Element i is bits i * b to i * b + b - 1 of the row's code words, lowest bit first; bits after the last code are
// zero.
//
// Encoding of x (fp32, every operation rounded separately):
//   int          q = x / D, NaN becomes 0, clamped to the codes; f = floor(q). Nearest: f + 1 if q - f >= 0.5, else f.
//                Stochastic: f + 1 if u / 2^24 < q - f, else f
//   fp16, bf16   nearest: round to nearest, ties to even. Stochastic, bf16 and normal fp16 numbers: the highest bits of
//                u are added to the discarded bits, and the carry rounds up. Stochastic, below the smallest normal fp16
//                number: up if u / 2^24 is less than the discarded fraction. Infinities and NaN are kept
//   u            24 bits: counter_bits(row_mix(row_mix(t, key), step), i) >> 40 (random.h), t of the table, `step` the
//                number of the training step that wrote the row; 0: the initial row
//
// Gradient of a learned scale: the gradient of the loss that rounding adds, to second order with g^2 as the curvature,
// by the straight-through estimator. It is the sum over all weights x written by a step of g^2 * (c - q) * e: g is the
// weight's summed gradient times the gradient scale, q = x / D, c its code. e is the derivative of c * D: c - q inside
// the code range (a smaller scale, less noise) and c outside (a wider range, less clamping). The first-order term is
// zero for stochastic rounding, whose mean is x. The sum is of integers, so it does not depend on the order: each term
// is clamped to [-2^-8, 2^-8], NaN becomes 0, and is multiplied by 2^44 and truncated; 2^27 weights per step cannot
// overflow it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dram/random.h"
#include "dram/row_layout.h"

namespace thermocline {

// Constant, except for the scale of a table that learns it.
struct Codec {
  RowLayout layout;
  uint64_t table_mix = 0;

  bool plain() const { return layout.precision.kind == WeightKind::kFp32; }
  float least() const { return -static_cast<float>(1u << (layout.precision.bits - 1)); }
  float most() const { return static_cast<float>((1u << (layout.precision.bits - 1)) - 1); }
  // Random stream of a row's rounding in one training step.
  uint64_t stream(uint64_t key, uint64_t step) const { return row_mix(row_mix(table_mix, key), step); }
};

// Accumulates the gradient of a learned scale while rows are encoded.
struct ScaleGradient {
  const float* sums;  // gradients of row r: sums[r * dim ..]
  float grad_scale;
  int64_t total;
};

}  // namespace thermocline
