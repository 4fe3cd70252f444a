// Lookups on several threads: all sizes against an oracle, bounded memory, damage and bad sectors inside long reads.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include "ssd/reader.h"
#include "ssd/store.h"
#include "ssd/store_test_util.h"
#include "testing/fault_fs.h"
#include "testing/mem_fs.h"
#include "testing/test.h"
#include "util/error.h"
#include "util/hash.h"
#include "util/uring.h"

namespace thermocline {
namespace {

constexpr uint64_t kKeys = 60000;

// A file system in memory for lookups on several threads, which can hold reads back.
class ParallelFs : public testing::MemFs {
 public:
  ParallelFs(int workers, int depth) : concurrency_{workers, depth} { make_dir("/s"); }
  Concurrency read_concurrency() const override { return concurrency_; }
  std::unique_ptr<ReadQueue> read_queue(size_t depth) override {
    std::lock_guard lock(mutex_);
    return std::make_unique<Queue>(*this, MemFs::read_queue(depth), queues_++ < held_);
  }
  // Queues created from now on: the first `count` return no read until release().
  void hold(int count) {
    std::lock_guard lock(mutex_);
    held_ = count;
    queues_ = 0;
  }
  void release() {
    std::lock_guard lock(mutex_);
    held_ = 0;
    changed_.notify_all();
  }
  void wait_for_held(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ >= count; });
  }

 private:
  class Queue : public ReadQueue {
   public:
    Queue(ParallelFs& fs, std::unique_ptr<ReadQueue> inner, bool held)
        : fs_(fs), inner_(std::move(inner)), held_(held) {}
    void submit(const ReadOp& op, uint64_t tag) override { inner_->submit(op, tag); }
    uint64_t wait() override {
      if (held_) {
        std::unique_lock lock(fs_.mutex_);
        ++fs_.waiting_;
        fs_.changed_.notify_all();
        fs_.changed_.wait(lock, [&] { return fs_.held_ == 0; });
        --fs_.waiting_;
      }
      return inner_->wait();
    }
    size_t depth() const override { return inner_->depth(); }

   private:
    ParallelFs& fs_;
    std::unique_ptr<ReadQueue> inner_;
    const bool held_;
  };

  const Concurrency concurrency_;
  std::mutex mutex_;  // protects all members below
  std::condition_variable changed_;
  int queues_ = 0, held_ = 0, waiting_ = 0;
};

Row row_of(uint64_t key, uint64_t version) {
  Row row{};
  std::memcpy(row.data(), &key, 8);
  std::memcpy(row.data() + 8, &version, 8);
  return row;
}

// The row of each key; empty: absent.
using Expected = std::vector<std::optional<Row>>;

// Base files, several extents in the log, deletions, rows in the write buffer, and absent keys.
Expected fill(SsdStore& store) {
  std::mt19937_64 random(5);
  Expected oracle(3 * kKeys);
  auto put = [&](size_t n, uint64_t version, uint64_t space) {
    std::vector<uint64_t> keys(n);
    std::vector<uint8_t> rows(n * kRow);
    for (size_t i = 0; i < n; ++i) {
      keys[i] = random() % space;
      const Row row = row_of(keys[i], version);
      std::memcpy(&rows[i * kRow], row.data(), kRow);
      oracle[keys[i]] = row;
    }
    store.put(keys.data(), n, {rows.data(), kRow});
  };
  put(kKeys, 1, kKeys);
  store.merge_all();
  for (uint64_t version = 2; version < 6; ++version) put(1500, version, kKeys);
  std::vector<uint64_t> deleted(2000);
  for (auto& key : deleted) oracle[key = random() % kKeys].reset();
  store.erase(deleted.data(), deleted.size());
  put(1500, 6, kKeys);
  put(20, 7, kKeys);  // stays in the buffer
  return oracle;
}

