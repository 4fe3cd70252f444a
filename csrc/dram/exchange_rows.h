// Row copies for the exchange between ranks: gather, scatter and ordered sums.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

// out[i] = rows[index[i]]
void take_rows(float* out, size_t dim, const float* rows, const int64_t* index, size_t n);

// out[index[i]] = rows[i]; rows of `out` are `stride` floats apart.
void put_rows(float* out, size_t stride, size_t dim, const float* rows, const int64_t* index, size_t n);

// totals[index[i]] += rows[i]. The first row of a total is copied, not added to zero. `present`: one flag per total,
// set once it has a row. `given`: one flag per row, rows without it are skipped; null: all rows. `index` must not have
// duplicates.
void add_rows(float* totals, uint8_t* present, size_t dim, const int64_t* index, const float* rows,
              const uint8_t* given, size_t n);

}  // namespace thermocline
