#include "dram/dedup.h"

#include <random>
#include <unordered_map>
#include <vector>

#include "testing/test.h"

namespace thermocline {
namespace {

void check_against_the_obvious(const std::vector<uint64_t>& ids, int threads) {
  Dedup dedup(threads);
  const WorkingSet set = dedup.run(ids.data(), ids.size());
  std::unordered_map<uint64_t, uint32_t> rank;
  std::vector<std::vector<uint32_t>> places;
  for (uint32_t i = 0; i < ids.size(); ++i) {
    const auto [it, is_new] = rank.emplace(ids[i], static_cast<uint32_t>(places.size()));
    if (is_new) places.emplace_back();
    places[it->second].push_back(i);
    CHECK_EQ(set.inverse[i], it->second);
    CHECK_EQ(set.keys[it->second], ids[i]);
  }
  CHECK_EQ(set.unique, places.size());
  CHECK_EQ(set.starts[0], 0u);
  for (size_t u = 0; u < places.size(); ++u) {
    CHECK_EQ(set.starts[u + 1] - set.starts[u], places[u].size());
    for (size_t j = 0; j < places[u].size(); ++j) CHECK_EQ(set.order[set.starts[u] + j], places[u][j]);
  }
}

TEST(Dedup, EmptySingleEqualAndDistinctIds) {
  for (int threads : {1, 3}) {
    check_against_the_obvious({}, threads);
    check_against_the_obvious({~uint64_t{0}}, threads);
    check_against_the_obvious({0, 0, 0}, threads);
    check_against_the_obvious(std::vector<uint64_t>(70000, 5), threads);
    std::vector<uint64_t> different(70000);
    for (size_t i = 0; i < different.size(); ++i) different[i] = i << 40;
    check_against_the_obvious(different, threads);
  }
}

TEST(Dedup, SkewedBatchesOfManyPartitions) {
  std::mt19937_64 random(3);
  for (int threads : {1, 2, 4}) {
    for (size_t n : {8191u, 8192u, 16385u, 200000u}) {
      std::vector<uint64_t> ids(n);
      for (auto& id : ids) id = random() % (1 + random() % (1 + random() % n));
      check_against_the_obvious(ids, threads);
    }
  }
}

TEST(Dedup, MemoryOfALargerBatchDoesNotAffectASmaller) {
  Dedup dedup(2);
  std::vector<uint64_t> large(100000), small{1, 1, 2};
  for (size_t i = 0; i < large.size(); ++i) large[i] = i % 1000;
  CHECK_EQ(dedup.run(large.data(), large.size()).unique, 1000u);
  CHECK_EQ(dedup.run(small.data(), small.size()).unique, 2u);
  CHECK_EQ(dedup.run(large.data(), large.size()).unique, 1000u);
}

}  // namespace
}  // namespace thermocline