StoreOptions get_options(size_t mem_budget) {
  StoreOptions o = small_options();
  o.mem_budget = mem_budget;
  o.background_merge = false;
  o.min_log_bytes = 4u << 20;
  o.filter_bits = 10;
  return o;
}

void expect_rows(SsdStore& store, const Expected& oracle, const std::vector<uint64_t>& keys) {
  const size_t n = keys.size();
  std::vector<uint8_t> found(n, 9), rows(n * kRow, 0xee);
  const Row untouched = [] {
    Row row;
    row.fill(0xee);
    return row;
  }();
  // A permutation as in the DRAM tier: row i goes to slot[i].
  std::vector<uint32_t> slot(n);
  for (size_t i = 0; i < n; ++i) slot[i] = static_cast<uint32_t>(n - 1 - i);
  store.get(keys.data(), n, found.data(), {rows.data(), kRow, slot.data()});
  for (size_t i = 0; i < n; ++i) {
    const std::optional<Row>& expected = oracle[keys[i]];
    CHECK_EQ(found[i], expected.has_value());
    CHECK(std::memcmp(&rows[slot[i] * kRow], expected.value_or(untouched).data(), kRow) == 0);
  }
}

void expect_all_sizes(SsdStore& store, const Expected& oracle) {
  std::mt19937_64 random(6);
  for (size_t n : {1, 2, 15, 16, 63, 64, 65, 300, 1000, 5000, 16384, 16385, 90000}) {
    for (uint64_t space :
         {kKeys, 2 * kKeys, std::min(n / 3 + 1, 3 * kKeys)}) {  // one in two keys is absent; keys repeat
      std::vector<uint64_t> keys(n);
      for (auto& key : keys) key = random() % space;
      expect_rows(store, oracle, keys);
    }
  }
  std::vector<uint64_t> all(kKeys);
  for (uint64_t k = 0; k < kKeys; ++k) all[k] = k;
  expect_rows(store, oracle, all);
  // The order of a look-ahead, and a range of it.
  std::sort(all.begin(), all.end(), [](uint64_t a, uint64_t b) { return hash_key(a) < hash_key(b); });
  expect_rows(store, oracle, all);
  all.resize(20000);
  expect_rows(store, oracle, all);
  expect_rows(store, oracle, std::vector<uint64_t>(40000, 77));  // one key
}

TEST(StoreGet, AllSizesOnSeveralThreads) {
  for (auto [workers, depth] : {std::pair(4, 8), {3, 64}, {2, 1}, {1, 1}}) {
    for (size_t budget : {size_t{2} << 20, size_t{64} << 20}) {
      auto fs = std::make_shared<ParallelFs>(workers, depth);
      auto store = SsdStore::open(fs, "/s/a", get_options(budget));
      const Expected oracle = fill(*store);
      CHECK(store->stats().partitions > 4 && store->stats().rows_in_log > 8000);
      expect_all_sizes(*store, oracle);
      CHECK(store->stats().mem_total <= budget);
      CHECK(store->stats().false_pages > 0);  // keys whose page in the log was that of another key
    }
  }
}

TEST(StoreGet, AllSizesOnBothEngines) {
  for (IoEngine engine : {IoEngine::kUring, IoEngine::kPread}) {
    if (engine == IoEngine::kUring && !Uring::create(4)) continue;  // no io_uring here
    testing::TempDir dir;
    auto fs = make_posix_fs(engine, 4, engine == IoEngine::kUring ? 16 : 1);
    auto store = SsdStore::open(fs, dir / "a", get_options(64u << 20));
    const Expected oracle = fill(*store);
    expect_all_sizes(*store, oracle);
  }
}

