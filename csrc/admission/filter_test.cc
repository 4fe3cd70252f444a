#include "admission/filter.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "dram/dedup.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline {
namespace {

using Batch = std::vector<uint64_t>;

std::vector<uint8_t> plan(AdmissionFilter& filter, const Batch& ids) {
  std::vector<uint8_t> refused(ids.size());
  filter.plan(ids.data(), ids.size(), refused.data());
  return refused;
}

// The rule as a map: exact counters that never exceed their memory.
struct Obvious {
  uint32_t count;
  std::map<uint64_t, uint32_t> counts;
  std::set<uint64_t> admitted;

  std::vector<uint8_t> plan(const Batch& ids) {
    for (uint64_t id : ids)
      if (!admitted.contains(id) && ++counts[id] >= count) {
        admitted.insert(id);
        counts.erase(id);
      }
    std::vector<uint8_t> refused;
    for (uint64_t id : ids) refused.push_back(!admitted.contains(id));
    return refused;
  }
};

void check_state(const AdmissionFilter& filter, const Obvious& expected) {
  const AdmissionState state = filter.save();
  CHECK_EQ(state.keys.size(), expected.counts.size());
  size_t i = 0;
  for (const auto& [key, count] : expected.counts) {
    CHECK_EQ(state.keys[i], key);
    CHECK_EQ(state.counts[i], count);
    ++i;
  }
}

Batch random_batch(std::mt19937_64& random, size_t n, uint64_t keys) {
  Batch ids(n);
  for (uint64_t& id : ids) id = (random() % keys) * (random() % 2 ? 1 : 0xfedcba9876543210ULL);  // 0 included
  return ids;
}

TEST(KeyCounts, IsAMapUnderRandomOperations) {
  std::mt19937_64 random(1);
  for (size_t slots : {2, 7, 64, 1000}) {
    KeyCounts counts(slots);
    std::map<uint64_t, uint32_t> expected;
    for (int i = 0; i < 20000; ++i) {
      const uint64_t key = random() % (2 * slots);
      const uint32_t value = random() % 3;
      if (value != 0 && !expected.contains(key) && expected.size() >= std::max<size_t>(1, counts.limit())) continue;
      counts.set(key, value);
      if (value == 0) expected.erase(key);
      else expected[key] = value;
      CHECK_EQ(counts.size(), expected.size());
    }
    for (uint64_t key = 0; key < 2 * slots; ++key)
      CHECK_EQ(counts.value_of(key), expected.contains(key) ? expected[key] : 0);
    std::map<uint64_t, uint32_t> all;
    counts.for_each([&](uint64_t key, uint32_t value) { all[key] = value; });
    CHECK(all == expected);
  }
}

TEST(KeyStates, IsAMapUnderRandomOperationsAndGrows) {
  std::mt19937_64 random(1);
  for (size_t slots : {2, 7, 64}) {
    KeyStates states(slots);
    std::map<uint64_t, uint8_t> expected;
    for (int i = 0; i < 20000; ++i) {
      const uint64_t key = random() % (8 * slots);  // 0 included
      const auto state = static_cast<uint8_t>(random() % 3);
      states.set(key, state);
      if (state == 0) expected.erase(key);
      else expected[key] = state;
      CHECK_EQ(states.size(), expected.size());
    }
    for (uint64_t key = 0; key < 8 * slots; ++key) {
      CHECK_EQ(states.get(key), expected.contains(key) ? expected[key] : 0);
      CHECK_EQ(states.contains(key, states.home(key)), expected.contains(key));
    }
    std::map<uint64_t, uint8_t> all;
    states.for_each([&](uint64_t key, uint8_t state) { all[key] = state; });
    CHECK(all == expected);
  }
}

TEST(CountSketch, NeverUnderestimatesAndKeepsItsBound) {
  CountSketch sketch(4 * 2 * 1000);
  CHECK_EQ(sketch.width(), 1000u);
  std::mt19937_64 random(2);
  std::map<uint64_t, uint32_t> truth;
  for (int i = 0; i < 5000; ++i) {
    const uint64_t key = random() % 700;
    const uint32_t estimate = sketch.add(key, [](size_t, uint16_t) {});
    CHECK(estimate >= ++truth[key]);
  }
  size_t beyond = 0;
  for (const auto& [key, count] : truth)
    beyond += sketch.add(key, [](size_t, uint16_t) {}) > count + 1 + 2.72 * 5000 / 1000;
  CHECK(beyond <= truth.size() * 0.0184);
}

TEST(Admission, CountsAreExactAndPerOccurrence) {
  for (uint32_t count : {1, 2, 5}) {
    AdmissionFilter filter({.count = count, .memory = 1 << 20});
    Obvious expected{count, {}, {}};
    std::mt19937_64 random(count);
    for (int batch = 0; batch < 50; ++batch) {
      const Batch ids = random_batch(random, random() % 300, 400);
      CHECK(plan(filter, ids) == expected.plan(ids));
      filter.train(filter.planned(), true);
      check_state(filter, expected);
    }
    CHECK_EQ(filter.stats().keys_admitted, expected.admitted.size());
    CHECK_EQ(filter.stats().counters_dropped, 0u);
  }
}

TEST(Admission, AKeyIsAdmittedWithAllItsOccurrencesOfTheBatch) {
  AdmissionFilter filter({.count = 3});
  CHECK(plan(filter, {7, 7, 8}) == std::vector<uint8_t>({1, 1, 1}));
  CHECK(plan(filter, {8, 7, 9, 8}) == std::vector<uint8_t>({0, 0, 1, 0}));
}

TEST(Admission, SkipsIdsThatAreNotCounted) {
  AdmissionFilter filter({.count = 2});
  const Batch ids{7, 7, 8, 8};
  const std::vector<uint8_t> counted{1, 0, 1, 1};
  std::vector<uint8_t> refused(4);
  filter.plan(ids.data(), ids.size(), refused.data(), counted.data());
  CHECK(refused == std::vector<uint8_t>({1, 1, 0, 0}));
}

// The saved state is that of the trained batches only, and rolling back the others restores it.
TEST(Admission, SavesAsTrainedAndRollsBack) {
  std::mt19937_64 random(5);
  for (AdmissionKind kind : {AdmissionKind::kExact, AdmissionKind::kSketch}) {
    // Memory of 200 counters: some batches drop counters.
    const AdmissionRule rule{.kind = kind, .count = 3, .memory = 250 * KeyCounts::kSlotBytes};
    AdmissionFilter ahead(rule), serial(rule);
    std::vector<Batch> batches;
    for (int i = 0; i < 60; ++i) batches.push_back(random_batch(random, 60, 900));
    size_t planned = 0, trained = 0;
    while (trained < batches.size()) {
      const size_t until = std::min(batches.size(), trained + 1 + random() % 12);
      for (; planned < until; ++planned) plan(ahead, batches[planned]);
      if (random() % 4 == 0) {  // a pipeline is closed: what it planned ahead is planned again
        ahead.roll_back(trained);
        planned = trained;
        continue;
      }
      const std::vector<uint8_t> refused = plan(serial, batches[trained]);
      ++trained;
      ahead.train(trained, true);
      serial.train(trained, true);
      const AdmissionState a = ahead.save(), b = serial.save();
      CHECK_EQ(a.batches, b.batches);
      CHECK_EQ(a.dropped, b.dropped);
      CHECK(a.keys == b.keys && a.counts == b.counts && a.cells == b.cells);
      std::vector<uint8_t> read(batches[trained - 1].size());
      ahead.read(batches[trained - 1].data(), read.size(), read.data());
      CHECK(read == refused);
    }
    if (kind == AdmissionKind::kExact) CHECK(ahead.stats().counters_dropped > 0);
    CHECK_EQ(ahead.stats().ids_refused, serial.stats().ids_refused);
    CHECK_EQ(ahead.stats().keys_admitted, serial.stats().keys_admitted);
  }
}

TEST(Admission, ContinuesFromASavedState) {
  std::mt19937_64 random(6);
  for (AdmissionKind kind : {AdmissionKind::kExact, AdmissionKind::kSketch, AdmissionKind::kProbability}) {
    const AdmissionRule rule{.kind = kind, .count = 4, .probability = 0.1, .memory = 1 << 14, .seed = 3};
    AdmissionFilter one(rule);
    std::set<uint64_t> rows;
    for (int i = 0; i < 20; ++i) {
      const Batch ids = random_batch(random, 80, 300);
      const auto refused = plan(one, ids);
      one.train(one.planned(), true);
      for (size_t j = 0; j < ids.size(); ++j)
        if (!refused[j]) rows.insert(ids[j]);
    }
    const Batch ahead = random_batch(random, 80, 300);
    plan(one, ahead);  // planned, not trained: not in the saved state
    AdmissionFilter two(rule);
    const Batch admitted(rows.begin(), rows.end());
    two.admit(admitted.data(), admitted.size());
    two.load(one.save());
    one.roll_back(20);
    for (int i = 0; i < 20; ++i) {
      const Batch ids = random_batch(random, 80, 300);
      CHECK(plan(one, ids) == plan(two, ids));
    }
  }
}

TEST(Admission, DropsTheSmallestCountsBeyondItsMemory) {
  AdmissionFilter filter({.count = 10, .memory = 100 * KeyCounts::kSlotBytes});  // 80 counters
  Batch ids;
  for (uint64_t key = 0; key < 80; ++key)
    for (uint64_t i = 0; i < 1 + key / 20; ++i) ids.push_back(key);  // counts 1 to 4, 20 keys each
  plan(filter, ids);
  filter.train(1, true);
  CHECK_EQ(filter.save().keys.size(), 80u);
  CHECK_EQ(filter.stats().counters_dropped, 0u);
  plan(filter, {1000});
  filter.train(2, true);
  const AdmissionState state = filter.save();
  CHECK_EQ(state.dropped, 40u);
  CHECK_EQ(state.keys.size(), 41u);
  CHECK_EQ(state.keys.front(), 40u);  // counts 3 and 4 stay
  CHECK_EQ(state.keys.back(), 1000u);
  CHECK(filter.stats().counter_bytes <= 100 * KeyCounts::kSlotBytes);
}

TEST(Admission, AdmitsWithTheGivenProbability) {
  const AdmissionRule rule{.kind = AdmissionKind::kProbability, .probability = 0.25, .seed = 9, .table = 1};
  AdmissionFilter filter(rule), again(rule);
  Batch ids(40000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  const auto refused = plan(filter, ids);
  CHECK(refused == plan(again, ids));
  const auto admitted = std::count(refused.begin(), refused.end(), 0);
  CHECK(admitted > 9700 && admitted < 10300);
  const auto later = plan(filter, ids);  // another draw, and admitted keys stay admitted
  const auto second = std::count(later.begin(), later.end(), 0);
  CHECK(second > 17100 && second < 17900);
}

TEST(Admission, ForgottenKeysCountFromZero) {
  AdmissionFilter filter({.count = 2});
  plan(filter, {1, 1, 2});
  CHECK_THROWS(Error, filter.forget(nullptr, 0));
  filter.train(1, true);
  const Batch keys{1, 2};
  filter.forget(keys.data(), keys.size());
  CHECK(plan(filter, {1, 2}) == std::vector<uint8_t>({1, 1}));
  CHECK(plan(filter, {1, 2}) == std::vector<uint8_t>({0, 0}));
}

TEST(Admission, SavesAdmittedKeysWithoutARow) {
  AdmissionFilter filter({.count = 1});
  plan(filter, {5, 3});
  filter.train(1, false);
  plan(filter, {4});
  filter.train(2, true);
  const AdmissionState state = filter.save();
  CHECK(state.admitted == Batch({3, 5}));
  AdmissionFilter other({.count = 2});
  other.load(state);
  CHECK(plan(other, {3, 4}) == std::vector<uint8_t>({0, 1}));
}

// Plans the unique keys of a batch with their occurrences, as an owner does; returns the decision per id.
std::vector<uint8_t> plan_keys(AdmissionFilter& filter, const Batch& ids, const std::vector<uint8_t>* drawn = nullptr) {
  std::map<uint64_t, std::pair<uint32_t, uint32_t>> occurrences;  // counted, all
  for (size_t i = 0; i < ids.size(); ++i) {
    occurrences[ids[i]].first += drawn ? (*drawn)[i] : 1;
    ++occurrences[ids[i]].second;
  }
  Batch keys;
  std::vector<uint32_t> counted, all;
  for (const auto& [key, numbers] : occurrences) {
    keys.push_back(key);
    counted.push_back(numbers.first);
    all.push_back(numbers.second);
  }
  std::vector<uint8_t> refused(keys.size());
  filter.plan_keys(keys.data(), counted.data(), all.data(), keys.size(), refused.data());
  std::map<uint64_t, uint8_t> by_key;
  for (size_t i = 0; i < keys.size(); ++i) by_key[keys[i]] = refused[i];
  std::vector<uint8_t> result;
  for (uint64_t id : ids) result.push_back(by_key[id]);
  return result;
}

TEST(Admission, CountsOfKeysGiveTheDecisionsOfTheirOccurrences) {
  const AdmissionRule rules[] = {{.count = 5},
                                 {.kind = AdmissionKind::kSketch, .count = 5, .memory = 1 << 20},
                                 {.kind = AdmissionKind::kProbability, .probability = 0.2, .seed = 7, .table = 3}};
  for (const AdmissionRule& rule : rules) {
    std::mt19937_64 random(4);
    AdmissionFilter ids_filter(rule), keys_filter(rule);
    for (uint64_t batch = 1; batch <= 40; ++batch) {
      const Batch ids = random_batch(random, 50, 100);
      std::vector<uint8_t> drawn(ids.size(), 1);
      if (rule.kind == AdmissionKind::kProbability) {
        keys_filter.draw(ids.data(), 20, batch, 0, drawn.data());  // in two parts, as ranks do
        keys_filter.draw(ids.data() + 20, ids.size() - 20, batch, 20, drawn.data() + 20);
      }
      CHECK(plan_keys(keys_filter, ids, &drawn) == plan(ids_filter, ids));
      if (batch % 7 == 0) {
        keys_filter.roll_back(batch - 1);
        plan_keys(keys_filter, ids, &drawn);
      }
      if (batch % 3 == 0) {
        ids_filter.train(batch, true);
        keys_filter.train(batch, true);
        CHECK(ids_filter.admitted() == keys_filter.admitted());
      }
    }
    CHECK_EQ(ids_filter.stats().ids_refused, keys_filter.stats().ids_refused);
    CHECK_EQ(ids_filter.stats().keys_admitted, keys_filter.stats().keys_admitted);
    CHECK(ids_filter.save().counts == keys_filter.save().counts);
  }
}

// Also where counters are dropped, and where keys collide in a sketch.
TEST(Admission, IdsAreCountedAsTheirKeysInTheOrderOfFirstOccurrence) {
  const AdmissionRule rules[] = {{.count = 4, .memory = 100 * KeyCounts::kSlotBytes},
                                 {.kind = AdmissionKind::kSketch, .count = 4, .memory = 4 * 2 * 40}};
  Dedup dedup(1);
  for (const AdmissionRule& rule : rules) {
    std::mt19937_64 random(8);
    AdmissionFilter ids_filter(rule), keys_filter(rule);
    for (uint64_t batch = 1; batch <= 60; ++batch) {
      const Batch ids = random_batch(random, 100, 300);
      const WorkingSet set = dedup.run(ids.data(), ids.size());
      std::vector<uint32_t> counts(set.unique);
      for (size_t u = 0; u < set.unique; ++u) counts[u] = set.starts[u + 1] - set.starts[u];
      std::vector<uint8_t> of_keys(set.unique), of_ids;
      keys_filter.plan_keys(set.keys.get(), counts.data(), counts.data(), set.unique, of_keys.data());
      for (size_t i = 0; i < ids.size(); ++i) of_ids.push_back(of_keys[set.inverse[i]]);
      CHECK(plan(ids_filter, ids) == of_ids);
      ids_filter.train(batch, true);
      keys_filter.train(batch, true);
      const AdmissionState a = ids_filter.save(), b = keys_filter.save();
      CHECK(a.keys == b.keys && a.counts == b.counts && a.cells == b.cells);
      CHECK_EQ(a.dropped, b.dropped);
    }
    if (rule.kind == AdmissionKind::kExact) CHECK(ids_filter.stats().counters_dropped > 0);
    CHECK_EQ(ids_filter.stats().ids_refused, keys_filter.stats().ids_refused);
  }
}

TEST(Admission, AWorkingSetIsPlannedAsItsIds) {
  std::mt19937_64 random(11);
  Dedup dedup(1);
  for (AdmissionKind kind : {AdmissionKind::kExact, AdmissionKind::kSketch}) {
    const AdmissionRule rule{.kind = kind, .count = 3, .memory = 4 << 10};  // counters are dropped
    AdmissionFilter by_set(rule), by_ids(rule);
    for (uint64_t batch = 1; batch <= 30; ++batch) {
      const Batch ids = random_batch(random, random() % 400, 600);
      const WorkingSet set = dedup.run(ids.data(), ids.size());
      std::vector<uint8_t> refused(ids.size(), 7), expected(ids.size());
      const uint64_t count = by_set.plan_working_set(
          {set.ids, set.unique, set.keys.get(), set.inverse.get(), set.starts.get(), set.order.get()}, refused.data());
      by_ids.plan(ids.data(), ids.size(), expected.data());
      CHECK(refused == expected);
      CHECK_EQ(count, static_cast<uint64_t>(std::count(expected.begin(), expected.end(), 1)));
      by_set.train(batch, true);
      by_ids.train(batch, true);
      CHECK(by_set.save().keys == by_ids.save().keys);
      CHECK(by_set.save().cells == by_ids.save().cells);
    }
    CHECK_EQ(by_set.stats().ids_refused, by_ids.stats().ids_refused);
  }
}

TEST(Admission, CountsItsWorkingMemoryAndKeepsLittle) {
  AdmissionFilter filter({.count = 2, .memory = 1 << 20});
  Batch ids(1000);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<uint8_t> refused(200000);
  filter.plan(ids.data(), ids.size(), refused.data());
  const uint64_t kept = filter.stats().working_bytes;
  CHECK(kept >= 1000 * 36 && kept <= 1000 * 64);
  CHECK_EQ(filter.stats().peak_working_bytes, kept);
  ids.resize(200000);
  std::iota(ids.begin(), ids.end(), 0);
  filter.plan(ids.data(), ids.size(), refused.data());
  CHECK(filter.stats().peak_working_bytes >= 199000 * 36);
  CHECK(filter.stats().working_bytes <= 1 << 20);
}

TEST(Admission, KeysThatWereTrainedHaveARow) {
  AdmissionFilter filter({.count = 1});
  plan(filter, {5, 3, 4});
  const Batch trained = {3, 9, 5};
  uint8_t refused[3];
  filter.peek(trained.data(), 3, refused);
  CHECK(refused[0] == 0 && refused[1] == 1 && refused[2] == 0);
  filter.train(1, false);
  filter.set_stored(trained.data(), 3);
  CHECK(filter.save().admitted == Batch({4}));
}

TEST(Admission, ReadsAsOfTheLastTrainedBatch) {
  AdmissionFilter filter({.count = 1});
  plan(filter, {5});
  uint8_t refused = 0;
  const uint64_t key = 5;
  filter.read(&key, 1, &refused);
  CHECK_EQ(int{refused}, 1);
  filter.train(1, true);
  filter.read(&key, 1, &refused);
  CHECK_EQ(int{refused}, 0);
  CHECK_EQ(filter.planned(), 1u);
}

}  // namespace
}  // namespace thermocline
