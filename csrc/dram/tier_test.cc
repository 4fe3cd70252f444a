#include "dram/tier.h"

#include <random>
#include <unordered_map>
#include <vector>

#include "dram/tier_test_util.h"
#include "testing/test.h"
#include "util/error.h"
#include "util/hash.h"

namespace thermocline {
namespace {

TEST(DramTier, FullCapacityFitsForAnyKeys) {
  MapStore store(kLayout.bytes());
  for (int shards : {1, 4, 64}) {
    DramTier tier(options(1 << 18, Policy::kLruLfu, 2, shards), &store);
    CHECK(tier.stats().bytes_total <= tier.stats().budget);
    for (uint64_t first : {uint64_t{0}, uint64_t{1} << 40, ~uint64_t{0} - tier.capacity() + 1}) {
      auto keys = range(0, tier.capacity());
      for (auto& k : keys) k += first;
      auto slots = pull(tier, keys);
      tier.check(false);
      CHECK_EQ(tier.stats().pinned, tier.capacity());
      tier.unpin(slots.data(), slots.size(), false);
      tier.check(true);
    }
  }
}

// The index of a shard doubles while rows arrive one batch after another, and keeps every key.
TEST(DramTier, IndexGrowsWithItsRows) {
  MapStore store(kLayout.bytes());
  for (int shards : {1, 8}) {
    DramTier tier(options(size_t{4} << 20, Policy::kLruLfu, 2, shards), &store);
    std::mt19937_64 random(shards);
    std::vector<uint64_t> keys(tier.capacity());
    for (auto& k : keys) k = random();
    std::vector<uint32_t> slots;
    for (size_t begin = 0, n = 1; begin < keys.size(); begin += n, n = n * 3 / 2 + 1) {
      n = std::min(n, keys.size() - begin);
      const auto more = pull(tier, {keys.begin() + begin, keys.begin() + begin + n});
      slots.insert(slots.end(), more.begin(), more.end());
      tier.check(false);
      const auto again = pull(tier, {keys.begin(), keys.begin() + begin + n});
      CHECK(again == slots);
      tier.unpin(again.data(), again.size(), false);
    }
    CHECK_EQ(tier.stats().resident, tier.capacity());
    tier.unpin(slots.data(), slots.size(), true);
    pull(tier, range(0, 100));  // evicts
    tier.check(false);
  }
}

TEST(DramTier, FailedPullOverTheBudgetLeavesNoPins) {
  MapStore store(kLayout.bytes());
  for (RowStore* lower : {static_cast<RowStore*>(&store), static_cast<RowStore*>(nullptr)}) {
    DramTier tier(options(1 << 16), lower);
    auto slots = pull(tier, range(0, 10));
    CHECK_THROWS(BudgetError, pull(tier, range(0, tier.capacity() + 1)));
    CHECK_THROWS(BudgetError, pull(tier, range(10, tier.capacity() + 1)));
    CHECK_EQ(tier.stats().pinned, 10u);
    tier.unpin(slots.data(), slots.size(), false);
    tier.check(true);
    CHECK_EQ(pull(tier, range(0, tier.capacity())).size(), tier.capacity());
  }
}

TEST(DramTier, TierWithoutStoreEvictsNothing) {
  DramTier tier(options(1 << 16), nullptr);
  auto keys = range(0, tier.capacity());
  auto slots = pull(tier, keys);
  tier.unpin(slots.data(), slots.size(), true);
  CHECK_THROWS(BudgetError, pull(tier, {~uint64_t{0}}));
  CHECK_THROWS(Error, tier.flush());
  tier.check(true);
}

TEST(DramTier, InvalidBudgetOrStoreThrows) {
  CHECK_THROWS(BudgetError, DramTier(options(100), nullptr));
  MapStore wrong(kLayout.bytes() + 4);
  CHECK_THROWS(Error, DramTier(options(1 << 20), &wrong));
}

// Keys crafted to have hashes of one shard are refused without side effects.
TEST(DramTier, CraftedKeysThatFillOneShardAreRefused) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20, Policy::kLruLfu, 2, 256), &store);
  std::vector<uint64_t> keys;
  for (uint64_t k = 0; keys.size() < 300; ++k) {
    if (mem_hash(hash_key(k)) >> 56 == 7) keys.push_back(k);
  }
  CHECK(keys.size() < tier.capacity());
  CHECK_THROWS(BudgetError, pull(tier, keys));
  tier.check(true);
  keys.resize(40);
  auto slots = pull(tier, keys);
  tier.unpin(slots.data(), slots.size(), false);
  tier.check(true);
}

TEST(DramTier, UnpinningTwiceIsAnError) {
  DramTier tier(options(1 << 16), nullptr);
  auto slots = pull(tier, {1, 2});
  tier.unpin(slots.data(), 2, false);
  CHECK_THROWS(Error, tier.unpin(slots.data(), 2, false));
  tier.check(true);
}

