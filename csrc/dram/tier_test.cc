#include "dram/tier.h"

#include <array>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <unordered_map>

#include "testing/test.h"
#include "util/error.h"
#include "util/hash.h"

namespace thermocline {
namespace {

// The obvious store. Can be told to fail, and counts what is asked of it.
class MapStore : public RowStore {
 public:
  explicit MapStore(size_t row_bytes) : row_bytes_(row_bytes) {}
  size_t row_bytes() const override { return row_bytes_; }
  void get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) override {
    std::lock_guard lock(mutex_);
    ++gets;
    if (fail_gets) throw IoError("get fails", EIO);
    for (size_t i = 0; i < n; ++i) {
      auto it = rows_.find(keys[i]);
      found[i] = it != rows_.end();
      if (found[i]) std::memcpy(rows.at(i), it->second.data(), row_bytes_);
    }
  }
  void put(const uint64_t* keys, size_t n, RowsIn rows) override {
    std::lock_guard lock(mutex_);
    ++puts;
    if (fail_puts) throw DiskFullError("put fails", ENOSPC);
    for (size_t i = 0; i < n; ++i) rows_[keys[i]].assign(rows.at(i), rows.at(i) + row_bytes_);
  }
  size_t size() const { return rows_.size(); }

  std::atomic<int> gets{0}, puts{0};
  std::atomic<bool> fail_gets{false}, fail_puts{false};

