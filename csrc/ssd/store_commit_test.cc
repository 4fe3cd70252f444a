// Commits beside other calls: no put, get or pull waits for a sync, and the syncs of one commit run at once.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "dram/tier.h"
#include "ssd/store.h"
#include "ssd/store_test_util.h"
#include "testing/fault_fs.h"
#include "testing/mem_fs.h"
#include "testing/test.h"
#include "util/error.h"
#include "util/posix_test_util.h"

namespace thermocline {
namespace {

using testing::FaultFs;
using testing::MemFs;
using namespace std::chrono_literals;

// Blocks the threads that pass() until open().
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    --waiting_;
  }
  bool wait_for(int threads) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 20s, [&] { return waiting_ >= threads; });
  }
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  bool open_ = false;
};

// True if fn returns on another thread while the gate is closed. Opens the gate otherwise, so that the test ends.
bool finishes_behind(Gate& gate, const std::function<void()>& fn) {
  auto done = std::async(std::launch::async, fn);
  const bool finished = done.wait_for(20s) == std::future_status::ready;
  if (!finished) gate.open();
  done.get();
  return finished;
}

TEST(Store, NothingWaitsForTheSyncsOfACommit) {
  auto fs = std::make_shared<FaultFs>(std::make_shared<MemFs>());
  fs->make_dir("/s");
  TierOptions t;
  t.layout = {4, Optimizer::kSgd};
  t.budget = 1 << 16;
  StoreOptions o = small_options();
  o.row_bytes = t.layout.bytes();
  o.min_log_bytes = 16u << 20;  // no merge in the background: it would leave one file to sync
  auto store = SsdStore::open(fs, "/s/a", o);
  DramTier tier(t, store.get());
  auto train = [&](uint64_t first) {  // a batch that evicts dirty rows of earlier batches: they are put
    std::vector<uint64_t> keys(tier.capacity());
    std::iota(keys.begin(), keys.end(), first);
    std::vector<uint32_t> slots(keys.size());
    tier.pull(keys.data(), keys.size(), slots.data());
    tier.unpin(slots.data(), slots.size(), true);
  };
  train(0);
  tier.flush();
  store->merge_all();  // base files
  train(10000);        // and a log
  tier.flush();
  Gate gate;
  fs->on_sync([&] { gate.pass(); }, 4);
  auto commit = std::async(std::launch::async, [&] { return store->commit("a"); });
  const bool concurrent = gate.wait_for(2);
  bool pulls = true;
  for (uint64_t i = 0; i < 5; ++i) pulls = pulls && finishes_behind(gate, [&] { train(20000 * (i + 1)); });
  const bool scans = finishes_behind(gate, [&] { CHECK(store->count() > 0); });
  CHECK(commit.wait_for(0s) == std::future_status::timeout);
  gate.open();
  CHECK_EQ(commit.get(), 1u);
  CHECK(concurrent);
  CHECK(pulls);
  CHECK(scans);
  // The commit has the rows up to its start only.
  const uint64_t rows = 2 * tier.capacity();
  store->close();
  store = SsdStore::open(fs, "/s/a", o);
  CHECK_EQ(store->count(), rows);
  CHECK_EQ(store->note(), "a");
}

struct FaultyStore {
  std::shared_ptr<FaultFs> fs;
  std::unique_ptr<SsdStore> store;
};

// Returns a store whose next commit syncs several files, four at once.
FaultyStore store_of_several_files() {
  auto fs = std::make_shared<FaultFs>(std::make_shared<MemFs>());
  fs->make_dir("/s");
  auto store = SsdStore::open(fs, "/s/a", small_options());
  put_range(*store, 0, 20000);
  store->merge_all();
  fs->on_sync(nullptr, 4);
  return {std::move(fs), std::move(store)};
}

// Threads that the system refuses are no failed sync: the caller syncs.
TEST(Store, CommitsIfTheSystemRefusesThreads) {
  auto [fs, store] = store_of_several_files();
  {
    NoNewThreads no_threads;
    CHECK(no_threads.refused());
    CHECK_EQ(store->commit("a"), 1u);
  }
  put_range(*store, 0, 10);
  store.reset();
  CHECK_EQ(SsdStore::open(fs, "/s/a", small_options())->count(), 20000u);
}

// Extents of the log are read by several threads and added in order: of a row in many extents, the newest counts.
TEST(Store, OpeningAddsTheExtentsOfTheLogInOrder) {
  for (size_t budget : {size_t{1} << 20, size_t{16} << 20}) {
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    StoreOptions o = small_options();
    o.mem_budget = budget;
    o.min_log_bytes = 1u << 30;
    o.background_merge = false;  // else a small budget may leave fewer rows in the log, by the speed of its merges
    Oracle oracle;
    auto store = SsdStore::open(fs, "/s/a", o);
    for (uint64_t round = 0; round < 60; ++round) {
      std::vector<uint64_t> keys;
      std::vector<uint8_t> rows;
      for (uint64_t k = round % 7; k < 900; k += 1 + round % 3) {
        Row row{};
        std::memcpy(row.data(), &k, 8);
        row[8] = static_cast<uint8_t>(round);
        oracle[k] = row;
        keys.push_back(k);
        rows.insert(rows.end(), row.begin(), row.end());
      }
      store->put(keys.data(), keys.size(), {rows.data(), kRow});
    }
    store->commit("a");
    CHECK(store->stats().rows_in_log > (budget > 1u << 20 ? 10000u : 1000u));  // a small budget merges earlier
    store.reset();
    store = SsdStore::open(fs, "/s/a", o);
    expect_equal(*store, oracle, 1000);
    store->check();
  }
}

// The key columns of the log are most of the reads of an opening: they must not be read one after the other.
TEST(Store, OpeningReadsTheKeysOfSeveralExtentsAtOnce) {
  if (std::thread::hardware_concurrency() < 2) return;  // one thread opens the store
  auto fs = std::make_shared<FaultFs>(std::make_shared<MemFs>());
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.mem_budget = 16u << 20;
  o.segment_bytes = 64u << 20;
  o.min_log_bytes = 1u << 30;  // all rows stay in the log: there are no base files to read
  auto store = SsdStore::open(fs, "/s/a", o);
  for (uint64_t i = 0; i < 40; ++i) put_range(*store, i * 1000, (i + 1) * 1000);
  store->commit("a");
  store.reset();
  std::mutex mutex;
  std::condition_variable changed;
  int reading = 0, most = 0;
  fs->on_read([&] {  // waits for a second reader, until there has been one
    std::unique_lock lock(mutex);
    most = std::max(most, ++reading);
    changed.notify_all();
    changed.wait_for(lock, 200ms, [&] { return most > 1; });
    --reading;
  });
  store = SsdStore::open(fs, "/s/a", o);
  fs->on_read(nullptr);
  CHECK(store->stats().rows_in_log == 40000u);
  CHECK(most > 1);
}

TEST(Store, FailedSyncOfOneOfSeveralFilesMakesTheStoreReadOnly) {
  auto [fs, store] = store_of_several_files();
  fs->arm({.fault = testing::Fault::kIoError, .ops = testing::kSyncs, .at = 2});
  CHECK_THROWS(ReadOnlyError, store->commit("a"));
  CHECK_THROWS(ReadOnlyError, put_range(*store, 0, 10));
  fs->disarm();
  CHECK_THROWS(ReadOnlyError, store->commit("b"));
  store.reset();
  CHECK_EQ(SsdStore::open(fs, "/s/a", small_options())->count(), 0u);
}

}  // namespace
}  // namespace thermocline
