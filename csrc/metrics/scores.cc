#include "metrics/scores.h"

#include <algorithm>
#include <cstring>

#include "data/math.h"
#include "util/cpu.h"

namespace thermocline {
namespace {

constexpr size_t kLanes = 8;
constexpr size_t kBlock = 64 * kLanes;  // scores that are added per lane before their sum is added to the total
typedef double Doubles __attribute__((vector_size(kLanes * sizeof(double))));
typedef int64_t Ints __attribute__((vector_size(kLanes * sizeof(int64_t))));

#define TC_INLINE inline __attribute__((always_inline))

struct Lanes {
  Doubles loss = {}, predicted = {};
};

// exp(x), x at most 0; below -708: 0. As portable_exp, without branches.
TC_INLINE void exp_of_negative(const Doubles& given, Doubles& result) {
  constexpr double kToInteger = 0x1.8p52;  // a sum with it has the nearest integer in its lowest bits
  const Ints tiny = given < -708.0;
  const Doubles x = tiny ? Doubles{} : given;
  const Doubles shifted = x * 0x1.71547652b82fep+0 + kToInteger, k = shifted - kToInteger;
  const Doubles r = (x - k * kLn2High) - k * kLn2Low;
  double factorial = 6227020800;  // 13!
  Doubles sum = Doubles{} + 1 / factorial;
#pragma GCC unroll 13
  for (int i = 13; i >= 1; --i) {
    factorial /= i;
    sum = sum * r + 1 / factorial;
  }
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 1023) << 52;
  Doubles scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  result = tiny ? Doubles{} : sum * scale;
}

// log(1 + s), s in [0, 1]: 2 atanh t, |t| < 0.172.
TC_INLINE void log_of_one_plus(const Doubles& s, Doubles& result) {
  const Ints upper = s > 0.41421356237309503;
  const Doubles zero = {};
  const Doubles t = (upper ? s - 1 : s) / (s + (upper ? zero + 3 : zero + 2)), t2 = t * t;
  Doubles sum = zero + 1.0 / 23;
#pragma GCC unroll 10
  for (int odd = 21; odd >= 3; odd -= 2) sum = sum * t2 + 1.0 / odd;
  const Doubles rest = 2 * t + 2 * t * t2 * sum;
  result = (upper ? zero + kLn2High : zero) + ((upper ? zero + kLn2Low : zero) + rest);
}

TC_INLINE void add_lanes(const Doubles& x, const Ints& positive, const Ints& counted, Lanes& lanes) {
  const Doubles zero = {};
  Doubles small, log_term;
  exp_of_negative(x < zero ? x : -x, small);
  log_of_one_plus(small, log_term);
  const Doubles margin = positive ? -x : x;
  const Doubles loss = log_term + (margin > zero ? margin : zero);
  const Doubles predicted = (x < zero ? small : zero + 1) / (1 + small);
  lanes.loss += counted ? loss : zero;
  lanes.predicted += counted ? predicted : zero;
}

TC_INLINE double sum_of(const Doubles& x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }

// Adds the first `count` of eight scores.
template <typename T>
TC_INLINE void add_scores(const T* scores, const T* labels, size_t count, Lanes& lanes) {
  typedef T Values __attribute__((vector_size(kLanes * sizeof(T))));
  constexpr Ints kLane = {0, 1, 2, 3, 4, 5, 6, 7};
  Values given, classes;
  std::memcpy(&given, scores, sizeof(given));
  std::memcpy(&classes, labels, sizeof(classes));
  const Ints counted = kLane < static_cast<int64_t>(count);
  add_lanes(__builtin_convertvector(given, Doubles), __builtin_convertvector(classes != 0, Ints), counted, lanes);
}

template <typename T>
TC_INLINE ScoreSums sum_all(const T* scores, const T* labels, size_t n) {
  ScoreSums total;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t size = std::min(kBlock, n - begin), full = size - size % kLanes;
    Lanes lanes;
    for (size_t i = begin; i < begin + full; i += kLanes) add_scores(scores + i, labels + i, kLanes, lanes);
    if (full < size) {
      T last_scores[kLanes] = {}, last_labels[kLanes] = {};
      std::copy(scores + begin + full, scores + begin + size, last_scores);
      std::copy(labels + begin + full, labels + begin + size, last_labels);
      add_scores(last_scores, last_labels, size - full, lanes);
    }
    total.loss += sum_of(lanes.loss);
    total.predicted += sum_of(lanes.predicted);
  }
  return total;
}

template <typename T>
using Sum = ScoreSums (*)(const T*, const T*, size_t);

#if defined(__x86_64__) && defined(__GNUC__)
template <typename T>
__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq"))) ScoreSums sum_avx512(const T* scores, const T* labels,
                                                                                   size_t n) {
  return sum_all(scores, labels, n);
}
template <typename T>
__attribute__((target("avx2"))) ScoreSums sum_avx2(const T* scores, const T* labels, size_t n) {
  return sum_all(scores, labels, n);
}
#endif
template <typename T>
ScoreSums sum_base(const T* scores, const T* labels, size_t n) {
  return sum_all(scores, labels, n);
}

template <typename T>
Sum<T> fastest() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (cpu_features().avx512) return sum_avx512<T>;
  if (cpu_features().avx2) return sum_avx2<T>;
#endif
  return sum_base<T>;
}

}  // namespace

template <typename T>
ScoreSums sum_scores(const T* scores, const T* labels, size_t n) {
  static const Sum<T> sum = fastest<T>();
  return sum(scores, labels, n);
}

template <typename T>
void count_scores(const T* scores, const T* labels, size_t n, double limit, size_t bins, int64_t* counts) {
  const T high = static_cast<T>(limit), per_unit = static_cast<T>(static_cast<double>(bins) / (2 * limit));
  const auto last = static_cast<int32_t>(bins) - 1;
  for (size_t i = 0; i < n; ++i) {
    const T position = (std::clamp(scores[i], -high, high) + high) * per_unit;
    const int32_t bin = std::min(static_cast<int32_t>(position), last);
    ++counts[static_cast<size_t>(labels[i] != 0) * bins + static_cast<size_t>(bin)];  // no branch: labels are random
  }
}

template <typename T>
LabelCounts count_labels(const T* labels, size_t n) {
  LabelCounts counts;
  for (size_t i = 0; i < n; ++i) {
    counts.ones += labels[i] == 1;
    counts.others += (labels[i] != 0) & (labels[i] != 1);  // NaN too
  }
  return counts;
}

template LabelCounts count_labels(const float*, size_t);
template LabelCounts count_labels(const double*, size_t);
template ScoreSums sum_scores(const float*, const float*, size_t);
template ScoreSums sum_scores(const double*, const double*, size_t);
template void count_scores(const float*, const float*, size_t, double, size_t, int64_t*);
template void count_scores(const double*, const double*, size_t, double, size_t, int64_t*);

}  // namespace thermocline