TEST(DramTier, RepeatedKeysArePinnedOncePerOccurrence) {
  DramTier tier(options(1 << 16), nullptr);
  auto slots = pull(tier, {7, 8, 7, 7});
  CHECK_EQ(slots[0], slots[2]);
  CHECK_EQ(slots[0], slots[3]);
  CHECK(slots[0] != slots[1]);
  tier.unpin(slots.data(), 3, false);
  CHECK_EQ(tier.stats().pinned, 1u);
  tier.unpin(slots.data() + 3, 1, false);
  tier.check(true);
}

TEST(DramTier, OneGetPerBatchAndLargePuts) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  const uint64_t cap = tier.capacity(), batch = cap / 32;
  int pulls = 0;
  for (uint64_t first = 0; first < 4 * cap; first += batch, ++pulls) {
    auto slots = pull(tier, range(first, first + batch));
    tier.unpin(slots.data(), slots.size(), true);
  }
  CHECK_EQ(store.gets.load(), pulls);
  CHECK(store.puts.load() <= pulls);
  CHECK(tier.stats().evictions >= 3 * cap);
  CHECK_EQ(tier.stats().evictions, tier.stats().flushed);
  tier.check(true);
}

TEST(DramTier, CleanRowsAreNotWritten) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16), &store);
  for (uint64_t first = 0; first < 5000; first += 100) {
    auto slots = pull(tier, range(first, first + 100));
    tier.unpin(slots.data(), slots.size(), false);
  }
  CHECK_EQ(store.puts.load(), 0);
  CHECK(tier.stats().evictions > 0);
  tier.check(true);
}

TEST(DramTier, FailedGetRollsBack) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16), &store);
  auto kept = pull(tier, range(0, 50));
  store.fail_gets = true;
  CHECK_THROWS(IoError, pull(tier, range(40, 90)));
  CHECK_EQ(tier.stats().pinned, 50u);
  CHECK_EQ(tier.stats().resident, 50u);
  store.fail_gets = false;
  auto again = pull(tier, range(40, 90));
  tier.unpin(again.data(), again.size(), false);
  tier.unpin(kept.data(), kept.size(), false);
  tier.check(true);
}

TEST(DramTier, FailedPutLosesNothing) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16), &store);
  const uint64_t cap = tier.capacity();
  auto slots = pull(tier, range(0, cap));
  for (uint64_t k = 0; k < cap; ++k) row_at(tier, slots[k])[0] = static_cast<float>(k);
  tier.unpin(slots.data(), cap, true);
  store.fail_puts = true;
  CHECK_THROWS(DiskFullError, pull(tier, range(cap, cap + 100)));
  CHECK_THROWS(DiskFullError, tier.flush());
  CHECK_EQ(tier.stats().dirty, cap);
  tier.check(true);
  store.fail_puts = false;
  auto other = pull(tier, range(cap, 2 * cap));
  tier.unpin(other.data(), cap, false);
  slots = pull(tier, range(0, cap));
  for (uint64_t k = 0; k < cap; ++k) CHECK_EQ(row_at(tier, slots[k])[0], static_cast<float>(k));
  tier.unpin(slots.data(), cap, false);
  tier.check(true);
}

TEST(DramTier, FlushWritesDirtyRowsOnce) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 18), &store);
  auto slots = pull(tier, range(0, 1000));
  tier.unpin(slots.data(), 10, true);
  tier.flush();
  CHECK_EQ(store.size(), 10u);
  CHECK_EQ(tier.stats().dirty, 0u);
  tier.flush();
  CHECK_EQ(tier.stats().flushed, 10u);
  tier.unpin(slots.data() + 10, 990, false);
  MapStore elsewhere(kLayout.bytes());
  std::vector<Row> rows(3);
  const uint64_t keys[] = {5, 6, 2000};
  tier.push(keys, 3, reinterpret_cast<const uint8_t*>(rows.data()), true);
  tier.flush(&elsewhere);
  CHECK_EQ(elsewhere.size(), 3u);
  tier.check(true);
}

TEST(DramTier, ReadInsertsNothing) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16), &store);
  const uint64_t keys[] = {3, 4, 3};
  std::vector<Row> rows(3);
  tier.read(keys, 3, reinterpret_cast<uint8_t*>(rows.data()));
  for (int i = 0; i < 3; ++i) CHECK(rows[i] == initial_row(tier, keys[i]));
  CHECK_EQ(tier.stats().resident, 0u);
  CHECK_EQ(store.size(), 0u);
}

