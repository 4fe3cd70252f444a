// Write-back ahead of evictions: no row is lost, written twice needlessly or evicted too early, and pulls do not wait.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "dram/tier_test_util.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline {
namespace {

using namespace std::chrono_literals;

constexpr size_t kNoThread = size_t{1} << 60;  // a reserve that pulls never use up: only the test writes ahead
constexpr size_t kAll = 1 << 20;

TierOptions options_with(size_t write_ahead, size_t budget = 1 << 18) {
  TierOptions o = options(budget);
  o.write_ahead = write_ahead;
  return o;
}

// A store whose puts wait at a gate while it is closed.
class GatedStore : public MapStore {
 public:
  using MapStore::MapStore;
  void put(const uint64_t* keys, size_t n, RowsIn rows) override {
    {
      std::unique_lock lock(mutex_);
      ++waiting_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
      --waiting_;
    }
    MapStore::put(keys, n, rows);
  }
  void set_open(bool open) {
    std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  void wait_for_put() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  bool open_ = true;
};

// Adds `amount` to the first weight of the rows.
void add(DramTier& tier, const std::vector<uint64_t>& keys, float amount) {
  const auto slots = pull(tier, keys);
  for (uint32_t slot : slots) row_at(tier, slot)[0] += amount;
  tier.unpin(slots.data(), slots.size(), true);
}

// Checks the first weight of rows that were changed by 1, then by `then`, since their initial values.
void check_rows(DramTier& tier, const std::vector<uint64_t>& keys, float then = 0) {
  std::vector<Row> rows(keys.size());
  tier.read(keys.data(), keys.size(), reinterpret_cast<uint8_t*>(rows.data()));
  for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(rows[i][0], initial_row(tier, keys[i])[0] + 1 + then);
}

// Opens the gate at the end of a scope, also after a failed check.
struct OpenAtEnd {
  GatedStore& store;
  ~OpenAtEnd() { store.set_open(true); }
};

float stored(RowStore& store, uint64_t key) {
  Row row{};
  uint8_t found = 0;
  store.get(&key, 1, &found, {reinterpret_cast<uint8_t*>(row.data()), sizeof row});
  CHECK(found);
  return row[0];
}

TEST(DramWriteAhead, PullsFindCleanRowsToEvict) {
  MapStore store(kLayout.bytes());
  DramTier tier(options_with(kNoThread), &store);
  const auto old_keys = range(0, tier.capacity());
  add(tier, old_keys, 1);
  CHECK_EQ(store.puts.load(), 0);
  const size_t written = tier.write_ahead(tier.capacity() / 4);
  CHECK(written >= tier.capacity() / 4);
  CHECK(written < tier.capacity() / 4 + 64);
  CHECK_EQ(tier.stats().written_ahead, written);
  CHECK_EQ(tier.stats().dirty, tier.capacity() - written);
  CHECK_EQ(tier.stats().resident, uint64_t{tier.capacity()});
  CHECK_EQ(tier.write_ahead(tier.capacity() / 4), size_t{0});  // they are clean: nothing is written twice
  add(tier, range(1 << 20, (1 << 20) + tier.capacity() / 8), 1);
  CHECK_EQ(tier.stats().puts_in_pulls, 0u);
  add(tier, range(2 << 20, (2 << 20) + tier.capacity() / 2), 1);  // more than was written ahead
  CHECK(tier.stats().puts_in_pulls > 0);
  check_rows(tier, old_keys);
  tier.check(true);
}

TEST(DramWriteAhead, RowThatChangesAgainStaysDirty) {
  MapStore store(kLayout.bytes());
  DramTier tier(options_with(kNoThread), &store);
  const auto keys = range(0, 1000);
  add(tier, keys, 1);
  CHECK_EQ(tier.write_ahead(kAll), size_t{1000});
  add(tier, {7, 8, 9}, 2);
  CHECK_EQ(tier.stats().dirty, 3u);
  CHECK_EQ(tier.write_ahead(kAll), size_t{3});
  CHECK_EQ(stored(store, 8), initial_row(tier, 8)[0] + 1 + 2);
}

TEST(DramWriteAhead, PinnedRowsAreNotWritten) {
  MapStore store(kLayout.bytes());
  DramTier tier(options_with(kNoThread), &store);
  add(tier, range(0, 100), 1);
  const auto pinned = pull(tier, range(0, 60));
  CHECK_EQ(tier.write_ahead(kAll), size_t{40});
  tier.unpin(pinned.data(), pinned.size(), false);
  CHECK_EQ(tier.stats().dirty, 60u);
}

TEST(DramWriteAhead, PullsDoNotWaitForARowBeingWritten) {
  GatedStore store(kLayout.bytes());
  DramTier tier(options_with(kNoThread), &store);
  const auto keys = range(0, 1000);
  add(tier, keys, 1);
  store.set_open(false);
  auto pass = std::async(std::launch::async, [&] { return tier.write_ahead(kAll); });
  store.wait_for_put();
  auto change = std::async(std::launch::async, [&] { add(tier, keys, 2); });
  const OpenAtEnd gate{store};
  CHECK(change.wait_for(20s) == std::future_status::ready);
  check_rows(tier, keys, 2);
  store.set_open(true);
  CHECK(pass.get() > 0);
  tier.check(true);
  tier.flush();  // the first copies that were written are older
  for (uint64_t k : keys) CHECK_EQ(stored(store, k), initial_row(tier, k)[0] + 1 + 2);
}

TEST(DramWriteAhead, EvictionAndFlushWaitForRowsBeingWritten) {
  for (const bool fails : {false, true}) {
    GatedStore store(kLayout.bytes());
    DramTier tier(options_with(kNoThread, 1 << 16), &store);
    const auto keys = range(0, tier.capacity());
    add(tier, keys, 1);
    store.set_open(false);
    auto pass = std::async(std::launch::async, [&] {
      try {
        tier.write_ahead(kAll);
      } catch (const DiskFullError&) {
      }
    });
    store.wait_for_put();
    // All slots are in use, and the next victims are being written.
    auto evict = std::async(std::launch::async, [&] { add(tier, range(1 << 20, (1 << 20) + 8), 1); });
    auto flush = std::async(std::launch::async, [&] { tier.flush(); });
    const OpenAtEnd gate{store};
    CHECK(evict.wait_for(50ms) == std::future_status::timeout);
    CHECK(flush.wait_for(0ms) == std::future_status::timeout);
    if (fails) {
      store.fail_puts = true;
      store.set_open(true);
      pass.get();
      store.fail_puts = false;
    }
    store.set_open(true);
    if (!fails) pass.get();
    const auto finish = [&](std::future<void>& call) {
      try {
        call.get();
        return true;
      } catch (const DiskFullError&) {
        CHECK(fails);
        return false;
      }
    };
    finish(evict);
    if (!finish(flush)) tier.flush();
    check_rows(tier, keys);
    for (uint64_t k : keys) CHECK_EQ(stored(store, k), initial_row(tier, k)[0] + 1);
    tier.check(true);
  }
}

// A commit follows a flush: the store must have rows that are clean already because they are being written.
TEST(DramWriteAhead, FlushWaitsForRowsBeingWritten) {
  GatedStore store(kLayout.bytes());
  DramTier tier(options_with(kNoThread), &store);
  const auto keys = range(0, 100);
  add(tier, keys, 1);
  store.set_open(false);
  auto pass = std::async(std::launch::async, [&] { tier.write_ahead(kAll); });
  store.wait_for_put();
  auto flush = std::async(std::launch::async, [&] { tier.flush(); });
  const OpenAtEnd gate{store};
  CHECK(flush.wait_for(50ms) == std::future_status::timeout);
  store.set_open(true);
  flush.get();
  for (uint64_t k : keys) CHECK_EQ(stored(store, k), initial_row(tier, k)[0] + 1);
}

TEST(DramWriteAhead, BackgroundThreadKeepsTheReserve) {
  MapStore store(kLayout.bytes());
  DramTier tier(options_with(400), &store);
  CHECK(tier.capacity() > 1000u);
  uint64_t next = 0;
  for (int i = 0; i < 200; ++i) {
    add(tier, range(next, next + 100), 1);
    next += 100;
    if (next <= tier.capacity()) continue;
    // Every taken fourth of the reserve is written again, soon. Rows count as clean when their put begins, as flushed
    // when it has returned; a pull evicts no row before.
    const auto until = std::chrono::steady_clock::now() + 20s;
    for (TierStats now = tier.stats(); now.flushed < now.evictions + 200; now = tier.stats()) {
      if (std::chrono::steady_clock::now() > until) break;
      std::this_thread::yield();
    }
  }
  const TierStats stats = tier.stats();
  CHECK(stats.evictions > 10000u);
  CHECK(stats.puts_in_pulls < 20u);  // of 200 pulls; 170 of them evict
  CHECK(stats.written_ahead * 10 >= stats.evictions * 9);
  CHECK(stats.flushed <= stats.evictions + 2 * 400);  // no row twice
  check_rows(tier, range(0, next));
  tier.check(true);
}

void wait_for_failed_put(const MapStore& store) {
  const auto until = std::chrono::steady_clock::now() + 20s;
  while (store.puts == 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  CHECK(store.puts > 0);
}

// The rows are all pinned when the pass is requested: it runs when they are unpinned.
TEST(DramWriteAhead, ErrorIsThrownByTheNextPullAndNothingIsLost) {
  MapStore store(kLayout.bytes());
  DramTier tier(options_with(1000), &store);
  const auto keys = range(0, tier.capacity());
  store.fail_puts = true;
  add(tier, keys, 1);
  wait_for_failed_put(store);
  store.fail_puts = false;
  std::string text;
  for (int i = 0; i < 1000 && text.empty(); ++i) {  // the failed pass may end a moment after its put
    try {
      add(tier, {(uint64_t{1} << 30) + static_cast<uint64_t>(i)}, 1);
      std::this_thread::sleep_for(1ms);
    } catch (const DiskFullError& e) {
      text = e.what();
    }
  }
  CHECK_EQ(text, std::string("put fails"));
  add(tier, range(1 << 20, (1 << 20) + 500), 1);
  check_rows(tier, keys);
  tier.check(true);
  tier.flush();
  CHECK_EQ(tier.stats().dirty, 0u);
}

TEST(DramWriteAhead, FlushThatSucceedsClearsTheError) {
  MapStore store(kLayout.bytes());
  DramTier tier(options_with(1000), &store);
  store.fail_puts = true;
  add(tier, range(0, tier.capacity()), 1);
  wait_for_failed_put(store);
  CHECK_THROWS(DiskFullError, tier.flush());
  store.fail_puts = false;
  tier.flush();
  add(tier, range(1 << 20, (1 << 20) + 100), 1);
  tier.check(true);
}

// After stop_write_ahead() the background thread writes no row, however much is requested.
TEST(DramWriteAhead, StopWaitsForThePassAndEndsTheThread) {
  GatedStore store(kLayout.bytes());
  DramTier tier(options_with(1000), &store);
  store.set_open(false);
  add(tier, range(0, tier.capacity()), 1);
  store.wait_for_put();
  auto stopping = std::async(std::launch::async, [&] { tier.stop_write_ahead(); });
  CHECK(stopping.wait_for(50ms) == std::future_status::timeout);
  store.set_open(true);
  stopping.get();
  const uint64_t written = tier.stats().written_ahead;
  for (uint64_t k = 1; k < 5; ++k) add(tier, range(k << 20, (k << 20) + 600), 1);
  std::this_thread::sleep_for(50ms);
  CHECK_EQ(tier.stats().written_ahead, written);
  tier.stop_write_ahead();
  tier.flush();
  tier.check(true);
  for (uint64_t k = 1; k < 5; ++k) check_rows(tier, range(k << 20, (k << 20) + 600));
}

// The order of evictions does not depend on writes ahead and their timing.
TEST(DramWriteAhead, EvictionOrderIsUnchanged) {
  const auto run = [](size_t write_ahead, int passes) {
    MapStore store(kLayout.bytes());
    DramTier tier(options_with(write_ahead, 1 << 16), &store);
    std::mt19937_64 random(5);
    std::vector<uint64_t> hits;
    for (int i = 0; i < 300; ++i) {
      std::vector<uint64_t> keys;
      for (uint64_t k = random() % 20; k < 4000; k += 1 + random() % 60) keys.push_back(k * k % 100003);
      std::sort(keys.begin(), keys.end());
      keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
      const auto slots = pull(tier, keys);
      tier.unpin(slots.data(), slots.size(), random() % 2);
      for (int p = 0; p < passes; ++p) tier.write_ahead(100 + i % 500);
      hits.push_back(tier.stats().hits);
      hits.push_back(tier.stats().evictions);
    }
    CHECK(tier.stats().evictions > 2000u);
    return hits;
  };
  const auto want = run(kNoThread, 0);
  CHECK(run(kNoThread, 1) == want);
  CHECK(run(300, 0) == want);
}

}  // namespace
}  // namespace thermocline