TEST(StoreGet, WorkingMemoryIsFourBytesPerKeyAndABoundPerThread) {
  auto fs = std::make_shared<ParallelFs>(4, 8);
  auto store = SsdStore::open(fs, "/s/a", get_options(64u << 20));
  const Expected oracle = fill(*store);
  std::vector<uint64_t> keys(2000000);
  std::mt19937_64 random(7);
  for (auto& key : keys) key = random() % kKeys;
  std::vector<uint8_t> found(keys.size()), rows(keys.size() * kRow);
  constexpr uint64_t kPerThread = 8u << 20;  // a piece of 65,536 keys in planning, beside smaller ones
  for (size_t n : {500000, 2000000}) {
    store->get(keys.data(), n, found.data(), {rows.data(), kRow});
    const uint64_t scratch = store->stats().get_scratch_peak;
    CHECK(scratch >= 4 * n && scratch <= 4 * n + 4 * kPerThread);
  }
}

TEST(StoreGet, FewKeysAreLookedUpByTheCallerAlone) {
  ssd::Identity id;
  id.geometry = ssd::Geometry::of(kRow);
  auto workers = [&](int threads, int depth, size_t keys) {
    ssd::Context ctx(std::make_shared<ParallelFs>(threads, depth), "/s/a", id, 256u << 20, 0);
    return ssd::Reader(ctx).workers_for(keys);
  };
  for (size_t keys : {0, 1, 100, 255}) CHECK_EQ(workers(16, 64, keys), 1u);
  CHECK_EQ(workers(16, 64, 1000), 2u);
  CHECK_EQ(workers(16, 64, 100000), 16u);
  CHECK_EQ(workers(32, 1, 15), 1u);  // threads instead of queues
  CHECK_EQ(workers(32, 1, 100), 12u);
  CHECK_EQ(workers(32, 1, 1000), 32u);
  CHECK_EQ(workers(1, 1, 100000), 1u);
}

