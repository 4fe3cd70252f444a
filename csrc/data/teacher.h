// Who clicks: the planted model behind the labels of synthetic data. Linear models can learn a part of it, models with
// interactions more, and nobody can without telling keys apart.
//
// One key in four has two latents, near normal, from a hash of (seed, key); the others mean nothing. Bags are summed
// and scaled by 1 / sqrt(ids). Fields belong to three groups in turn (think user, ad, context) and count less from
// field to field; the latents of a group's fields, and a projection of the dense features, add up to one vector per
// group. The logit adds three signals:
//   linear   the first latents of all groups                                what logistic regression can find
//   pairs    user x ad + ad x context, first latents, and half the second   what a factorization machine can find
//   units    eight units x / (1 + |x|) over all three vectors               what takes a network
// The second latents only ever act together: they are learned last.
// Each is scaled to deviation 1 over a sample; their mix is scaled and shifted so that the sample's mean probability is
// the base rate. Sums over keys are integers, the rest double arithmetic in a fixed order: the same bits on every
// machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace thermocline {

struct Signals {
  double linear = 0, pairs = 0, units = 0;
};

// Thread safety: constant once calibrated.
class Teacher {
 public:
  // `largest_bag`: most ids of one field of one example.
  Teacher(uint64_t seed, size_t fields, size_t dense, size_t largest_bag);

  // Of one example: the ids of field f are keys[offsets[f]] .. keys[offsets[f + 1] - 1].
  Signals signals(const uint64_t* keys, const int64_t* offsets, const float* dense) const;

  // `signal`: deviation of the logits over the sample.
  void calibrate(const std::vector<Signals>& sample, double base_rate, double signal);

  double logit(const Signals& s) const {
    return bias_ + scale_.linear * s.linear + scale_.pairs * s.pairs + scale_.units * s.units;
  }

 private:
  static constexpr size_t kLatents = 2, kGroups = 3, kUnits = 8, kInputs = kLatents * kGroups;

  uint64_t salt_;
  size_t fields_, dense_;
  std::vector<double> bag_scale_;  // by number of ids
  std::vector<double> field_weight_;
  std::vector<double> projection_;  // dense x kLatents
  double unit_weight_[kUnits][kInputs], unit_bias_[kUnits], unit_out_[kUnits];
  Signals scale_;
  double bias_ = 0;
};

// 1 / (1 + exp(-logit)), the same bits everywhere.
double probability(double logit);

}  // namespace thermocline
