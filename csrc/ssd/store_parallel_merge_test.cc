// Several merges at once: they overlap, stay within the memory budget, and fail independently.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <future>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "ssd/merge_scheduler.h"
#include "ssd/store.h"
#include "ssd/store_test_util.h"
#include "testing/fault_fs.h"
#include "testing/mem_fs.h"
#include "testing/store_driver.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline {
namespace {

using testing::Fault;
using testing::FaultFs;
using testing::MemFs;
using namespace std::chrono_literals;

constexpr int kThreads = 4;

StoreOptions parallel_options() {
  StoreOptions o = small_options();
  o.partition_bytes = 32u << 10;
  o.write_buffer = 16u << 10;
  o.min_log_bytes = 512u << 10;  // merges that run at once may rewrite this much
  o.merge_threads = kThreads;
  return o;
}

// Threads that arrive at a failpoint wait for each other, until `wanted` are there or a second has passed.
class Meeting {
 public:
  explicit Meeting(int wanted) : wanted_(wanted) {}
  void arrive() {
    std::unique_lock lock(mutex_);
    ++here_;
    most_ = std::max(most_, here_);
    changed_.notify_all();
    if (most_ < wanted_) changed_.wait_for(lock, 1s, [&] { return most_ >= wanted_; });
    --here_;
  }
  int most() {
    std::lock_guard lock(mutex_);
    return most_;
  }

 private:
  const int wanted_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int here_ = 0, most_ = 0;
};

// A store with many partitions, committed and closed.
void fill_store(std::shared_ptr<FileSystem> fs, const StoreOptions& o, uint64_t keys) {
  auto store = SsdStore::open(fs, "/s/a", o);
  put_range(*store, 0, keys);
  store->merge_all();
  store->commit("");
  CHECK(store->stats().partitions > 4 * kThreads);
}

TEST(StoreMerges, SeveralPartitionsAtOnce) {
  auto fs = std::make_shared<FaultFs>(std::make_shared<MemFs>());
  fs->make_dir("/s");
  const StoreOptions o = parallel_options();
  fill_store(fs, o, 60000);
  auto store = SsdStore::open(fs, "/s/a", o);
  Meeting meeting(kThreads);
  fs->on_point([&](std::string_view point) {
    if (point == "merge.begin") meeting.arrive();
  });
  for (int i = 0; i < 6; ++i) put_range(*store, 0, 60000);
  store->merge_all();
  fs->on_point(nullptr);
  CHECK_EQ(meeting.most(), kThreads);
  const StoreStats stats = store->stats();
  CHECK_EQ(stats.merge_threads, uint64_t{kThreads});
  CHECK_EQ(stats.merges_running, 0u);
  CHECK(stats.merge_seconds > 0);
  CHECK_EQ(stats.rows_in_log, 0u);
  CHECK_EQ(store->count(), 60000u);
  store->check();
}

// Merges that run at once rewrite at most 1/32 of the base, or min_log_bytes, because old and new files exist together.
TEST(StoreMerges, RewriteASmallPartOfTheBaseAtATime) {
  auto fs = std::make_shared<FaultFs>(std::make_shared<MemFs>());
  fs->make_dir("/s");
  StoreOptions o = parallel_options();
  o.min_log_bytes = 64u << 10;
  o.merge_threads = 8;
  o.mem_budget = 128u << 20;  // no bound
  const auto most_running = [&](size_t partition_bytes) {
    o.partition_bytes = partition_bytes;
    const std::string path = "/s/" + std::to_string(partition_bytes);
    auto store = SsdStore::open(fs, path, o);
    put_range(*store, 0, 60000);
    store->merge_all();
    std::atomic<int> running{0}, most{0};
    fs->on_point([&](std::string_view point) {
      if (point == "merge.begin") {
        const int now = ++running;
        for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
        }
        std::this_thread::sleep_for(1ms);
      }
      if (point == "merge.written") --running;
    });
    put_range(*store, 0, 15000);  // too few to split a partition
    store->merge_all();
    fs->on_point(nullptr);
    CHECK_EQ(store->count(), 60000u);
    return most.load();
  };
  // About 16 partitions, each larger than the bound: one at a time, and beside it partitions that a split left tiny.
  CHECK(most_running(128u << 10) <= 4);
  CHECK(most_running(8u << 10) > 4);
}

// Random puts, deletions, gets, commits and releases with four merge threads and tiny budgets, against an oracle.
TEST(StoreMerges, OracleWithTinyBudgets) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    testing::DriverOptions options(seed);
    options.store.background_merge = true;
    options.store.merge_threads = 2 + static_cast<int>(seed % 3);
    options.store.partition_bytes = 16u << 10;
    options.store.mem_budget = seed % 2 ? 1u << 20 : 3u << 20;
    options.store.filter_bits = seed % 3 ? 10 : 0;
    testing::StoreDriver driver(std::make_shared<MemFs>(), "/store", options);
    driver.open();
    uint64_t merges = 0;
    for (int i = 0; i < 250; ++i) {
      driver.step();
      const StoreStats stats = driver.store().stats();
      merges = std::max(merges, stats.merges);
      if (stats.mem_total > stats.mem_budget) CHECK_EQ(stats.mem_total, stats.mem_budget);
    }
    CHECK(merges > 0);
    driver.check_all();
  }
}