// A long lookup leaves channels to others: a pull does not wait for the end of a look-ahead.
TEST(StoreGet, SmallLookupsDoNotWaitForALargeOne) {
  auto fs = std::make_shared<ParallelFs>(3, 8);
  auto store = SsdStore::open(fs, "/s/a", get_options(64u << 20));
  const Expected oracle = fill(*store);
  std::vector<uint64_t> keys(50000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  fs->hold(3);
  auto large = std::async(std::launch::async, [&] { expect_rows(*store, oracle, keys); });
  fs->wait_for_held(3);
  expect_rows(*store, oracle, {5, 1000, 30000});
  CHECK(large.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
  fs->release();
  large.get();
}

// One damaged page inside long reads: only lookups of its rows fail.
TEST(StoreGet, ADamagedPageFailsOnlyItsOwnRows) {
  auto fs = std::make_shared<ParallelFs>(4, 64);
  StoreOptions options = get_options(64u << 20);
  options.partition_bytes = 4u << 20;  // one base file of many pages
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k;
  Expected oracle(kKeys);
  for (uint64_t k : keys) oracle[k] = row_of(k, 0);
  {
    auto store = SsdStore::open(fs, "/s/a", options);
    put_range(*store, 0, kKeys);
    store->merge_all();
    store->commit("");
  }
  const uint32_t per_page = (4096 - 16) / (kRow + 8);
  std::sort(keys.begin(), keys.end(), [](uint64_t a, uint64_t b) { return hash_key(a) < hash_key(b); });
  for (auto& name : fs->list("/s/a"))
    if (name.starts_with("base-")) fs->bytes("/s/a/" + name)[101 * 4096 + 77] ^= 4;  // row page 100
  auto store = SsdStore::open(fs, "/s/a", options);
  CHECK_EQ(store->stats().partitions, 1u);
  const std::vector<uint64_t> damaged(keys.begin() + 100 * per_page, keys.begin() + 101 * per_page);
  std::vector<uint64_t> others(keys.begin(), keys.begin() + 100 * per_page);
  others.insert(others.end(), keys.begin() + 101 * per_page, keys.end());
  std::vector<uint8_t> found(kKeys), rows(kKeys * kRow);
  for (int i = 0; i < 3; ++i) {
    const uint64_t before = store->stats().reads;
    expect_rows(*store, oracle, others);
    CHECK(store->stats().reads - before < 100);  // of 472 pages: the reads are long and skip no page
    CHECK_THROWS(CorruptionError, store->get(keys.data(), kKeys, found.data(), {rows.data(), kRow}));
    for (uint64_t key : {damaged.front(), damaged.back()})
      CHECK_THROWS(CorruptionError, store->get(&key, 1, found.data(), {rows.data(), kRow}));
  }
}

class ParallelFaultFs : public testing::FaultFs {
 public:
  using FaultFs::FaultFs;
  Concurrency read_concurrency() const override { return {4, 16}; }
};

// Reads that fail once are repeated page by page; reads that fail for good throw, and the store stays usable.
TEST(StoreGet, FailedReadsAreRepeatedPageByPage) {
  auto memory = std::make_shared<testing::MemFs>();
  memory->make_dir("/s");
  auto fs = std::make_shared<ParallelFaultFs>(memory);
  auto store = SsdStore::open(fs, "/s/a", get_options(64u << 20));
  const Expected oracle = fill(*store);
  std::vector<uint64_t> keys(50000), few;
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  for (size_t i = 0; i < 2000; ++i) few.push_back(i * 31);
  for (const auto* batch : {&keys, &few}) {
    for (testing::Fault fault : {testing::Fault::kIoError, testing::Fault::kShortRead}) {
      for (uint64_t at : {0, 1, 5, 20}) {
        fs->arm({.fault = fault, .ops = testing::kReads, .at = at});
        expect_rows(*store, oracle, *batch);
        CHECK_EQ(fs->fired(), 1u);
      }
      fs->arm({.fault = fault, .ops = testing::kReads, .at = 3, .for_good = true});
      CHECK_THROWS(IoError, expect_rows(*store, oracle, *batch));
      fs->disarm();
      expect_rows(*store, oracle, *batch);
    }
  }
}

// Large lookups beside puts and merges: every row is at least as new as the last put that returned before.
TEST(StoreGet, LargeLookupsBesidePutsAndMerges) {
  auto fs = std::make_shared<ParallelFs>(4, 8);
  StoreOptions options = small_options();
  options.write_buffer = 64u << 10;
  auto store = SsdStore::open(fs, "/s/a", options);
  constexpr uint64_t kSome = 20000;
  std::vector<uint64_t> keys(kSome);
  for (uint64_t k = 0; k < kSome; ++k) keys[k] = k;
  auto put = [&](uint64_t version) {
    std::vector<uint8_t> rows(kSome * kRow);
    for (uint64_t k = 0; k < kSome; ++k) std::memcpy(&rows[k * kRow], row_of(k, version).data(), kRow);
    store->put(keys.data(), kSome, {rows.data(), kRow});
  };
  put(1);
  std::atomic<uint64_t> done{1}, begun{1}, wrong{0}, gets{0};
  std::atomic<bool> stop{false};
  auto read = [&] {
    std::vector<uint8_t> found(kSome), rows(kSome * kRow);
    while (!stop || gets < 4) {
      const uint64_t oldest = done;
      store->get(keys.data(), kSome, found.data(), {rows.data(), kRow});
      const uint64_t newest = begun;
      for (uint64_t k = 0; k < kSome; ++k) {
        uint64_t key, version;
        std::memcpy(&key, &rows[k * kRow], 8);
        std::memcpy(&version, &rows[k * kRow + 8], 8);
        wrong += !found[k] || key != k || version < oldest || version > newest;
      }
      ++gets;
    }
  };
  auto first = std::async(std::launch::async, read), second = std::async(std::launch::async, read);
  for (uint64_t version = 2; version < 12; ++version) {
    begun = version;
    put(version);
    done = version;
  }
  stop = true;
  first.get();
  second.get();
  CHECK_EQ(wrong, 0u);
}

}  // namespace
}  // namespace thermocline
