#include "mem/add_rows.h"

#include <algorithm>

namespace thermocline {

void add_rows(float* totals, uint8_t* present, size_t dim, const int64_t* places, const float* rows,
              const uint8_t* given, size_t n) {
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(totals + static_cast<size_t>(places[i + kAhead]) * dim, 1);
    if (given && !given[i]) continue;
    const auto place = static_cast<size_t>(places[i]);
    float* const total = totals + place * dim;
    const float* const row = rows + i * dim;
    if (present[place]) {
      for (size_t j = 0; j < dim; ++j) total[j] += row[j];
    } else {
      std::copy_n(row, dim, total);
      present[place] = 1;
    }
  }
}

}  // namespace thermocline