TEST(StoreMerges, DamageOfOnePartitionWhileOthersMerge) {
  auto mem = std::make_shared<MemFs>();
  auto fs = std::make_shared<FaultFs>(mem);
  fs->make_dir("/s");
  const StoreOptions o = parallel_options();
  constexpr uint64_t kKeys = 60000;
  fill_store(fs, o, kKeys);
  int damaged = 0;
  for (auto& name : fs->list("/s/a"))
    if (name.starts_with("base-") && damaged < 2) {
      mem->bytes("/s/a/" + name)[4096 + 100] ^= 1;  // a row page
      ++damaged;
    }
  auto store = SsdStore::open(fs, "/s/a", o);
  Meeting meeting(kThreads);
  fs->on_point([&](std::string_view point) {
    if (point == "merge.begin") meeting.arrive();
  });
  for (int i = 0; i < 3; ++i) put_range(*store, 0, kKeys);
  CHECK_THROWS(CorruptionError, store->merge_all());
  fs->on_point(nullptr);
  CHECK_EQ(meeting.most(), kThreads);
  const StoreStats stats = store->stats();
  CHECK_EQ(stats.damaged_partitions, 2u);
  CHECK_EQ(stats.merges_running, 0u);
  CHECK(stats.merges >= stats.partitions - 2);
  // All rows were put again: the newest version of each is in the log, or in a new base file.
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k;
  std::vector<uint8_t> found(kKeys), rows(kKeys * kRow);
  store->get(keys.data(), kKeys, found.data(), {rows.data(), kRow});
  for (uint64_t k = 0; k < kKeys; ++k) CHECK(found[k] && std::memcmp(&rows[k * kRow], &k, 8) == 0);
  store->commit("");
}

// The disk is full while several merges write: all rows stay readable, no file of a failed merge stays, and after space
// is freed the same store continues.
TEST(StoreMerges, FullDiskWhileSeveralMerge) {
  for (uint64_t at : {0, 1, 7, 20, 45}) {
    auto mem = std::make_shared<MemFs>();
    auto fs = std::make_shared<FaultFs>(mem);
    fs->make_dir("/s");
    const StoreOptions o = parallel_options();
    constexpr uint64_t kKeys = 40000;
    fill_store(fs, o, kKeys);
    auto store = SsdStore::open(fs, "/s/a", o);
    put_range(*store, 0, kKeys / 8);
    fs->arm({.fault = Fault::kDiskFull, .ops = testing::kWrites, .at = at, .for_good = true});
    bool full = false;
    for (int i = 0; i < 8 && !full; ++i) {
      try {
        put_range(*store, 0, kKeys / 8);
        store->merge_all();
      } catch (const DiskFullError&) {
        full = true;
      }
    }
    CHECK(full);
    CHECK_EQ(store->count(), kKeys);
    fs->disarm();
    put_range(*store, 0, kKeys);
    store->merge_all();
    store->commit("");
    store->check();
    CHECK_EQ(store->count(), kKeys);
    const StoreStats stats = store->stats();
    CHECK_EQ(stats.merges_running, 0u);
    store->release(1);
    uint64_t bases = 0;
    for (auto& name : fs->list("/s/a")) bases += name.starts_with("base-");
    CHECK_EQ(bases, stats.partitions);
  }
}

// close() abandons all merges, wherever they are.
TEST(StoreMerges, CloseAbandonsAllOfThem) {
  for (int round = 0; round < 20; ++round) {
    auto fs = std::make_shared<FaultFs>(std::make_shared<MemFs>());
    fs->make_dir("/s");
    StoreOptions o = parallel_options();
    auto store = SsdStore::open(fs, "/s/a", o);
    put_range(*store, 0, 20000);
    store->commit("kept");
    for (int i = 0; i < round % 4; ++i) put_range(*store, 0, 20000);
    store->close();
    store = SsdStore::open(fs, "/s/a", o);
    CHECK_EQ(store->note(), "kept");
    CHECK_EQ(store->count(), 20000u);
  }
}

// A merge that began before a writer asked for one may have failed on a disk that was full then.
TEST(StoreMerges, AWriterGetsOnlyErrorsOfLaterMerges) {
  ssd::MergeScheduler scheduler(1);
  const auto full = std::make_exception_ptr(DiskFullError("full", ENOSPC));
  const auto request = [&] {
    return std::async(std::launch::async, [&, seen = scheduler.rounds()] { return scheduler.request_round(seen); });
  };
  scheduler.on_flush(1, ssd::MergeScheduler::Demand::kPaced);
  const uint64_t before = *scheduler.wait_for_work();
  auto first = request();
  const uint64_t after = *scheduler.wait_for_work();  // the one thread is in use: only a request starts this round
  scheduler.finish_round(before, std::nullopt, full);
  CHECK(first.get());
  scheduler.finish_round(after, ssd::MergeScheduler::Demand::kNone, nullptr);
  auto second = request();
  scheduler.finish_round(*scheduler.wait_for_work(), std::nullopt, full);
  CHECK_THROWS(DiskFullError, second.get());
}

// Merges of the caller's thread, as when a store is opened, do not use up the credit of paced merging.
TEST(StoreMerges, ForegroundMergesLeaveNoNegativeCredit) {
  ssd::MergeScheduler scheduler(1);
  CHECK(scheduler.spend(1u << 30, false));
  scheduler.on_flush(1, ssd::MergeScheduler::Demand::kPaced);
  auto work = std::async(std::launch::async, [&] { return scheduler.wait_for_work(); });
  work.wait_for(2s);
  scheduler.stop();
  CHECK(work.get().has_value());
}

}  // namespace
}  // namespace thermocline
