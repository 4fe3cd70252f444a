// Rows of several sources, added in the order they come: what ranks do with each other's gradients.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

// totals[places[i]] += rows[i]; the first row of a place is taken as it is, not added to zero. `present`: one byte per
// place, whether it has any. `given`: rows to add, one byte each, the others are passed over; null: all. No place may
// repeat in one call.
void add_rows(float* totals, uint8_t* present, size_t dim, const int64_t* places, const float* rows,
              const uint8_t* given, size_t n);

}  // namespace thermocline
