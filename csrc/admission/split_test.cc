#include "admission/split.h"

#include <cstring>
#include <random>
#include <vector>

#include "testing/test.h"

namespace thermocline {
namespace {

template <typename T>
std::vector<T> vector_of(const Recycled<T>& array, size_t n) {
  return {array.get(), array.get() + n};
}

struct Input {
  std::vector<uint64_t> ids;
  std::vector<int64_t> offsets{0};
  std::vector<float> weights;
  std::vector<uint8_t> refused;

  Bags bags(bool pooled, bool weighted) const {
    return {.ids = ids.size(),
            .offsets = pooled ? offsets.data() : nullptr,
            .bags = pooled ? offsets.size() - 1 : ids.size(),
            .weights = weighted ? weights.data() : nullptr,
            .mean = false};
  }
};

// One key in `one_in` is refused; 0: none, 1: all.
Input random_input(std::mt19937_64& random, size_t bags, uint64_t one_in) {
  Input input;
  for (size_t b = 0; b < bags; ++b) {
    for (size_t i = random() % 4; i > 0; --i) {
      const uint64_t key = random() % 50;
      input.ids.push_back(key);
      input.weights.push_back(static_cast<float>(random() % 100));
      input.refused.push_back(one_in != 0 && key % one_in == 0);
    }
    input.offsets.push_back(static_cast<int64_t>(input.ids.size()));
  }
  return input;
}

void check_bags(const Input& input, bool pooled, bool weighted) {
  const Bags bags = input.bags(pooled, weighted);
  std::vector<uint64_t> ids[2];
  std::vector<float> weights[2];
  std::vector<int64_t> offsets{0}, other_offsets{0}, places;
  for (size_t b = 0; b < bags.bags; ++b) {
    const size_t begin = pooled ? input.offsets[b] : b, end = pooled ? input.offsets[b + 1] : b + 1;
    const size_t before = ids[1].size();
    for (size_t i = begin; i < end; ++i) {
      ids[input.refused[i]].push_back(input.ids[i]);
      weights[input.refused[i]].push_back(input.weights[i]);
    }
    offsets.push_back(static_cast<int64_t>(ids[0].size()));
    if (ids[1].size() == before) continue;
    places.push_back(static_cast<int64_t>(b));
    other_offsets.push_back(static_cast<int64_t>(ids[1].size()));
  }
  const SplitBags split = split_bags(input.ids.data(), bags, input.refused.data());
  CHECK(vector_of(split.ids, split.kept) == ids[0]);
  CHECK(vector_of(split.other_ids, split.others) == ids[1]);
  CHECK(vector_of(split.offsets, bags.bags + 1) == offsets);
  CHECK(vector_of(split.place, split.places) == places);
  CHECK(vector_of(split.other_offsets, split.places + 1) == other_offsets);
  if (!weighted) return;
  CHECK(vector_of(split.weights, split.kept) == weights[0]);
  CHECK(vector_of(split.other_weights, split.others) == weights[1]);
}

TEST(AdmissionSplit, DividesBags) {
  std::mt19937_64 random(1);
  for (uint64_t one_in : {0, 1, 2, 25, 49})
    for (size_t bags : {0, 1, 5, 60, 61, 62, 63, 500})
      for (bool pooled : {false, true})
        for (bool weighted : {false, true}) check_bags(random_input(random, bags, one_in), pooled, weighted);
}

TEST(AdmissionSplit, WorkingSetIsThatOfTheTrainedIds) {
  std::mt19937_64 random(2);
  Dedup dedup(2);
  for (uint64_t one_in : {0, 1, 2, 25}) {
    for (size_t bags : {0, 1, 40, 2000}) {
      const Input input = random_input(random, bags, one_in);
      std::vector<uint64_t> trained;
      for (size_t i = 0; i < input.ids.size(); ++i)
        if (!input.refused[i]) trained.push_back(input.ids[i]);
      const WorkingSet all = dedup.run(input.ids.data(), input.ids.size());
      const WorkingSet expected = dedup.run(trained.data(), trained.size());
      const WorkingSet split =
          split_working_set({all.ids, all.unique, all.keys.get(), all.inverse.get(), all.starts.get(), all.order.get()},
                            input.refused.data());
      CHECK_EQ(split.ids, expected.ids);
      CHECK_EQ(split.unique, expected.unique);
      CHECK(vector_of(split.keys, split.unique) == vector_of(expected.keys, split.unique));
      CHECK(vector_of(split.inverse, split.ids) == vector_of(expected.inverse, split.ids));
      CHECK(vector_of(split.starts, split.unique + 1) == vector_of(expected.starts, split.unique + 1));
      CHECK(vector_of(split.order, split.ids) == vector_of(expected.order, split.ids));
    }
  }
}

TEST(AdmissionSplit, AddsRowsAtTheirPlaces) {
  const std::vector<int64_t> places{0, 3, 4};
  const std::vector<float> rows{1, 2, 3, 4, 5, 6};
  std::vector<float> out{10, 20, 30, 40, 50, 60, 70, 80, 90, 100};
  add_at_places(places.data(), 3, 2, rows.data(), out.data());
  CHECK((out == std::vector<float>{11, 22, 30, 40, 50, 60, 73, 84, 95, 106}));
}

}  // namespace
}  // namespace thermocline
