// Scans that follow their range, against an oracle; deletions that wait for no put().
#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "ssd/store.h"
#include "ssd/store_test_util.h"
#include "testing/fault_fs.h"
#include "testing/mem_fs.h"
#include "testing/test.h"
#include "util/hash.h"

namespace thermocline {
namespace {

using testing::FaultFs;
using testing::MemFs;

constexpr uint64_t kKeys = 3000;
constexpr KeyRange kMiddle{~uint64_t{0} / 4, ~uint64_t{0} / 4 * 3};

// Rows of `part` that a scan has read, with those that have changed since.
std::optional<Oracle> rows_of(const Oracle& read, SsdStore::Scan& scan, KeyRange part) {
  Oracle rows;
  for (auto& [key, row] : read) {
    if (part.contains(key)) rows[key] = row;
  }
  std::vector<uint64_t> keys(kKeys);
  std::vector<uint8_t> values(kKeys * kRow), deleted(kKeys);
  const auto n = scan.changed(part, kKeys, keys.data(), values.data(), deleted.data());
  if (!n) return std::nullopt;
  CHECK_EQ(std::set(keys.begin(), keys.begin() + static_cast<ptrdiff_t>(*n)).size(), *n);
  for (size_t i = 0; i < *n; ++i) {
    CHECK(part.contains(keys[i]));
    if (deleted[i]) rows.erase(keys[i]);
    else std::memcpy(rows[keys[i]].data(), &values[i * kRow], kRow);
  }
  return rows;
}

Oracle read_all(SsdStore::Scan& scan) {
  Oracle rows;
  std::vector<uint64_t> keys(97);
  std::vector<uint8_t> values(97 * kRow);
  while (size_t n = scan.next(97, keys.data(), values.data())) {
    for (size_t i = 0; i < n; ++i) std::memcpy(rows[keys[i]].data(), &values[i * kRow], kRow);
  }
  return rows;
}

TEST(StoreFollow, ScanAndChangesGiveTheRowsOfNow) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    std::mt19937_64 rng(seed);
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    StoreOptions o = small_options();
    o.background_merge = seed % 2 == 0;
    auto store = SsdStore::open(fs, "/s/a", o);
    Oracle oracle, read;
    std::unique_ptr<SsdStore::Scan> scan;
    for (int step = 0; step < 80; ++step) {
      if (step % 20 == 10) scan = store->follow(kMiddle);
      if (step % 20 == 13) read = read_all(*scan);
      std::vector<uint64_t> keys;
      for (size_t i = rng() % (step % 5 ? 30 : 600); i > 0; --i) keys.push_back(rng() % kKeys);
      std::vector<uint8_t> rows(keys.size() * kRow);
      for (auto& byte : rows) byte = static_cast<uint8_t>(rng());
      switch (rng() % 6) {
        case 0:
        case 1:
          store->erase(keys.data(), keys.size());
          for (uint64_t k : keys) oracle.erase(k);
          keys.clear();
          break;
        case 2:
          store->load(keys.data(), keys.size(), {rows.data(), kRow});
          break;
        case 3:
          if (rng() % 4 == 0) store->merge_all();
          if (rng() % 4 == 0) store->commit("");
          [[fallthrough]];
        default:
          store->put(keys.data(), keys.size(), {rows.data(), kRow});
      }
      for (size_t i = 0; i < keys.size(); ++i) std::memcpy(oracle[keys[i]].data(), &rows[i * kRow], kRow);
      if (step % 20 >= 13 && scan) {
        for (KeyRange part : {kMiddle, KeyRange{kMiddle.lo, ~uint64_t{0} / 2}}) {
          const auto found = rows_of(read, *scan, part);
          CHECK(found.has_value());
          Oracle expected;
          for (auto& [key, row] : oracle) {
            if (part.contains(key)) expected[key] = row;
          }
          CHECK(*found == expected);
        }
      }
      if (step % 10 == 9) expect_equal(*store, oracle, kKeys);
    }
    store->commit("");
    scan.reset();
    store.reset();
    o.create = false;
    store = SsdStore::open(fs, "/s/a", o);
    expect_equal(*store, oracle, kKeys);
    store->check();
  }
}

// load() writes base files where the store has no rows: they are changes, too.
TEST(StoreFollow, LoadedRowsAreChanges) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  auto store = SsdStore::open(fs, "/s/a", small_options());
  auto scan = store->follow(kMiddle);
  const Oracle read = read_all(*scan);
  Oracle oracle;
  std::vector<uint64_t> keys;
  std::vector<uint8_t> rows;
  for (uint64_t key = 0; key < 1000; ++key) {
    const Row row{static_cast<uint8_t>(key), 1};
    keys.push_back(key);
    rows.insert(rows.end(), row.begin(), row.end());
    if (kMiddle.contains(key)) oracle[key] = row;
  }
  store->load(keys.data(), keys.size(), {rows.data(), kRow});
  CHECK_EQ(store->stats().rows_in_base, 1000u);
  CHECK(read.empty() && rows_of(read, *scan, kMiddle) == oracle);
}

