// Changes since a position against the difference of two oracles, over merges, crashes, loads and earlier epochs.
#include "ssd/store.h"

#include <map>
#include <optional>
#include <random>
#include <vector>

#include "ssd/repair.h"
#include "ssd/store_test_util.h"
#include "testing/fault_fs.h"
#include "testing/mem_fs.h"
#include "testing/test.h"
#include "util/error.h"
#include "util/hash.h"

namespace thermocline {
namespace {

using testing::Fault;
using testing::FaultFs;
using testing::kWrites;
using testing::MemFs;

constexpr uint64_t kKeys = 3000;

struct Saved {
  StorePosition position;
  Oracle oracle;
};

// Applies the changes since `saved` to its rows and compares the result with the oracle. False: the log is gone.
bool replays(SsdStore& store, const Saved& saved, const Oracle& oracle) {
  std::string cause;
  auto changes = store.changes_since(saved.position, &cause);
  if (!changes) {
    CHECK(!cause.empty());
    return false;
  }
  Oracle rows = saved.oracle;
  std::vector<uint64_t> keys(97);
  std::vector<uint8_t> values(97 * kRow), deleted(97);
  uint64_t last = 0, total = 0;
  while (size_t n = changes->next(97, keys.data(), values.data(), deleted.data())) {
    for (size_t i = 0; i < n; ++i) {
      CHECK(total++ == 0 || hash_key(keys[i]) > last);
      last = hash_key(keys[i]);
      if (deleted[i]) rows.erase(keys[i]);
      else std::memcpy(rows[keys[i]].data(), &values[i * kRow], kRow);
    }
  }
  CHECK(total <= changes->rows());
  CHECK(rows == oracle);
  return true;
}

TEST(StoreChanges, ReplayFromAnyPositionGivesTheRows) {
  size_t replayed = 0, gone = 0;
  for (unsigned seed = 0; seed < 12; ++seed) {
    std::mt19937_64 rng(seed);
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    StoreOptions o = small_options();
    o.background_merge = seed % 2 == 0;
    if (seed % 3 == 0) o.min_log_bytes = 1u << 20;
    auto store = SsdStore::open(fs, "/s/a", o);
    Oracle oracle;
    std::vector<Saved> saved;
    std::map<uint64_t, Oracle> commits;
    const auto reopen = [&](std::optional<uint64_t> epoch) {
      store.reset();
      StoreOptions again = o;
      again.create = false;
      again.epoch = epoch;
      store = SsdStore::open(fs, "/s/a", again);
    };
    for (int step = 0; step < 60; ++step) {
      std::vector<uint64_t> keys;
      for (size_t i = rng() % 400; i > 0; --i) keys.push_back(rng() % kKeys);
      if (rng() % 4 == 0) {
        store->erase(keys.data(), keys.size());
        for (uint64_t k : keys) oracle.erase(k);
      } else {
        std::vector<uint8_t> rows(keys.size() * kRow);
        for (auto& byte : rows) byte = static_cast<uint8_t>(rng());
        store->put(keys.data(), keys.size(), {rows.data(), kRow});
        for (size_t i = 0; i < keys.size(); ++i) std::memcpy(oracle[keys[i]].data(), &rows[i * kRow], kRow);
      }
      if (rng() % 3 == 0) saved.push_back({store->position(), oracle});
      if (rng() % 5 == 0) commits[store->commit("")] = oracle;
      if (rng() % 20 == 0) store->merge_all();
      if (rng() % 10 == 0 && !commits.empty()) {  // a crash, and the last commit or an earlier one
        auto at = commits.begin();
        if (rng() % 2 == 0) at = std::prev(commits.end());
        oracle = at->second;
        reopen(at->first);
      }
      for (const Saved& s : saved) ++(replays(*store, s, oracle) ? replayed : gone);
    }
  }
  CHECK(replayed > 500);  // both cases occur
  CHECK(gone > 500);
}

TEST(StoreChanges, AKeptLogOutlivesMerges) {
  std::mt19937_64 rng(5);
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  auto store = SsdStore::open(fs, "/s/a", small_options());
  Oracle oracle;
  const auto put = [&](size_t n) {
    std::vector<uint64_t> keys;
    for (size_t i = 0; i < n; ++i) keys.push_back(rng() % kKeys);
    std::vector<uint8_t> rows(keys.size() * kRow);
    for (auto& byte : rows) byte = static_cast<uint8_t>(rng());
    store->put(keys.data(), keys.size(), {rows.data(), kRow});
    for (size_t i = 0; i < keys.size(); ++i) std::memcpy(oracle[keys[i]].data(), &rows[i * kRow], kRow);
  };
  put(5000);
  const Saved first{store->position(), oracle};
  store->merge_all();
  put(100);
  CHECK(!replays(*store, first, oracle));  // not kept
  Saved last{store->position(), oracle};
  store->keep_log(last.position, false);
  for (int step = 0; step < 20; ++step) {
    put(300);
    store->merge_all();
    CHECK(replays(*store, last, oracle));
    if (step % 4 != 3) continue;
    put(10);
    const Saved next{store->position(), oracle};
    store->keep_log(next.position, false);  // `last` is kept
    put(10);
    CHECK(replays(*store, last, oracle));
    store->keep_log(next.position, true);
    store->merge_all();
    CHECK(replays(*store, next, oracle));
    CHECK(!replays(*store, last, oracle));
    last = next;
  }
  store->check();
  const uint64_t disk = store->stats().disk_bytes, base = store->stats().base_bytes;
  for (int step = 0; step < 1000 && replays(*store, last, oracle); ++step) {
    put(3000);
    store->merge_all();
    CHECK(store->stats().disk_bytes <= disk + 8 * base + (8u << 20));
  }
  CHECK(!replays(*store, last, oracle));  // given up
}

StoreOptions merging_on_request() {
  StoreOptions o = small_options();
  o.background_merge = false;
  return o;
}

// A store with base files and a log.
std::shared_ptr<SsdStore> open_with_log(const std::shared_ptr<FileSystem>& fs) {
  fs->make_dir("/s");
  auto store = SsdStore::open(fs, "/s/a", merging_on_request());
  put_range(*store, 0, 2000);
  store->merge_all();
  put_range(*store, 0, 100);
  return store;
}

TEST(StoreChanges, AFullDiskGetsTheSpaceOfTheKeptLog) {
  auto fs = std::make_shared<FaultFs>(std::make_shared<MemFs>());
  auto store = open_with_log(fs);
  const StorePosition position = store->position();
  store->keep_log(position, false);
  put_range(*store, 0, 1000);
  store->merge_all();
  std::string cause;
  CHECK(store->changes_since(position, &cause) != nullptr);
  const uint64_t kept = store->stats().disk_bytes;
  fs->arm({.fault = Fault::kDiskFull, .ops = kWrites, .at = 0, .for_good = true});
  bool full = false;
  for (int i = 0; i < 8 && !full; ++i) {
    try {
      put_range(*store, 0, 2000);
    } catch (const DiskFullError&) {
      full = true;
    }
  }
  CHECK(full);
  CHECK(store->stats().disk_bytes < kept);
  CHECK(store->changes_since(position, &cause) == nullptr);
}

// The kept log takes memory of the filter and of the log to be merged only while there is enough.
TEST(StoreChanges, LittleMemoryIsForTheFilterNotForTheKeptLog) {
  const auto keys_with_a_filter = [](bool keep) {
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    StoreOptions o = merging_on_request();
    o.filter_bits = 64;
    o.mem_budget = 1u << 20;
    o.segment_bytes = o.partition_bytes = 1u << 20;
    auto store = SsdStore::open(fs, "/s/a", o);
    uint64_t keys = 80'000;
    put_range(*store, 0, keys);
    put_range(*store, 0, 100);
    const StorePosition position = store->position();
    if (keep) store->keep_log(position, false);
    std::string cause;
    for (; !store->stats().filter_given_up; keys += 100) {
      put_range(*store, keys, keys + 100);
      CHECK(keys < 1'000'000);
      if (keys == 90'000) CHECK_EQ(store->changes_since(position, &cause) != nullptr, keep);
    }
    CHECK(store->changes_since(position, &cause) == nullptr);
    return keys;
  };
  CHECK_EQ(keys_with_a_filter(true), keys_with_a_filter(false));
}

TEST(StoreChanges, AReaderThatKeepsTheLogDeletesNoFileOfTheWriter) {
  auto fs = std::make_shared<MemFs>();
  auto writer = open_with_log(fs);
  writer->commit("");
  put_range(*writer, 1000, 3000);
  writer->merge_all();  // its files are in no manifest yet
  StoreOptions reading = merging_on_request();
  reading.read_only = true;
  reading.create = false;
  auto reader = SsdStore::open(fs, "/s/a", reading);
  CHECK(reader->position().first_page != 0);
  writer->commit("");
  reader->keep_log(reader->position(), false);
  reader.reset();
  writer.reset();
  SsdStore::open(fs, "/s/a", merging_on_request())->check();
}

TEST(StoreChanges, OneMoreCommitCostsItsRowsOnly) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  auto store = SsdStore::open(fs, "/s/a", o);
  put_range(*store, 0, 20000);
  store->commit("");
  const StorePosition before = store->position();
  put_range(*store, 0, 200);
  store->commit("");
  store.reset();
  o.create = false;
  o.read_only = true;
  store = SsdStore::open(fs, "/s/a", o);
  std::string cause;
  auto changes = store->changes_since(before, &cause);
  CHECK(changes != nullptr);
  CHECK_EQ(changes->rows(), 200u);
  CHECK_EQ(store->stats().bytes_read, 0u);
  CHECK(store->changes_since(store->position(), &cause) != nullptr);
}

TEST(StoreChanges, LoadedRowsAndOtherStoresAreReported) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  auto store = SsdStore::open(fs, "/s/a", o), other = SsdStore::open(fs, "/s/b", o);
  std::string cause;
  CHECK(store->changes_since(store->position(), &cause) == nullptr);  // nothing was put yet
  CHECK(cause.find("was empty") != std::string::npos);
  // The partition after the first row stays empty.
  uint64_t greatest = 0, least = 0;
  for (uint64_t k = 0; k < 1000; ++k) {
    if (hash_key(k) > hash_key(greatest)) greatest = k;
    if (hash_key(k) < hash_key(least)) least = k;
  }
  std::vector<uint8_t> row(kRow, 1);
  store->load(&least, 1, {row.data(), kRow});
  store->put(&least, 1, {row.data(), kRow});
  const StorePosition before = store->position();
  CHECK(store->changes_since(before, &cause) != nullptr);
  CHECK(other->changes_since(before, &cause) == nullptr);
  CHECK(cause.find("another store") != std::string::npos);
  store->load(&greatest, 1, {row.data(), kRow});
  CHECK(store->changes_since(before, &cause) == nullptr);
  CHECK(cause.find("loaded without it") != std::string::npos);
}

TEST(StoreChanges, RowsLostByARepairAreReported) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  auto store = SsdStore::open(fs, "/s/a", o);
  put_range(*store, 0, 2000);
  store->merge_all();
  put_range(*store, 0, 10);
  store->commit("");
  const StorePosition before = store->position();
  store.reset();
  for (auto& [path, inode] : fs->files()) {
    if (path.find("/base-") == std::string::npos) continue;
    fs->bytes(path)[kSector + 100] ^= 1;  // rows of the base: no extent changes
    break;
  }
  CHECK(repair_store(fs, "/s/a", {}).losses.size() == 1);
  o.create = false;
  store = SsdStore::open(fs, "/s/a", o);
  CHECK(store->count() < 2000);
  std::string cause;
  CHECK(store->changes_since(before, &cause) == nullptr);
}

}  // namespace
}  // namespace thermocline