 private:
  const size_t row_bytes_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::vector<uint8_t>> rows_;
};

constexpr RowLayout kLayout{4, Optimizer::kSgd};

TierOptions options(size_t budget, Policy policy = Policy::kLruLfu, int threads = 2, int shards = 4) {
  TierOptions o;
  o.layout = kLayout;
  o.initial = {InitialKind::kUniform, 0.5f, 0, 1, 2};
  o.budget = budget;
  o.policy = policy;
  o.threads = threads;
  o.shards = shards;
  return o;
}

using Row = std::array<float, 4>;

Row initial_row(const DramTier& tier, uint64_t key) {
  Row row;
  tier.initial().write(key, row.data());
  return row;
}

float* row_at(DramTier& tier, uint32_t slot) {
  return reinterpret_cast<float*>(tier.rows().base + slot * tier.rows().stride);
}

std::vector<uint32_t> pull(DramTier& tier, const std::vector<uint64_t>& keys) {
  std::vector<uint32_t> slots(keys.size());
  tier.pull(keys.data(), keys.size(), slots.data());
  return slots;
}

std::vector<uint64_t> range(uint64_t begin, uint64_t end) {
  std::vector<uint64_t> keys;
  for (uint64_t k = begin; k < end; ++k) keys.push_back(k);
  return keys;
}

TEST(DramTier, AnyKeysOfTheCapacityFit) {
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

TEST(DramTier, TooLargeAWorkingSetLeavesNothingPinned) {
  MapStore store(kLayout.bytes());
  for (RowStore* below : {static_cast<RowStore*>(&store), static_cast<RowStore*>(nullptr)}) {
    DramTier tier(options(1 << 16), below);
    auto slots = pull(tier, range(0, 10));
    CHECK_THROWS(BudgetError, pull(tier, range(0, tier.capacity() + 1)));
    CHECK_THROWS(BudgetError, pull(tier, range(10, tier.capacity() + 1)));
    CHECK_EQ(tier.stats().pinned, 10u);
    tier.unpin(slots.data(), slots.size(), false);
    tier.check(true);
    CHECK_EQ(pull(tier, range(0, tier.capacity())).size(), tier.capacity());
  }
}

TEST(DramTier, MemoryOnlyNeverForgets) {
  DramTier tier(options(1 << 16), nullptr);
  auto keys = range(0, tier.capacity());
  auto slots = pull(tier, keys);
  tier.unpin(slots.data(), slots.size(), true);
  CHECK_THROWS(BudgetError, pull(tier, {~uint64_t{0}}));
  CHECK_THROWS(Error, tier.flush());
  tier.check(true);
}

TEST(DramTier, TooSmallABudgetSaysTheLeast) {
  CHECK_THROWS(BudgetError, DramTier(options(100), nullptr));
  MapStore wrong(kLayout.bytes() + 4);
  CHECK_THROWS(Error, DramTier(options(1 << 20), &wrong));
}

// Hashing spreads keys over shards; keys chosen to defeat it are refused, and nothing is lost.
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

TEST(DramTier, FlushWritesWhatIsDirtyOnce) {
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

TEST(DramTier, LruEvictsTheOldestAndLfuTheRarest) {
  MapStore store(kLayout.bytes());
  for (Policy policy : {Policy::kLru, Policy::kLfu, Policy::kLruLfu}) {
    DramTier tier(options(1 << 16, policy, 1, 1), &store);
    const uint64_t cap = tier.capacity();
    const auto visit = [&](const std::vector<uint64_t>& keys) {
      auto slots = pull(tier, keys);
      tier.unpin(slots.data(), slots.size(), false);
    };
    for (int i = 0; i < 5; ++i) visit(range(0, cap / 4));                                // often, long ago
    for (uint64_t k = cap / 4; k < 8 * cap; k += cap / 8) visit(range(k, k + cap / 8));  // once, one after the other
    const auto before = tier.stats().hits;
    visit(range(0, cap / 4));
    const auto kept = tier.stats().hits - before;
    CHECK_EQ(kept, policy == Policy::kLru ? 0 : cap / 4);
    tier.check(true);
  }
}

// Two tiers that differ only in threads choose the same victims.
TEST(DramTier, PlansDoNotDependOnThreads) {
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

// Each worker adds one to the rows of random working sets; workers lock rows they share through `owners`. At the end
// every row must count its additions: no update lost, whatever was evicted, loaded or flushed meanwhile.
void stress(Policy policy, int workers, int rounds, double budget_share) {
  constexpr uint64_t kKeys = 3000;
  MapStore store(kLayout.bytes());
  // About 90 bytes per row of 16: rows, metadata, index, buffers.
  DramTier tier(options(static_cast<size_t>(kKeys * 90 * budget_share), policy, 2, 4), &store);
  std::vector<std::atomic<uint32_t>> expected(kKeys);
  std::vector<std::mutex> row_locks(kKeys);
  std::mutex error_mutex;
  std::string error;
  std::atomic<int> running{workers};
  const auto work = [&](int id) {
    try {
      std::mt19937_64 random(id + 100);
      for (int r = 0; r < rounds; ++r) {
        std::vector<uint64_t> keys;
        const uint64_t skew = random() % kKeys + 1;
        for (uint64_t k = random() % 50; k < kKeys; k += 1 + random() % 60) keys.push_back((k + skew) % kKeys);
        std::vector<uint32_t> slots;
        while (slots.empty()) {
          try {
            slots = pull(tier, keys);
          } catch (const BudgetError&) {
            std::this_thread::yield();  // the other workers hold too many
          }
        }
        for (size_t i = 0; i < keys.size(); ++i) {
          std::lock_guard lock(row_locks[keys[i]]);
          row_at(tier, slots[i])[1] += 1;
          ++expected[keys[i]];
        }
        tier.unpin(slots.data(), slots.size(), true);
      }
    } catch (const std::exception& e) {
      std::lock_guard lock(error_mutex);
      error = e.what();
    }
    --running;
  };
  std::vector<std::thread> threads;
  for (int id = 0; id < workers; ++id) threads.emplace_back(work, id);
  while (running > 0) {
    tier.make_room(10);
    tier.check(false);
    std::this_thread::yield();
  }
  for (auto& t : threads) t.join();
  CHECK_EQ(error, std::string());
  CHECK(tier.stats().evictions > kKeys);
  tier.check(true);
  const auto keys = range(0, kKeys);
  std::vector<Row> rows(kKeys);
  tier.flush();
  tier.read(keys.data(), kKeys, reinterpret_cast<uint8_t*>(rows.data()));
  for (uint64_t k = 0; k < kKeys; ++k) {
    Row want = initial_row(tier, k);
    for (uint32_t i = 0; i < expected[k]; ++i) want[1] += 1;
    CHECK(rows[k] == want);
  }
}

TEST(MemTierStress, SeveralPullersLoseNothing) {
  for (Policy policy : {Policy::kLruLfu, Policy::kLru, Policy::kLfu}) stress(policy, 3, 300, 0.2);
}

TEST(MemTierStress, AlmostNoRoom) { stress(Policy::kLruLfu, 4, 200, 0.09); }

TEST(MemTierStress, FailingStoreLosesNothing) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16, Policy::kLruLfu, 2, 4), &store);
  std::atomic<bool> stop{false};
  std::thread saboteur([&] {
    for (int i = 0; !stop; ++i) {
      store.fail_gets = i % 3 == 1;
      store.fail_puts = i % 3 == 2;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    store.fail_gets = store.fail_puts = false;
  });
  std::vector<std::thread> threads;
  std::vector<std::vector<uint32_t>> expected(2, std::vector<uint32_t>(4000, 0));
  for (int id = 0; id < 2; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937_64 random(id);
      for (int r = 0; r < 400; ++r) {
        std::vector<uint64_t> keys;  // even keys for one worker, odd ones for the other; both pull some of the other's
        for (uint64_t k = random() % 40; k < 4000; k += 1 + random() % 80) keys.push_back(k);
        std::vector<uint32_t> slots;
        try {
          slots = pull(tier, keys);
        } catch (const Error&) {
          continue;
        }
        for (size_t i = 0; i < keys.size(); ++i) {
          if (keys[i] % 2 != static_cast<uint64_t>(id)) continue;
          row_at(tier, slots[i])[2] += 1;
          ++expected[id][keys[i]];
        }
        tier.unpin(slots.data(), slots.size(), true);
      }
    });
  }
  for (auto& t : threads) t.join();
  stop = true;
  saboteur.join();
  tier.check(true);
  std::vector<Row> rows(4000);
  const auto keys = range(0, 4000);
  tier.read(keys.data(), keys.size(), reinterpret_cast<uint8_t*>(rows.data()));
  for (uint64_t k = 0; k < 4000; ++k) {
    Row want = initial_row(tier, k);
    for (uint32_t i = 0; i < expected[k % 2][k]; ++i) want[2] += 1;
    CHECK(rows[k] == want);
  }
}

}  // namespace
}  // namespace thermocline
