// Sums and histogram of the scores of a batch, for the metrics of src/thermocline/training/metrics.py.
//
// Only plain double arithmetic in a fixed order: the same bits on every machine and with every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

struct ScoreSums {
  double loss = 0;       // binary cross entropy in nats, within 1e-14 per score
  double predicted = 0;  // probabilities
};

// T: float or double. scores: logits, no NaN. labels: 0, or any other value for a positive.
template <typename T>
ScoreSums sum_scores(const T* scores, const T* labels, size_t n);

// Adds each score to its bin of int64[2, bins], negatives first: equal bins over [-limit, limit], which scores outside
// are clipped to. The arithmetic is that of T. bins: 1 to 2^30.
template <typename T>
void count_scores(const T* scores, const T* labels, size_t n, double limit, size_t bins, int64_t* counts);

struct LabelCounts {
  size_t ones = 0;
  size_t others = 0;  // neither 0 nor 1
};

template <typename T>
LabelCounts count_labels(const T* labels, size_t n);

}  // namespace thermocline
