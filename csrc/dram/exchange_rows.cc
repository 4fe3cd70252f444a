#include "dram/exchange_rows.h"

#include <algorithm>

namespace thermocline {
namespace {

constexpr size_t kAhead = 8;
constexpr size_t kLine = 64 / sizeof(float);

template <int kWrite>
void prefetch(const float* row, size_t dim) {
  for (size_t j = 0; j < dim; j += kLine) __builtin_prefetch(row + j, kWrite);
}

}  // namespace

void take_rows(float* out, size_t dim, const float* rows, const int64_t* index, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch<0>(rows + static_cast<size_t>(index[i + kAhead]) * dim, dim);
    std::copy_n(rows + static_cast<size_t>(index[i]) * dim, dim, out + i * dim);
  }
}

void put_rows(float* out, size_t stride, size_t dim, const float* rows, const int64_t* index, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch<1>(out + static_cast<size_t>(index[i + kAhead]) * stride, dim);
    std::copy_n(rows + i * dim, dim, out + static_cast<size_t>(index[i]) * stride);
  }
}

void add_rows(float* totals, uint8_t* present, size_t dim, const int64_t* index, const float* rows,
              const uint8_t* given, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch<1>(totals + static_cast<size_t>(index[i + kAhead]) * dim, dim);
    if (given && !given[i]) continue;
    const auto t = static_cast<size_t>(index[i]);
    float* const total = totals + t * dim;
    const float* const row = rows + i * dim;
    if (present[t]) {
      for (size_t j = 0; j < dim; ++j) total[j] += row[j];
    } else {
      std::copy_n(row, dim, total);
      present[t] = 1;
    }
  }
}

}  // namespace thermocline
