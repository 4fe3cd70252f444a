#include "dram/horizon.h"

#include <map>
#include <random>
#include <vector>

#include "dram/tier_test_util.h"
#include "testing/test.h"
#include "util/hash.h"

namespace thermocline {
namespace {

using Batches = std::vector<std::vector<uint64_t>>;

Batches random_batches(std::mt19937_64& random, size_t batches, size_t ids, uint64_t keys) {
  Batches out(batches);
  for (auto& batch : out) {
    batch.resize(ids);
    for (auto& id : batch) id = random() % (1 + random() % keys);
  }
  return out;
}

std::vector<std::vector<uint32_t>> add(Horizon& horizon, const Batches& batches) {
  std::vector<std::vector<uint32_t>> numbers;
  for (const auto& ids : batches) {
    numbers.emplace_back(ids.size());
    horizon.add(ids.data(), ids.size(), numbers.back().data());
    horizon.end_batch();
  }
  horizon.seal();
  return numbers;
}

TEST(Horizon, NumbersGiveTheIdsBackAndKeysAreUnique) {
  std::mt19937_64 random(1);
  for (int threads : {1, 3}) {
    DramTier tier(options(1 << 20, Policy::kLruLfu, threads), nullptr);
    Horizon horizon(tier);
    const Batches batches = random_batches(random, 5, 100000, 50000);
    const auto numbers = add(horizon, batches);
    std::map<uint64_t, int> unique;
    for (size_t b = 0; b < batches.size(); ++b) {
      std::vector<uint64_t> ids(batches[b].size());
      horizon.keys_of(numbers[b].data(), numbers[b].size(), ids.data());
      CHECK(ids == batches[b]);
      for (uint64_t id : ids) unique[id] = 1;
    }
    CHECK_EQ(horizon.unique(), unique.size());
    CHECK_EQ(horizon.batches(), 5u);
  }
}

TEST(Horizon, KeysAreGroupedByOwnerAndLastBatch) {
  DramTier tier(options(1 << 20), nullptr);
  Horizon horizon(tier);
  std::mt19937_64 random(7);
  const Batches batches = random_batches(random, 6, 400, 300);
  add(horizon, batches);
  std::map<uint64_t, size_t> last;
  for (size_t b = 0; b < batches.size(); ++b)
    for (uint64_t id : batches[b]) last[id] = b;
  for (uint32_t world : {1u, 3u}) {
    std::vector<uint64_t> keys(horizon.unique());
    std::vector<uint32_t> counts(world * batches.size());
    horizon.keys_by_owner(world, keys.data(), counts.data());
    std::map<uint64_t, size_t> found;
    size_t at = 0;
    for (uint32_t owner = 0; owner < world; ++owner)
      for (size_t b = 0; b < batches.size(); ++b)
        for (uint32_t i = 0; i < counts[owner * batches.size() + b]; ++i, ++at) {
          CHECK_EQ((hash_key(keys[at]) & 0xFFFF) * world >> 16, owner);
          found[keys[at]] = b;
        }
    CHECK_EQ(at, keys.size());
    CHECK(found == last);
  }
}

TEST(Horizon, RowsArePinnedUntilTheirLastUse) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  Horizon horizon(tier);
  std::mt19937_64 random(2);
  const Batches batches = random_batches(random, 8, 300, 400);
  add(horizon, batches);
  std::map<uint64_t, size_t> last;
  for (size_t b = 0; b < batches.size(); ++b)
    for (uint64_t id : batches[b]) last[id] = b;
  while (horizon.load(50)) {
  }
  CHECK_EQ(tier.stats().pinned, last.size());
  CHECK_EQ(tier.stats().loaded_ahead, last.size());
  CHECK_EQ(tier.stats().hits, 0u);
  for (size_t b = 0; b < batches.size(); ++b) {
    horizon.release(b);
    size_t left = 0;
    for (auto& [key, use] : last) left += use > b;
    CHECK_EQ(tier.stats().pinned, left);
    CHECK_EQ(horizon.pinned(), left);
  }
  tier.check(true);
}

TEST(Horizon, LoadsInHashOrder) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  Horizon horizon(tier);
  add(horizon, {range(0, 3000)});
  horizon.load(1000);
  uint64_t largest_loaded = 0;  // top byte of the hash
  size_t lower = 0;
  for (uint64_t key = 0; key < 3000; ++key) {
    // A resident key is found without the store.
    const int gets = store.gets;
    const auto slots = pull(tier, {key});
    if (store.gets == gets) largest_loaded = std::max(largest_loaded, hash_key(key) >> 56);
    tier.unpin(slots.data(), 1, false);
  }
  for (uint64_t key = 0; key < 3000; ++key) lower += hash_key(key) >> 56 < largest_loaded;
  CHECK(lower <= 1000);
}

TEST(Horizon, APartThatDoesNotFitChangesNothingAndCanBeRepeated) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(64 << 10), &store);
  const size_t capacity = tier.capacity();
  Horizon first(tier), second(tier);
  add(first, {range(0, capacity / 2)});
  add(second, {range(capacity, capacity + capacity * 3 / 4)});
  while (first.load(100)) {
  }
  size_t loaded = 0;
  const auto load_all = [&] {
    while (second.load(100)) loaded += 100;
  };
  CHECK_THROWS(BudgetError, load_all());
  CHECK_EQ(second.pinned(), loaded);
  first.release(0);
  while (second.load(100)) {
  }
  CHECK_EQ(second.pinned(), capacity * 3 / 4);
  second.drop();
  second.drop();
  tier.check(true);
}

TEST(Horizon, ReleaseAndDropEndLoading) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  {
    Horizon horizon(tier);
    add(horizon, {range(0, 100), range(50, 150)});
    CHECK(horizon.load(60));
    horizon.release(0);
    CHECK(!horizon.load(60));
    CHECK(horizon.pinned() > 0);
  }
  tier.check(true);  // the destructor unpins
  Horizon unused(tier);
  add(unused, {range(0, 10)});
  unused.drop();
  CHECK(!unused.load(10));
  tier.check(true);
}

// The caller's error between add() and end_batch(): the keys of the unfinished batch belong to a last batch.
TEST(Horizon, SealEndsAnUnfinishedBatch) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  {
    Horizon horizon(tier);
    const auto first = range(0, 10), second = range(5, 40);
    std::vector<uint32_t> numbers(second.size());
    horizon.add(first.data(), first.size(), numbers.data());
    horizon.end_batch();
    horizon.add(second.data(), second.size(), numbers.data());
    horizon.seal();
    CHECK_EQ(horizon.batches(), 2u);
    CHECK(!horizon.load(100));
    horizon.release(0);
    CHECK_EQ(tier.stats().pinned, second.size());
  }
  tier.check(true);
}

TEST(Horizon, CallsInTheWrongPhaseAreRefused) {
  DramTier tier(options(1 << 20), nullptr);
  Horizon horizon(tier);
  const uint64_t id = 5;
  uint32_t number = 0;
  uint64_t key = 0;
  horizon.add(&id, 1, &number);
  CHECK_THROWS(Error, horizon.load(1));
  CHECK_THROWS(Error, horizon.keys_of(&number, 1, &key));
  CHECK_THROWS(Error, horizon.keys_by_owner(1, &key, &number));
  horizon.end_batch();
  horizon.seal();
  CHECK_THROWS(Error, horizon.add(&id, 1, &number));
}

}  // namespace
}  // namespace thermocline
