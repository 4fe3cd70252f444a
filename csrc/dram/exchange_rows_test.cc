#include "dram/exchange_rows.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "testing/test.h"

namespace thermocline {
namespace {

TEST(AddRows, as_one_by_one_in_the_order_they_come) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 rng(seed);
    const size_t dim = 1 + rng() % 70, count = 1 + rng() % 50;
    std::vector<float> totals(count * dim), expected(count * dim);
    std::vector<uint8_t> present(count), had(count);
    for (int source = 0; source < 4; ++source) {
      std::vector<int64_t> places;
      for (size_t place = 0; place < count; ++place)
        if (rng() % 3) places.push_back(static_cast<int64_t>(place));
      std::shuffle(places.begin(), places.end(), rng);
      std::vector<float> rows(places.size() * dim);
      for (auto& x : rows)
        x = rng() % 5 ? static_cast<float>(static_cast<int64_t>(rng() % 2000) - 1000) * 1e-3f : -0.0f;
      std::vector<uint8_t> given(places.size());
      for (auto& flag : given) flag = rng() % 4 != 0;
      const bool all = rng() % 2;
      add_rows(totals.data(), present.data(), dim, places.data(), rows.data(), all ? nullptr : given.data(),
               places.size());
      for (size_t i = 0; i < places.size(); ++i) {
        if (!all && !given[i]) continue;
        const auto place = static_cast<size_t>(places[i]);
        for (size_t j = 0; j < dim; ++j) {
          float& sum = expected[place * dim + j];
          sum = had[place] ? sum + rows[i * dim + j] : rows[i * dim + j];  // -0 stays -0
        }
        had[place] = 1;
      }
    }
    CHECK(std::memcmp(totals.data(), expected.data(), totals.size() * sizeof(float)) == 0);
    CHECK(present == had);
  }
}

TEST(ExchangeRows, taken_and_put_back_is_the_same) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 rng(seed);
    const size_t dim = 1 + rng() % 70, count = rng() % 60, stride = dim + rng() % 5;
    std::vector<float> rows(count * dim), taken(count * dim), out(count * stride, -1.0f);
    for (auto& x : rows) x = static_cast<float>(rng() % 1000);
    std::vector<int64_t> places(count);
    for (size_t i = 0; i < count; ++i) places[i] = static_cast<int64_t>(i);
    std::shuffle(places.begin(), places.end(), rng);
    take_rows(taken.data(), dim, rows.data(), places.data(), count);
    for (size_t i = 0; i < count * dim; ++i) {
      CHECK_EQ(taken[i], rows[static_cast<size_t>(places[i / dim]) * dim + i % dim]);
    }
    put_rows(out.data(), stride, dim, taken.data(), places.data(), count);
    for (size_t i = 0; i < count * stride; ++i) {
      const size_t column = i % stride;
      CHECK_EQ(out[i], column < dim ? rows[i / stride * dim + column] : -1.0f);
    }
  }
}

}  // namespace
}  // namespace thermocline
