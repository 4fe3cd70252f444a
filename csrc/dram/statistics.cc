#include "dram/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>

namespace thermocline {
namespace {

constexpr float kLeast = 0x1p-100f;
constexpr size_t kTaskRows = 16384;
constexpr size_t kAhead = 16;  // rows prefetched

float decayed(float x, uint32_t done, const std::vector<DecayRun>& runs) {
  for (const DecayRun& run : runs) {
    for (; done < run.end && x != 0 && run.factor != 1; ++done) {
      x = x * run.factor;
      if (std::fabs(x) < kLeast) x = 0;
    }
    done = std::max(done, run.end);
  }
  return x;
}

template <typename T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <typename T>
void store(uint8_t** at, T value) {
  std::memcpy(*at, &value, sizeof(T));
  *at += sizeof(T);
}

// Writes the statistics of rows, given the occurrences of their keys and the sums of their labels.
class RowUpdate {
 public:
  RowUpdate(const Rows& rows, const RowLayout& layout, const StatisticsStep& step)
      : rows_(rows),
        step_(step),
        kinds_(layout.statistics),
        words_(layout.statistics_words()),
        offset_(layout.bytes() - words_ * sizeof(uint32_t)),
        decays_(step.decays.empty() ? 0 : step.decays.back().end),
        has_decays_(layout.decays()) {}

  void prefetch(uint32_t slot) const { __builtin_prefetch(rows_.base + slot * rows_.stride + offset_, 1); }

  void apply(uint32_t slot, int64_t count, int64_t clicks) const {
    uint8_t* at = rows_.base + slot * rows_.stride + offset_;
    const uint32_t done = has_decays_ ? load<uint32_t>(at + (words_ - 1) * sizeof(uint32_t)) : 0;
    if (kinds_ & kFrequency) {
      const uint64_t sum = load<uint32_t>(at) + static_cast<uint64_t>(count);
      store(&at, static_cast<uint32_t>(std::min<uint64_t>(sum, ~uint32_t{0})));
    }
    if (kinds_ & kLastStep) store(&at, step_.number);
    if (kinds_ & kLastTime) store(&at, step_.time);
    if (kinds_ & kShow) store(&at, decayed(load<float>(at), done, step_.decays) + static_cast<float>(count));
    if (kinds_ & kClick) {
      const auto labels = static_cast<float>(static_cast<double>(clicks) * 0x1p-16);
      store(&at, decayed(load<float>(at), done, step_.decays) + labels);
    }
    if (has_decays_) store(&at, decays_);
  }

 private:
  const Rows rows_;
  const StatisticsStep& step_;
  const uint8_t kinds_;
  const size_t words_, offset_;
  const uint32_t decays_;
  const bool has_decays_;
};

// Sums of the labels of keys [begin, end): differences of running sums, because a loop per key, of few turns each,
// would mispredict a branch for most keys. Modulo 2^64, so that only the sum of a key must fit.
class LabelSums {
 public:
  LabelSums(const uint32_t* starts, const uint32_t* grad_rows, const Labels& labels, size_t begin, size_t end)
      : starts_(starts), first_(starts[begin]), sums_(new uint64_t[starts[end] - first_ + 1]) {
    uint64_t sum = sums_[0] = 0;
    for (size_t j = first_; j < starts[end]; ++j) {
      sum += static_cast<uint64_t>(labels.of(grad_rows[j]));
      sums_[j - first_ + 1] = sum;
    }
  }
  int64_t of(size_t key) const {
    return static_cast<int64_t>(sums_[starts_[key + 1] - first_] - sums_[starts_[key] - first_]);
  }

 private:
  const uint32_t* starts_;
  size_t first_;
  std::unique_ptr<uint64_t[]> sums_;
};

}  // namespace

void update_statistics(const Rows& rows, const RowLayout& layout, const uint32_t* slots, const uint32_t* starts,
                       const uint32_t* grad_rows, const Labels* labels, const StatisticsStep& step, size_t begin,
                       size_t end) {
  const RowUpdate update(rows, layout, step);
  std::optional<LabelSums> clicks;
  if (labels) clicks.emplace(starts, grad_rows, *labels, begin, end);
  for (size_t u = begin; u < end; ++u) {
    update.apply(slots[u], starts[u + 1] - starts[u], clicks ? clicks->of(u) : 0);
  }
}

void sum_clicks(ThreadPool& pool, const uint32_t* starts, size_t keys, const uint32_t* grad_rows, const int64_t* units,
                int64_t* clicks) {
  const size_t tasks = starts[keys] / kTaskRows + 1;
  pool.parallel(tasks, [&](size_t t) {
    const size_t begin = keys * t / tasks, end = keys * (t + 1) / tasks;
    const LabelSums sums(starts, grad_rows, {units, 1}, begin, end);
    for (size_t u = begin; u < end; ++u) clicks[u] = sums.of(u);
  });
}

void update_statistics(ThreadPool& pool, const Rows& rows, const RowLayout& layout, const uint32_t* slots, size_t n,
                       const int64_t* counts, const int64_t* clicks, const StatisticsStep& step) {
  const RowUpdate update(rows, layout, step);
  const size_t tasks = n / kTaskRows + 1;
  pool.parallel(tasks, [&](size_t t) {
    const size_t end = n * (t + 1) / tasks;
    for (size_t i = n * t / tasks; i < end; ++i) {
      if (i + kAhead < end) update.prefetch(slots[i + kAhead]);
      update.apply(slots[i], counts[i], clicks ? clicks[i] : 0);
    }
  });
}

void decay(const std::vector<DecayRun>& runs, const uint32_t* done, size_t n, float* values) {
  for (size_t i = 0; i < n; ++i) values[i] = decayed(values[i], done[i], runs);
}

}  // namespace thermocline
