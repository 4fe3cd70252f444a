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

// Applies one step to the rows of the keys [begin, end) of a batch. `units` may be null if the layout has no kClick;
// grad_rows and units: as in sum_clicks().
void update_statistics(const Rows& rows, const RowLayout& layout, const uint32_t* slots, const uint32_t* starts,
                       const uint32_t* grad_rows, const int64_t* units, const StatisticsStep& step, size_t begin,
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