TEST(StoreFollow, ChangesThatTakeTooMuchMemoryAreGivenUp) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  auto store = SsdStore::open(fs, "/s/a", small_options());
  auto scan = store->follow({});
  put_range(*store, 0, 1000);
  uint64_t key = 0;
  uint8_t row[kRow], deleted = 0;
  CHECK_EQ(*scan->changed({}, 1, &key, row, &deleted), 1000u);  // more than there is room for: nothing is written
  CHECK_EQ(key, 0u);
  put_range(*store, 0, 400'000);
  CHECK(!scan->changed({}, 1, &key, row, &deleted));
}

// A store with 1,000 rows whose failpoints a test may use.
struct StoreWithFaults {
  std::shared_ptr<MemFs> inner;
  std::shared_ptr<FaultFs> fs;
  std::unique_ptr<SsdStore> store;
};

StoreWithFaults store_with_faults() {
  auto inner = std::make_shared<MemFs>();
  inner->make_dir("/s");
  auto fs = std::make_shared<FaultFs>(inner);
  auto store = SsdStore::open(fs, "/s/a", small_options());
  put_range(*store, 0, 1000);
  return {std::move(inner), std::move(fs), std::move(store)};
}

// Else a step that deletes rows would wait for the writes of evictions, and for merges.
TEST(StoreFollow, DeletionsDoNotWaitForAPut) {
  auto [inner, fs, store] = store_with_faults();
  std::atomic<bool> writing{false}, erased{false};
  fs->on_point([&](std::string_view point) {
    if (point != "extent.indexed") return;
    writing = true;
    while (!erased) std::this_thread::yield();
  });
  std::thread writer([&] { put_range(*store, 500, 1500); });
  while (!writing) std::this_thread::yield();
  const std::vector<uint64_t> keys{3, 700, 1200, 9999};
  store->erase(keys.data(), keys.size());  // the put ends only after this
  std::vector<uint8_t> found(keys.size()), rows(keys.size() * kRow);
  store->get(keys.data(), keys.size(), found.data(), {rows.data(), kRow});
  for (uint8_t f : found) CHECK_EQ(f, 0);
  erased = true;
  writer.join();
  Oracle oracle;
  for (uint64_t k = 0; k < 1500; ++k) std::memcpy((oracle[k] = {}).data(), &k, 8);
  for (uint64_t k : keys) oracle.erase(k);
  put_range(*store, 700, 701);  // newer than its deletion
  std::memcpy((oracle[700] = {}).data(), &keys[1], 8);
  expect_equal(*store, oracle, 2000);
  store->commit("");
  store.reset();
  store = SsdStore::open(inner, "/s/a", small_options());
  expect_equal(*store, oracle, 2000);
}

// Without a put() they would fill their memory, and one of them would write them, and wait for puts of other threads.
TEST(StoreFollow, DeletionsAreBufferedWithoutAPut) {
  auto [inner, fs, store] = store_with_faults();
  store->commit("");
  std::atomic<size_t> flushed{0}, flushed_here{0};
  fs->on_point([&, here = std::this_thread::get_id()](std::string_view point) {
    if (point != "flush.indexed") return;
    ++flushed;
    flushed_here += std::this_thread::get_id() == here;
  });
  Oracle oracle;
  for (uint64_t k = 0; k < 1000; ++k) std::memcpy((oracle[k] = {}).data(), &k, 8);
  for (uint64_t first = 0; first < 1000; first += 20) {
    std::vector<uint64_t> keys;
    for (uint64_t k = first; k < first + 20; ++k) oracle.erase(keys.emplace_back(k));
    store->erase(keys.data(), keys.size());
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (store->stats().waiting_deletions > 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    CHECK_EQ(store->stats().waiting_deletions, 0u);
  }
  CHECK(flushed > 0 && flushed_here == 0);
  expect_equal(*store, oracle, 1000);
  store.reset();  // also while a thread moves deletions
}

// A deletion during a put() of the key is the newer of the two: in get(), and in the changes of a scan.
TEST(StoreFollow, ADeletionDuringAPutIsAChange) {
  auto [inner, fs, store] = store_with_faults();
  auto scan = store->follow({});
  const Oracle read = read_all(*scan);
  const std::vector<uint64_t> keys{3, 700};
  bool erased = false;
  fs->on_point([&](std::string_view point) {  // before the rows of the put are in the index
    if (point != "extent.written" || erased) return;
    erased = true;
    std::thread([&] { store->erase(keys.data(), keys.size()); }).join();  // this one has the locks of its put()
  });
  put_range(*store, 500, 1500);
  CHECK(erased);
  Oracle oracle;
  for (uint64_t k = 0; k < 1500; ++k) std::memcpy((oracle[k] = {}).data(), &k, 8);
  for (uint64_t k : keys) oracle.erase(k);
  const auto found = rows_of(read, *scan, {});
  CHECK(found.has_value());
  CHECK(*found == oracle);
  expect_equal(*store, oracle, 2000);
}

TEST(StoreFollow, LastBytesOfRows) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  auto store = SsdStore::open(fs, "/s", small_options());
  std::vector<uint64_t> keys(kKeys);
  std::vector<uint8_t> rows(kKeys * kRow);
  for (size_t i = 0; i < kKeys; ++i) {
    keys[i] = i;
    for (size_t j = 0; j < kRow; ++j) rows[i * kRow + j] = static_cast<uint8_t>(31 * i + j);
  }
  store->put(keys.data(), kKeys, RowsIn{rows.data(), kRow});
  store->commit("");
  auto scan = store->follow({});
  constexpr size_t kSkip = kRow - 4;
  std::vector<uint64_t> found(kKeys + 1);
  std::vector<uint8_t> last(found.size() * 4);
  CHECK_EQ(scan->next(found.size(), found.data(), last.data(), kSkip), kKeys);
  for (size_t i = 0; i < kKeys; ++i) CHECK(std::memcmp(&last[i * 4], &rows[found[i] * kRow + kSkip], 4) == 0);
}

