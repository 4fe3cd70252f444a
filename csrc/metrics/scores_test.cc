#include "metrics/scores.h"

#include <cmath>
#include <vector>

#include "data/stream.h"
#include "testing/test.h"

namespace thermocline {
namespace {

struct Batch {
  std::vector<double> scores, labels;
};

Batch random_batch(size_t n, uint64_t seed) {
  Stream bits(seed, n);
  Batch batch;
  for (size_t i = 0; i < n; ++i) {
    batch.scores.push_back(static_cast<double>(static_cast<float>((bits.uniform() - 0.5) * 60)));
    batch.labels.push_back(bits.uniform() < 0.3 ? 1 : 0);
  }
  return batch;
}

TEST(Scores, SumsAreThoseOfTheFormulas) {
  for (const size_t n : {0, 1, 7, 8, 9, 511, 512, 513, 4099}) {
    const Batch batch = random_batch(n, 3);
    long double loss = 0, predicted = 0;
    for (size_t i = 0; i < n; ++i) {
      const long double x = batch.scores[i];
      loss += log1pl(expl(-fabsl(x))) + fmaxl(batch.labels[i] != 0 ? -x : x, 0);
      predicted += 1 / (1 + expl(-x));
    }
    const ScoreSums sums = sum_scores(batch.scores.data(), batch.labels.data(), n);
    CHECK(std::abs(static_cast<double>(sums.loss - loss)) <= 1e-14 * static_cast<double>(n));
    CHECK(std::abs(static_cast<double>(sums.predicted - predicted)) <= 1e-14 * static_cast<double>(n));
    const std::vector<float> scores(batch.scores.begin(), batch.scores.end());
    const std::vector<float> labels(batch.labels.begin(), batch.labels.end());
    CHECK_EQ(sum_scores(scores.data(), labels.data(), n).loss, sums.loss);  // the scores are exact in float
  }
}

TEST(Scores, SumsOfExtremeScoresAreFinite) {
  for (const double x : {0.0, -0.0, 36.8, 745.2, 1e30}) {
    for (const double label : {0.0, 1.0}) {
      for (const double score : {x, -x}) {
        const ScoreSums sums = sum_scores(&score, &label, 1);
        const double margin = label != 0 ? -score : score;
        const double expected = std::log1p(std::exp(-x)) + std::max(margin, 0.0);
        CHECK(std::abs(sums.loss - expected) <= 1e-15 * std::max(1.0, expected));
        CHECK(std::abs(sums.predicted - 1 / (1 + std::exp(-score))) <= 1e-15);
      }
    }
  }
  const double score = 709, label = 1;
  CHECK_EQ(sum_scores(&score, &label, 1).loss, 0.0);
}

TEST(Scores, CountsFallIntoTheBinsOfTheirScores) {
  const std::vector<float> scores = {-20, -16, -15.99F, -0.001F, 0, 0.001F, 15.99F, 16, 20};
  const std::vector<float> labels = {0, 1, 0, 1, 0, 1, 0, 1, 0};
  std::vector<int64_t> counts(2 * 32);  // bins of width 1
  count_scores(scores.data(), labels.data(), scores.size(), 16.0, 32, counts.data());
  std::vector<int64_t> expected(2 * 32);
  for (const int bin : {0, 0, 16, 31, 31}) ++expected[bin];
  for (const int bin : {0, 15, 16, 31}) ++expected[32 + bin];
  CHECK(counts == expected);
}

TEST(Scores, LabelsOtherThan0And1AreCounted) {
  const std::vector<double> labels = {0, 1, -0.0, 1, 0.5, -1, 2, std::nan(""), INFINITY, 1};
  const LabelCounts counts = count_labels(labels.data(), labels.size());
  CHECK_EQ(counts.ones, 3u);
  CHECK_EQ(counts.others, 5u);
  const std::vector<float> floats(labels.begin(), labels.end());
  CHECK_EQ(count_labels(floats.data(), floats.size()).others, 5u);
  CHECK_EQ(count_labels(floats.data(), 3).others, 0u);
}

}  // namespace
}  // namespace thermocline
