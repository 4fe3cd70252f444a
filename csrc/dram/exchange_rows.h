// Rows between ranks: taken to be sent, put where they belong, gradients of several sources added in a given order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

// out[i] = rows[places[i]]
void take_rows(float* out, size_t dim, const float* rows, const int64_t* places, size_t n);

// out[places[i]] = rows[i]; rows of `out` are `stride` floats apart.
void put_rows(float* out, size_t stride, size_t dim, const float* rows, const int64_t* places, size_t n);

// totals[places[i]] += rows[i]; the first row of a place is taken as it is, not added to zero. `present`: one byte per
// place, whether it has any. `given`: rows to add, one byte each, the others are passed over; null: all. No place may
// repeat in one call.
void add_rows(float* totals, uint8_t* present, size_t dim, const int64_t* places, const float* rows,
              const uint8_t* given, size_t n);

}  // namespace thermocline