// A store with rows on disk and none in its write buffer, whose budget has memory left.
std::unique_ptr<SsdStore> filled_store() {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.background_merge = false;
  auto store = SsdStore::open(fs, "/s", o);
  put_range(*store, 0, kKeys);
  store->commit("");
  CHECK(store->stats().mem_spare > 100'000);
  return store;
}

bool keeps_changes(SsdStore::Scan& scan) {
  std::vector<uint64_t> keys(kKeys);
  std::vector<uint8_t> rows(kKeys * kRow), deleted(kKeys);
  const bool kept = scan.changed({}, kKeys, keys.data(), rows.data(), deleted.data()).has_value();
  CHECK_EQ(kept, !scan.lost());
  return kept;
}

// The budget counts what a scan keeps, its changes, and its read buffers until the last row was read.
TEST(StoreFollow, MemoryOfScansCounts) {
  auto store = filled_store();
  const StoreStats before = store->stats();
  auto scan = store->follow({}, 5000, 3000);
  const StoreStats begun = store->stats();
  CHECK(begun.mem_buffers > before.mem_buffers + 8000);
  CHECK(begun.mem_spare + 8000 < before.mem_spare);
  CHECK_EQ(read_all(*scan).size(), kKeys);
  const StoreStats read = store->stats();
  CHECK(read.mem_buffers >= before.mem_buffers + 5000 && read.mem_buffers < before.mem_buffers + 5000 + 16'384);
  CHECK(read.mem_buffers + 3000 < begun.mem_buffers);
  put_range(*store, 0, 10);
  CHECK(store->stats().mem_buffers >= read.mem_buffers + 10 * kRow);
  CHECK(keeps_changes(*scan));
  scan.reset();
  CHECK(store->stats().mem_spare + 10'000 > before.mem_spare);
}

TEST(StoreFollow, AScanWithoutMemoryDoesNotBegin) {
  auto store = filled_store();
  const StoreStats before = store->stats();
  CHECK(!store->follow({}, before.mem_spare));
  CHECK(!store->follow({}, 0, before.mem_spare));
  CHECK_EQ(store->stats().mem_buffers, before.mem_buffers);
  CHECK(store->follow({}) != nullptr);
}

// Each of several scans alone would fit: together they take no more than the budget has left.
TEST(StoreFollow, ScansShareTheMemory) {
  auto store = filled_store();
  const uint64_t spare = store->stats().mem_spare;
  std::vector<std::unique_ptr<SsdStore::Scan>> scans;
  while (auto scan = store->follow({}, spare / 16)) {
    read_all(*scan);
    scans.push_back(std::move(scan));
  }
  CHECK(scans.size() >= 2 && scans.size() < 16);
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t i = 0; i < kKeys; ++i) keys[i] = i;
  size_t lost = 0;
  for (size_t at = 0; at + 100 <= kKeys && lost == 0; at += 100) {
    store->erase(&keys[at], 100);
    lost = 0;
    for (auto& scan : scans) lost += !keeps_changes(*scan);
    const StoreStats now = store->stats();
    CHECK(now.mem_total <= now.mem_budget);
  }
  CHECK(lost > 0 && lost < scans.size());  // the memory of one is enough for the others
}

}  // namespace
}  // namespace thermocline
