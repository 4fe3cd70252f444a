#include "dram/exchange_rows.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "testing/test.h"

namespace thermocline {
namespace {

TEST(ExchangeRows, AddRowsKeepsTheOrderOfSums) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 rng(seed);
    const size_t dim = 1 + rng() % 70, count = 1 + rng() % 50;
    std::vector<float> totals(count * dim), expected(count * dim);
    std::vector<uint8_t> present(count), had(count);
    for (int source = 0; source < 4; ++source) {
      std::vector<int64_t> index;
      for (size_t t = 0; t < count; ++t)
        if (rng() % 3) index.push_back(static_cast<int64_t>(t));
      std::shuffle(index.begin(), index.end(), rng);
      std::vector<float> rows(index.size() * dim);
      for (auto& x : rows)
        x = rng() % 5 ? static_cast<float>(static_cast<int64_t>(rng() % 2000) - 1000) * 1e-3f : -0.0f;
      std::vector<uint8_t> given(index.size());
      for (auto& flag : given) flag = rng() % 4 != 0;
      const bool all = rng() % 2;
      add_rows(totals.data(), present.data(), dim, index.data(), rows.data(), all ? nullptr : given.data(),
               index.size());
      for (size_t i = 0; i < index.size(); ++i) {
        if (!all && !given[i]) continue;
        const auto t = static_cast<size_t>(index[i]);
        for (size_t j = 0; j < dim; ++j) {
          float& sum = expected[t * dim + j];
          sum = had[t] ? sum + rows[i * dim + j] : rows[i * dim + j];  // the first row is copied: -0 stays -0
        }
        had[t] = 1;
      }
    }
    CHECK(std::memcmp(totals.data(), expected.data(), totals.size() * sizeof(float)) == 0);
    CHECK(present == had);
  }
}

TEST(ExchangeRows, PutRowsReversesTakeRows) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 rng(seed);
    const size_t dim = 1 + rng() % 70, count = rng() % 60, stride = dim + rng() % 5;
    std::vector<float> rows(count * dim), taken(count * dim), out(count * stride, -1.0f);
    for (auto& x : rows) x = static_cast<float>(rng() % 1000);
    std::vector<int64_t> index(count);
    for (size_t i = 0; i < count; ++i) index[i] = static_cast<int64_t>(i);
    std::shuffle(index.begin(), index.end(), rng);
    take_rows(taken.data(), dim, rows.data(), index.data(), count);
    for (size_t i = 0; i < count * dim; ++i) {
      CHECK_EQ(taken[i], rows[static_cast<size_t>(index[i / dim]) * dim + i % dim]);
    }
    put_rows(out.data(), stride, dim, taken.data(), index.data(), count);
    for (size_t i = 0; i < count * stride; ++i) {
      const size_t column = i % stride;
      CHECK_EQ(out[i], column < dim ? rows[i / stride * dim + column] : -1.0f);
    }
  }
}

}  // namespace
}  // namespace thermocline
