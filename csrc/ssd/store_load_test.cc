// SsdStore::load, and rows that arrive in hash order.
#include "ssd/store.h"

#include <algorithm>
#include <array>
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

TEST(Store, LoadInHashOrderWritesBaseFilesOnly) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    std::mt19937_64 rng(seed);
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    StoreOptions o = small_options();
    o.background_merge = seed % 2 == 0;
    o.filter_bits = seed % 3 == 0 ? 8 : 0;
    constexpr uint64_t kKeys = 20000;
    std::vector<uint64_t> keys;
    for (uint64_t k = 0; k < kKeys; ++k)
      if (rng() % 4) keys.push_back(k);
    std::sort(keys.begin(), keys.end(), [](uint64_t a, uint64_t b) { return hash_key(a) < hash_key(b); });
    Oracle now;
    auto store = SsdStore::open(fs, "/s/store", o);
    for (size_t first = 0; first < keys.size();) {
      size_t n = std::min<size_t>(keys.size() - first, rng() % 3 ? 1 + rng() % 9000 : 1 + rng() % 3);
      std::vector<uint64_t> batch(keys.begin() + static_cast<ptrdiff_t>(first),
                                  keys.begin() + static_cast<ptrdiff_t>(first + n));
      if (rng() % 2) std::shuffle(batch.begin(), batch.end(), rng);
      if (rng() % 2) batch.push_back(batch[rng() % n]);  // the last of equal keys wins
      std::vector<uint8_t> rows(batch.size() * kRow);
      for (auto& b : rows) b = static_cast<uint8_t>(rng());
      store->load(batch.data(), batch.size(), {rows.data(), kRow});
      for (size_t i = 0; i < batch.size(); ++i) std::memcpy(now[batch[i]].data(), &rows[i * kRow], kRow);
      first += n;
      if (rng() % 3 == 0) store->check();
    }
    StoreStats s = store->stats();
    CHECK_EQ(s.rows_in_base, now.size());
    CHECK_EQ(s.rows_in_log, 0u);
    CHECK_EQ(s.merges, 0u);
    CHECK(s.partitions > 5);
    CHECK(s.disk_bytes < 12 * now.size() * (kRow + 8) / 10 + 5 * 4096 * s.partitions);  // header, fences, filter
    CHECK(s.mem_total < o.mem_budget);
    store->commit("loaded");
    store.reset();
    store = SsdStore::open(fs, "/s/store", o);
    expect_equal(*store, now, kKeys);
    // Among existing rows load() behaves as put().
    std::vector<uint8_t> rows(keys.size() * kRow, static_cast<uint8_t>(seed));
    store->load(keys.data(), keys.size() / 2, {rows.data(), kRow});
    for (size_t i = 0; i < keys.size() / 2; ++i) now[keys[i]].fill(static_cast<uint8_t>(seed));
    expect_equal(*store, now, kKeys);
    store->check();
    store->merge_all();
    expect_equal(*store, now, kKeys);
  }
}

TEST(Store, RowsInHashOrderNeedNoMoreMemory) {
  constexpr uint64_t kKeys = 400000, kBatch = 20000;
  std::vector<uint64_t> keys(kKeys);
  for (bool load : {false, true}) {
    for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k;
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    StoreOptions o = small_options();
    o.background_merge = false;
    o.min_log_bytes = 64u << 20;  // all rows stay in the log
    uint64_t memory[2];
    for (bool sorted : {false, true}) {
      const std::string path = sorted ? "/s/sorted" : "/s/store";
      if (sorted) std::sort(keys.begin(), keys.end(), [](uint64_t a, uint64_t b) { return hash_key(a) < hash_key(b); });
      auto store = SsdStore::open(fs, path, o);
      std::vector<uint8_t> rows(kBatch * kRow, 7);
      const uint64_t other = kKeys;
      store->put(&other, 1, {rows.data(), kRow});  // from now on load() behaves as put()
      for (size_t first = 0; first < kKeys; first += kBatch) {
        if (load) store->load(&keys[first], kBatch, {rows.data(), kRow});
        else store->put(&keys[first], kBatch, {rows.data(), kRow});
      }
      memory[sorted] = store->stats().mem_total;
      store->commit("");
      store.reset();
      store = SsdStore::open(fs, path, o);
      std::vector<uint8_t> found(kKeys), out(kKeys * kRow);
      store->get(keys.data(), kKeys, found.data(), {out.data(), kRow});
      CHECK_EQ(static_cast<uint64_t>(std::count(found.begin(), found.end(), 1)), kKeys);
      CHECK_EQ(static_cast<uint64_t>(std::count(out.begin(), out.end(), 7)), out.size());
    }
    CHECK(memory[1] < memory[0] * 3 / 2);
  }
}

TEST(Store, SmallLoadsAmongOtherRowsUseTheWriteBuffer) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.write_buffer = 1u << 20;
  auto store = SsdStore::open(fs, "/s/store", o);
  Oracle now;
  Row row{};
  store->put(std::array<uint64_t, 2>{0, 1}.data(), 2, {std::vector<uint8_t>(2 * kRow).data(), kRow});
  store->commit("");
  now[0] = now[1] = row;
  const uint64_t before = store->stats().bytes_written;
  for (uint64_t k = 2; k < 1000; ++k) {
    row.fill(static_cast<uint8_t>(k));
    store->load(&k, 1, {row.data(), kRow});
    now[k] = row;
  }
  CHECK_EQ(store->stats().bytes_written, before);
  expect_equal(*store, now, 1000);
  store->commit("");
  store.reset();
  store = SsdStore::open(fs, "/s/store", o);
  expect_equal(*store, now, 1000);
}

TEST(Store, LoadOverTheBudgetFailsBeforeItWrites) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.mem_budget = 1 << 20;
  o.filter_bits = 16;
  constexpr uint64_t kKeys = 1000000;
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k;
  std::vector<uint8_t> rows(kKeys * kRow, 7);
  auto store = SsdStore::open(fs, "/s/store", o);
  CHECK_THROWS(BudgetError, store->load(keys.data(), kKeys, {rows.data(), kRow}));
  StoreStats s = store->stats();
  CHECK_EQ(s.rows_in_base, 0u);
  CHECK(s.mem_total < o.mem_budget);
  store->load(keys.data(), 1000, {rows.data(), kRow});
  store->commit("");
  store.reset();
  store = SsdStore::open(fs, "/s/store", o);
  CHECK_EQ(store->stats().rows_in_base, 1000u);
}

}  // namespace
}  // namespace thermocline
