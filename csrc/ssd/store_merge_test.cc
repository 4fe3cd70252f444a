// Merging, memory budget and filters of SsdStore.
#include "ssd/store.h"

#include <random>
#include <vector>

#include "ssd/store_test_util.h"
#include "testing/mem_fs.h"
#include "testing/test.h"
#include "util/error.h"
#include "util/hash.h"

namespace thermocline {
namespace {

using testing::MemFs;

TEST(Store, PutFarAboveTheLimitFinishes) {
  for (int round = 0; round < 300; ++round) {
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    auto store = SsdStore::open(fs, "/s/a", small_options());
    put_range(*store, 0, 4000);  // several times the limit
    put_range(*store, 4000, 8000);
    if (round % 50 == 0) CHECK_EQ(store->count(), 8000u);
  }
}

TEST(Store, MergeAllAndCheckDoNotWaitForAPausedMerge) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.partition_bytes = 16u << 20;  // merges of many megabytes, which run out of credit
  o.segment_bytes = 1u << 20;
  auto store = SsdStore::open(fs, "/s/a", o);
  constexpr size_t kBatch = 5000;
  std::vector<uint64_t> keys(kBatch);
  std::vector<uint8_t> rows(kBatch * kRow);
  uint64_t next = 0;
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 20; ++i) {
      for (auto& k : keys) k = next++;
      store->put(keys.data(), kBatch, {rows.data(), kRow});
    }
    store->check();
    store->merge_all();
    CHECK_EQ(store->stats().rows_in_log, 0u);
    CHECK_EQ(store->count(), next);
  }
}

TEST(Store, DamageStopsOnePartitionOnly) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  auto store = SsdStore::open(fs, "/s/a", o);
  put_range(*store, 0, 20000);
  store->merge_all();
  store->commit("");
  store.reset();
  for (auto& name : fs->list("/s/a"))
    if (name.starts_with("base-")) {
      fs->bytes("/s/a/" + name)[4096 + 100] ^= 1;  // a row page
      break;
    }
  store = SsdStore::open(fs, "/s/a", o);
  for (int i = 0; i < 40; ++i) put_range(*store, 0, 20000);
  CHECK(!store->stats().damage.empty());
  CHECK(store->stats().merges > 0);
  CHECK_THROWS(CorruptionError, store->check());
  store->commit("");
}

// The number of extents must not end the log before max_log_ratio does, if the budget has memory for more.
TEST(Store, ALargerBudgetAllowsMoreExtents) {
  const auto merges_of = [](size_t budget) {
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    StoreOptions o = small_options();
    o.mem_budget = budget;
    o.write_buffer = 1u << 10;
    o.segment_bytes = 1u << 20;
    o.min_log_bytes = 64u << 20;  // far above the rows of this test: only the number of extents limits the log
    o.background_merge = false;
    auto store = SsdStore::open(fs, "/s/a", o);
    constexpr uint64_t kExtent = 32;  // rows: larger than the write buffer, so every put is an extent
    for (uint64_t i = 0; i < 5000; ++i) put_range(*store, i * kExtent, (i + 1) * kExtent);
    CHECK_EQ(store->count(), 5000 * kExtent);
    const StoreStats stats = store->stats();
    CHECK(stats.mem_total <= budget);
    return stats.merges;
  };
  CHECK(merges_of(size_t{256} << 20) > 0);  // at most 4,096 extents
  CHECK_EQ(merges_of(size_t{2} << 30), 0u);
}

TEST(Store, MemoryStaysWithinTheBudget) {
  for (size_t budget : {size_t{1} << 20, size_t{4} << 20}) {
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    StoreOptions o = small_options();
    o.mem_budget = budget;
    o.write_buffer = 0;
    o.min_log_bytes = 64u << 20;  // only the budget limits the log
    auto store = SsdStore::open(fs, "/s/a", o);
    std::mt19937_64 rng(budget);
    constexpr size_t kBatch = 4000;
    std::vector<uint64_t> keys(kBatch);
    std::vector<uint8_t> rows(kBatch * kRow), found(kBatch);
    for (int i = 0; i < 80; ++i) {
      for (auto& k : keys) k = rng();
      store->put(keys.data(), kBatch, {rows.data(), kRow});
      store->get(keys.data(), kBatch, found.data(), {rows.data(), kRow});
      StoreStats stats = store->stats();
      CHECK_EQ(stats.mem_total, stats.mem_index + stats.mem_buffers);
      if (stats.mem_total > budget) CHECK_EQ(stats.mem_total, budget);
    }
    CHECK(store->stats().merges > 0);
    CHECK_EQ(store->count(), 80 * kBatch);
  }
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.mem_budget = 16u << 10;
  CHECK_THROWS(BudgetError, SsdStore::open(fs, "/s/a", o));
}

TEST(Store, OpenWithSmallerBudgetMergesOrThrows) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.min_log_bytes = 64u << 20;
  o.segment_bytes = 1u << 20;
  o.background_merge = false;
  auto store = SsdStore::open(fs, "/s/a", o);
  for (int i = 0; i < 20; ++i) put_range(*store, 0, 20000);
  store->commit("");
  CHECK(store->stats().mem_total > 2u << 20);
  store.reset();
  o.mem_budget = 2u << 20;
  StoreOptions reading = o;
  reading.create = false;
  reading.read_only = true;
  CHECK_THROWS(BudgetError, SsdStore::open(fs, "/s/a", reading));
  store = SsdStore::open(fs, "/s/a", o);
  CHECK(store->stats().mem_total <= o.mem_budget);
  CHECK_EQ(store->count(), 20000u);
}

TEST(Store, FilterAvoidsReadsAndKeepsAllRows) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.filter_bits = 10;
  constexpr uint64_t kKeys = 20000;
  std::vector<uint64_t> keys(kKeys), absent(kKeys);
  std::vector<uint8_t> rows(kKeys * kRow), found(kKeys);
  for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k, absent[k] = k + (1ull << 40);
  auto store = SsdStore::open(fs, "/s/a", o);
  store->put(keys.data(), kKeys, {rows.data(), kRow});
  store->merge_all();
  store->commit("");
  auto false_share = [&](SsdStore& s) {
    s.get(keys.data(), kKeys, found.data(), {rows.data(), kRow});
    for (auto f : found) CHECK(f);
    // An absent key reads a page only for a false positive of the filter.
    uint64_t wanted = 0;
    for (uint64_t k : absent) {
      uint64_t before = s.stats().pages_read;
      uint8_t f;
      s.get(&k, 1, &f, {rows.data(), kRow});
      CHECK(!f);
      wanted += s.stats().pages_read - before;
    }
    return static_cast<double>(wanted) / kKeys;
  };
  double with = false_share(*store);
  CHECK(with < 0.03);
  store.reset();
  store = SsdStore::open(fs, "/s/a", o);  // from the file
  CHECK_EQ(false_share(*store), with);
  store.reset();
  o.filter_bits = 0;
  store = SsdStore::open(fs, "/s/a", o);  // not loaded
  CHECK(false_share(*store) > 0.9);
}

}  // namespace
}  // namespace thermocline
