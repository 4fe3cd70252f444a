#include "data/teacher.h"

#include <algorithm>
#include <cmath>

#include "data/math.h"
#include "data/stream.h"
#include "util/hash.h"

namespace thermocline {
namespace {

// Share of each signal in the standard deviation of the logit (the squares add up to 1).
constexpr double kLinearShare = 0.6, kPairsShare = 0.69282032302755092, kUnitsShare = 0.4;

constexpr double kLatentDeviation = 147.8;  // half of that of a sum of four 2 b - 255, b a uniform byte
constexpr double kFieldDecay = 0.75;        // ratio of the weights of two successive fields of a group
constexpr double kSecondLatent = 0.5;       // weight in the pairs

// Sums of the latents over a bag. A key's latents are zero, or, for one key in four, the centred sums of four bytes of
// its hash each.
void sum_latents(const uint64_t* keys, size_t n, uint64_t salt, int64_t sums[2]) {
  constexpr uint64_t kMask = 0x00ff00ff00ff00ffULL;
  sums[0] = sums[1] = 0;
  for (size_t i = 0; i < n;) {
    const size_t stop = std::min(n, i + 256);  // 16-bit lanes can hold the sum of 256 bytes
    uint64_t even = 0, odd = 0;
    int64_t that_matter = 0;
    for (; i < stop; ++i) {
      const uint64_t h = mix64(keys[i] ^ salt);
      const uint64_t matters = (h * 0x9e3779b97f4a7c15ULL) >> 62 == 0;
      that_matter += static_cast<int64_t>(matters);
      even += h & kMask & -matters;
      odd += (h >> 8) & kMask & -matters;
    }
    for (int lane = 0; lane < 64; lane += 16) {
      sums[0] += 2 * static_cast<int64_t>((even >> lane) & 0xffff) - 255 * that_matter;
      sums[1] += 2 * static_cast<int64_t>((odd >> lane) & 0xffff) - 255 * that_matter;
    }
  }
}

// Mean and standard deviation, summed in the given order.
template <typename Get>
std::pair<double, double> moments(const std::vector<Signals>& sample, Get get) {
  double sum = 0, squares = 0;
  for (const Signals& s : sample) sum += get(s);
  const double mean = sum / static_cast<double>(sample.size());
  for (const Signals& s : sample) squares += (get(s) - mean) * (get(s) - mean);
  return {mean, std::sqrt(squares / static_cast<double>(sample.size()))};
}

}  // namespace

double probability(double logit) { return 1 / (1 + portable_exp(-logit)); }

Teacher::Teacher(uint64_t seed, size_t fields, size_t dense, size_t largest_bag)
    : fields_(fields), dense_(dense), bag_scale_(largest_bag + 1) {
  Stream bits(seed, ~uint64_t{0});
  salt_ = bits();
  for (size_t n = 1; n <= largest_bag; ++n) bag_scale_[n] = 1 / (kLatentDeviation * std::sqrt(static_cast<double>(n)));
  double norm[kGroups] = {}, decay = 1;
  for (size_t f = 0; f < fields; ++f) {
    field_weight_.push_back(decay * (0.5 + bits.uniform()));
    norm[f % kGroups] += field_weight_[f] * field_weight_[f];
    if (f % kGroups == kGroups - 1) decay *= kFieldDecay;
  }
  for (size_t f = 0; f < fields; ++f) field_weight_[f] /= std::sqrt(norm[f % kGroups]);  // vectors of deviation 1
  for (size_t i = 0; i < dense * kLatents; ++i) {
    projection_.push_back(bits.normal() / std::sqrt(static_cast<double>(dense)));
  }
  for (size_t u = 0; u < kUnits; ++u) {
    for (double& w : unit_weight_[u]) w = bits.normal();
    unit_bias_[u] = bits.normal();
    unit_out_[u] = bits.normal();
  }
}

Signals Teacher::signals(const uint64_t* keys, const int64_t* offsets, const float* dense) const {
  Signals s;
  double group[kInputs] = {};
  for (size_t f = 0; f < fields_; ++f) {
    const auto ids = static_cast<size_t>(offsets[f + 1] - offsets[f]);
    if (ids == 0) continue;
    int64_t sums[kLatents];
    sum_latents(keys + offsets[f], ids, salt_, sums);
    double* vector = group + kLatents * (f % kGroups);
    for (size_t l = 0; l < kLatents; ++l) {
      vector[l] += field_weight_[f] * (bag_scale_[ids] * static_cast<double>(sums[l]));
    }
  }
  double* context = group + kLatents * (kGroups - 1);
  for (size_t d = 0; d < dense_; ++d) {
    for (size_t l = 0; l < kLatents; ++l) context[l] += projection_[d * kLatents + l] * static_cast<double>(dense[d]);
  }
  const double *user = group, *ad = group + kLatents;
  s.linear = user[0] + ad[0] + context[0];
  s.pairs = ad[0] * (user[0] + context[0]) + kSecondLatent * ad[1] * (user[1] + context[1]);
  for (size_t u = 0; u < kUnits; ++u) {
    double x = 0;
    for (size_t i = 0; i < kInputs; ++i) x += unit_weight_[u][i] * group[i];
    x += unit_bias_[u];
    s.units += unit_out_[u] * (x / (1 + std::abs(x)));
  }
  return s;
}

void Teacher::calibrate(const std::vector<Signals>& sample, double base_rate, double signal) {
  const auto scale_for = [&](double share, auto get) {
    const double deviation = moments(sample, get).second;
    return deviation > 1e-9 ? share / deviation : 0;
  };
  bias_ = 0;
  scale_.linear = scale_for(kLinearShare, [](const Signals& s) { return s.linear; });
  scale_.pairs = scale_for(kPairsShare, [](const Signals& s) { return s.pairs; });
  scale_.units = scale_for(kUnitsShare, [](const Signals& s) { return s.units; });
  const double deviation = moments(sample, [this](const Signals& s) { return logit(s); }).second;
  const double stretch = deviation > 1e-9 ? signal / deviation : 0;
  scale_ = {stretch * scale_.linear, stretch * scale_.pairs, stretch * scale_.units};
  std::vector<double> logits;
  for (const Signals& s : sample) logits.push_back(logit(s));
  // The mean probability increases with the bias: bisection, with a fixed number of steps.
  const auto [least, most] = std::minmax_element(logits.begin(), logits.end());
  double low = -40 - *most, high = 40 - *least;
  for (int step = 0; step < 60; ++step) {
    bias_ = (low + high) / 2;
    double sum = 0;
    for (const double z : logits) sum += probability(z + bias_);
    (sum < base_rate * static_cast<double>(logits.size()) ? low : high) = bias_;
  }
}

}  // namespace thermocline
