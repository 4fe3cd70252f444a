// Statistics of rows: how often, when and with which labels a key occurred. Words at the end of a row (RowLayout).
//
// One step changes a row once. With n occurrences of its key in the step, c the sum of their labels in units of 2^-16,
// t the step's event time, d the number of decays of the table so far:
//   frequency = min(frequency + n, 2^32 - 1);  last_step = number of the step;  last_time = t
//   show = decayed(show) + float(n);  click = decayed(click) + float(c * 2^-16);  decays = d
// decayed(x): x multiplied, in fp32, by the factor of each decay from `decays` to d in order; a product below 2^-100 in
// size becomes 0. So a row that is not touched needs no write at a decay. Sums are of integers and do not depend on
// their order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dram/kernels.h"
#include "dram/row_layout.h"
#include "util/thread_pool.h"

namespace thermocline {

// Decays of a table: those numbered below `end`, from the end of the run before, multiply by `factor`.
struct DecayRun {
  uint32_t end;
  float factor;
};

struct StatisticsStep {
  uint32_t number;  // of the step, from 1
  int64_t time;
  std::vector<DecayRun> decays;  // ascending
};

// Labels in units of 2^-16, one for every `rows` consecutive rows of the gradients: the vectors of an example's bags.
class Labels {
 public:
  Labels(const int64_t* units, uint32_t rows) : units_(units), inverse_(rows == 1 ? 0 : ~uint64_t{0} / rows + 1) {}
  int64_t of(uint32_t row) const {  // the high half of the product is row / rows
    return units_[inverse_ == 0 ? row : static_cast<uint64_t>(static_cast<unsigned __int128>(inverse_) * row >> 64)];
  }

 private:
  const int64_t* units_;
  uint64_t inverse_;  // 2^64 / rows, rounded up; 0: one row
};

// Applies one step to the rows of the keys [begin, end) of a batch. `labels` may be null if the layout has no kClick;
// grad_rows: as in sum_clicks().
void update_statistics(const Rows& rows, const RowLayout& layout, const uint32_t* slots, const uint32_t* starts,
                       const uint32_t* grad_rows, const Labels* labels, const StatisticsStep& step, size_t begin,
                       size_t end);
// clicks[u] = the sum of units[grad_rows[j]] for starts[u] <= j < starts[u + 1]; see SegmentArgs.
void sum_clicks(ThreadPool& pool, const uint32_t* starts, size_t keys, const uint32_t* grad_rows, const int64_t* units,
                int64_t* clicks);
// Applies one step to rows slots[0..n). `clicks` may be null if the layout has no kClick. Slots must not repeat.
void update_statistics(ThreadPool& pool, const Rows& rows, const RowLayout& layout, const uint32_t* slots, size_t n,
                       const int64_t* counts, const int64_t* clicks, const StatisticsStep& step);
// Decays n values in place; done[i]: the number of decays that values[i] includes.
void decay(const std::vector<DecayRun>& runs, const uint32_t* done, size_t n, float* values);

}  // namespace thermocline