TEST(DramTier, PaddedRowsAreStoredWithoutPadding) {
  CHECK_EQ(row_stride(128), size_t{128});
  CHECK_EQ(row_stride(156), size_t{160});
  CHECK_EQ(row_stride(1052), size_t{1056});  // 1,088 would add more than a 32nd
  CHECK_EQ(row_stride(1056), size_t{1088});
  CHECK_EQ(row_stride(80), size_t{80});
  for (size_t bytes = 4; bytes < 5000; bytes += 4) {
    CHECK(row_stride(bytes) >= bytes && 32 * (row_stride(bytes) - bytes) <= bytes);
  }
  TierOptions o = options(60'000);
  o.layout = {.dim = 16, .optimizer = Optimizer::kAdagrad, .statistics = 31};
  const size_t bytes = o.layout.bytes(), words = bytes / sizeof(float);
  CHECK_EQ(bytes, size_t{156});
  MapStore store(bytes);
  DramTier tier(o, &store);
  CHECK_EQ(tier.rows().stride, size_t{160});
  CHECK(tier.stats().bytes_rows == 160 * tier.stats().capacity && tier.stats().bytes_total <= o.budget);
  const auto row_of = [&](uint64_t key) { return std::vector<float>(words, static_cast<float>(key)); };
  const std::vector<uint64_t> keys = range(0, 3 * tier.stats().capacity);
  std::vector<uint8_t> pushed;
  for (uint64_t key : keys) {
    const auto row = row_of(key);
    pushed.insert(pushed.end(), reinterpret_cast<const uint8_t*>(row.data()),
                  reinterpret_cast<const uint8_t*>(row.data() + words));
  }
  tier.push(keys.data(), keys.size(), pushed.data(), true);  // most are evicted
  CHECK(store.size() > keys.size() / 2);
  const size_t part = tier.stats().capacity / 4;
  for (size_t first = 0; first + part <= keys.size(); first += part) {
    const std::vector<uint64_t> some = range(first, first + part);
    const auto slots = pull(tier, some);
    for (size_t i = 0; i < part; ++i) CHECK(std::memcmp(row_at(tier, slots[i]), row_of(some[i]).data(), bytes) == 0);
    tier.unpin(slots.data(), slots.size(), false);
  }
  std::vector<uint8_t> rows(keys.size() * bytes);
  tier.read(keys.data(), keys.size(), rows.data());
  CHECK(rows == pushed);
  tier.flush();
  CHECK_EQ(store.size(), keys.size());
  tier.check(true);
}

TEST(DramTier, LruEvictsTheOldestAndLfuTheLeastVisited) {
  MapStore store(kLayout.bytes());
  for (Policy policy : {Policy::kLru, Policy::kLfu, Policy::kLruLfu}) {
    DramTier tier(options(1 << 16, policy, 1, 1), &store);
    const uint64_t cap = tier.capacity();
    const auto visit = [&](const std::vector<uint64_t>& keys) {
      auto slots = pull(tier, keys);
      tier.unpin(slots.data(), slots.size(), false);
    };
    for (int i = 0; i < 5; ++i) visit(range(0, cap / 4));                                // often, but early
    for (uint64_t k = cap / 4; k < 8 * cap; k += cap / 8) visit(range(k, k + cap / 8));  // once each
    const auto before = tier.stats().hits;
    visit(range(0, cap / 4));
    const auto kept = tier.stats().hits - before;
    CHECK_EQ(kept, policy == Policy::kLru ? 0 : cap / 4);
    tier.check(true);
  }
}

// Two tiers that differ only in threads choose the same victims.
TEST(DramTier, EvictionDoesNotDependOnThreads) {
  std::vector<TierStats> all;
  for (int threads : {1, 2, 4}) {
    MapStore store(kLayout.bytes());
    DramTier tier(options(1 << 18, Policy::kLruLfu, threads, 8), &store);
    std::mt19937_64 random(1);
    for (int i = 0; i < 60; ++i) {
      std::vector<uint64_t> keys;
      for (int j = 0; j < 1500; ++j) keys.push_back(random() % 20000);
      auto slots = pull(tier, keys);
      tier.unpin(slots.data(), slots.size(), i % 2);
    }
    all.push_back(tier.stats());
  }
  for (const auto& t : all) {
    CHECK_EQ(t.hits, all[0].hits);
    CHECK_EQ(t.evictions, all[0].evictions);
    CHECK_EQ(t.flushed, all[0].flushed);
    CHECK_EQ(t.from_store, all[0].from_store);
  }
  CHECK(all[0].evictions > 1000);
}

// A lookup without the shard's mutex finds the first of two keys whose hashes are equal in all bits that the index
// stores; the other must be found as well.
TEST(DramTier, KeysWithEqualTagsHaveTheirOwnRows) {
  std::unordered_map<uint32_t, uint64_t> seen;  // by tag, the low bits of the hash
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; keys.size() < 4; ++key) {
    const auto [first, added] = seen.try_emplace(static_cast<uint32_t>(mem_hash(hash_key(key))), key);
    if (!added) keys.insert(keys.end(), {first->second, key});
  }
  DramTier tier(options(1 << 20, Policy::kLruLfu, 1, 1), nullptr);
  std::vector<Row> rows(4), read(4);
  for (float round : {1.0f, 2.0f}) {  // inserted, then replaced
    for (size_t i = 0; i < 4; ++i) rows[i].fill(round * static_cast<float>(i + 1));
    tier.push(keys.data(), 4, reinterpret_cast<uint8_t*>(rows.data()), true, true);
    CHECK_EQ(tier.read(keys.data(), 4, reinterpret_cast<uint8_t*>(read.data())).resident, size_t{4});
    CHECK(read == rows);
  }
  tier.check(true);
}

}  // namespace
}  // namespace thermocline
