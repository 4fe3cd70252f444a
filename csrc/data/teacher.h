// The planted model behind the labels of synthetic data. Linear models can learn a part of it, models with interactions
// more; a model that does not distinguish keys learns nothing.
//
// One key in four has two latents, near normal, from a hash of (seed, key); the latents of other keys are zero. Bags
// are summed and scaled by 1 / sqrt(ids). Fields belong to three groups in turn (such as user, ad, context) with
// decreasing weights. The latents of a group's fields and a projection of the dense features are added to one vector
// per group. The logit is the sum of three signals:
//   linear   the first latents of all groups                                learnable by logistic regression
//   pairs    user x ad + ad x context, first latents, and half the second   learnable by a factorization machine
//   units    eight units x / (1 + |x|) over all three vectors               needs a neural network
// The second latents only occur in products: they are learned last.
// Each signal is scaled to standard deviation 1 over a sample; their sum is scaled and shifted so that the mean
// probability of the sample is the base rate. Sums over keys are integers, the rest is double arithmetic in a fixed
// order: the same bits on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace thermocline {

struct Signals {
  double linear = 0, pairs = 0, units = 0;
};

// Thread safety: constant after calibrate().
class Teacher {
 public:
  // `largest_bag`: maximum number of ids of one field in one example.
  Teacher(uint64_t seed, size_t fields, size_t dense, size_t largest_bag);

  // Computes the signals of one example: the ids of field f are keys[offsets[f]] .. keys[offsets[f + 1] - 1].
  Signals signals(const uint64_t* keys, const int64_t* offsets, const float* dense) const;

  // `signal`: standard deviation of the logits over the sample.
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
