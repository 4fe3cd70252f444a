// A damaged page sets one partition aside: the others are merged, its log stays bounded, undamaged rows stay exact.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "ssd/repair.h"
#include "ssd/store.h"
#include "ssd/store_test_util.h"
#include "testing/crash.h"
#include "testing/fault_fs.h"
#include "testing/mem_fs.h"
#include "testing/record_fs.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline {
namespace {

using testing::MemFs;

constexpr uint64_t kKeys = 20000;

StoreOptions damage_options() {
  StoreOptions o = small_options();
  o.background_merge = false;
  return o;
}

// A store of kKeys rows in several base files, one of them with a damaged row page. Returns the name of that file.
std::string make_damaged(MemFs& fs, std::shared_ptr<MemFs> shared) {
  fs.make_dir("/s");
  auto store = SsdStore::open(shared, "/s/a", damage_options());
  put_range(*store, 0, kKeys);
  store->merge_all();
  CHECK(store->stats().partitions >= 4);
  store->commit("");
  store.reset();
  for (auto& name : fs.list("/s/a")) {
    if (!name.starts_with("base-")) continue;
    fs.bytes("/s/a/" + name)[4096 + 100] ^= 1;  // the first row page
    return name;
  }
  return "";
}

// Puts all keys with a new version: bytes 8..16 of the row.
void put_version(SsdStore& store, uint64_t version, uint64_t keys = kKeys) {
  std::vector<uint64_t> k(keys);
  std::vector<uint8_t> rows(keys * kRow, 0);
  for (uint64_t i = 0; i < keys; ++i) {
    k[i] = i;
    std::memcpy(&rows[i * kRow], &i, 8);
    std::memcpy(&rows[i * kRow + 8], &version, 8);
  }
  store.put(k.data(), keys, {rows.data(), kRow});
}

void expect_version(SsdStore& store, uint64_t version, uint64_t keys = kKeys) {
  std::vector<uint64_t> k(keys);
  std::vector<uint8_t> rows(keys * kRow), found(keys);
  for (uint64_t i = 0; i < keys; ++i) k[i] = i;
  store.get(k.data(), keys, found.data(), {rows.data(), kRow});
  for (uint64_t i = 0; i < keys; ++i) {
    CHECK(found[i]);
    CHECK(std::memcmp(&rows[i * kRow], &i, 8) == 0);
    CHECK(std::memcmp(&rows[i * kRow + 8], &version, 8) == 0);
  }
}

TEST(StoreDamage, LogOfASetAsidePartitionIsBoundedAndRowsStayExact) {
  auto fs = std::make_shared<MemFs>();
  const std::string damaged = make_damaged(*fs, fs);
  auto store = SsdStore::open(fs, "/s/a", damage_options());
  CHECK(store->damage().empty());
  uint64_t longest = 0, version = 0;
  for (int i = 0; i < 60; ++i) {  // 60 times the base
    put_version(*store, ++version);
    longest = std::max(longest, store->stats().log_bytes);
    if (i % 20 == 0) expect_version(*store, version);
    if (i % 15 == 0) store->commit("");
  }
  const StoreStats stats = store->stats();
  CHECK_EQ(stats.damaged_partitions, 1u);
  CHECK(stats.damage.find(damaged) != std::string::npos && stats.damage.find("page 1") != std::string::npos);
  CHECK_EQ(store->damage(), stats.damage);
  CHECK(stats.merges > 60);
  CHECK(stats.set_aside_log_bytes <= stats.set_aside_log_bound);
  CHECK(longest < 3 * stats.base_bytes);
  const auto warnings = store->take_warnings();
  CHECK_EQ(warnings.size(), 1u);
  CHECK(warnings[0].find("thermocline repair /s/a") != std::string::npos);
  CHECK(store->take_warnings().empty());
  // Deletions of the set-aside partition stay deleted although its base has the rows.
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k;
  store->erase(keys.data(), keys.size());
  std::vector<uint8_t> found(kKeys, 1), rows(kKeys * kRow);
  put_range(*store, kKeys, kKeys + 20000);  // the log of the set-aside partition is copied meanwhile
  for (int i = 0; i < 20; ++i) put_range(*store, kKeys, kKeys + 20000);
  store->get(keys.data(), kKeys, found.data(), {rows.data(), kRow});
  CHECK(std::count(found.begin(), found.end(), 0) == long(kKeys));
  put_version(*store, ++version);
  store->commit("end");
  store.reset();
  store = SsdStore::open(fs, "/s/a", damage_options());
  expect_version(*store, version);
  CHECK_THROWS(CorruptionError, store->check());
}

// Gets that run while the log of a set-aside partition is copied see every row at least as new as the last put that
// returned.
TEST(StoreDamage, ReadsBesideCopiesSeeTheNewestRows) {
  auto fs = std::make_shared<MemFs>();
  make_damaged(*fs, fs);
  StoreOptions o = damage_options();
  o.background_merge = true;
  auto store = SsdStore::open(fs, "/s/a", o);
  put_version(*store, 1);
  std::atomic<uint64_t> done{1}, begun{1};
  std::atomic<bool> stop{false};
  auto reader = std::async(std::launch::async, [&] {
    std::vector<uint64_t> keys(kKeys);
    std::vector<uint8_t> rows(kKeys * kRow), found(kKeys);
    for (uint64_t i = 0; i < kKeys; ++i) keys[i] = i;
    uint64_t wrong = 0;
    while (!stop) {
      const uint64_t oldest = done;
      store->get(keys.data(), kKeys, found.data(), {rows.data(), kRow});
      const uint64_t newest = begun;
      for (uint64_t i = 0; i < kKeys; ++i) {
        uint64_t key, version;
        std::memcpy(&key, &rows[i * kRow], 8);
        std::memcpy(&version, &rows[i * kRow + 8], 8);
        wrong += !found[i] || key != i || version < oldest || version > newest;
      }
    }
    return wrong;
  });
  for (uint64_t version = 2; version < 30; ++version) {
    begun = version;
    put_version(*store, version);
    done = version;
  }
  stop = true;
  CHECK_EQ(reader.get(), 0u);
  CHECK_EQ(store->stats().damaged_partitions, 1u);
}

// No merge runs until a copy is counted: one that sets another partition aside would add a log that is not copied, and
// above the bound no further copy would be made.
TEST(StoreDamage, MergesWaitUntilACopyIsCounted) {
  auto mem = std::make_shared<MemFs>();
  make_damaged(*mem, mem);
  auto fs = std::make_shared<testing::FaultFs>(mem);
  StoreOptions o = damage_options();
  o.background_merge = true;
  auto store = SsdStore::open(fs, "/s/a", o);
  std::atomic<uint64_t> copies{0}, began{0};
  fs->on_point([&](std::string_view point) {
    if (point != "copy.counted" || ++copies > 20) return;
    std::thread([&] {  // this one has the lock of its put(), which is not taken twice
      const uint64_t merges = store->stats().merges;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      const StoreStats now = store->stats();
      began += now.merges - merges + now.merges_running;
    })
        .join();
  });
  for (uint64_t version = 1; version < 30; ++version) put_version(*store, version);
  CHECK(copies > 3);
  CHECK_EQ(began.load(), 0u);
  fs->on_point(nullptr);
}

// A put while the log of the set-aside partition cannot be copied ends at the stated bound, with the command.
TEST(StoreDamage, PutThrowsAboveTheBound) {
  auto fs = std::make_shared<MemFs>();
  make_damaged(*fs, fs);
  StoreOptions o = damage_options();
  auto store = SsdStore::open(fs, "/s/a", o);
  put_version(*store, 1);
  store->commit("");
  // Also damage the log: neither a merge nor a copy can read the rows.
  for (auto& name : fs->list("/s/a"))
    if (name.starts_with("log-"))
      for (size_t at = 4096; at < fs->bytes("/s/a/" + name).size(); at += 4096)
        fs->bytes("/s/a/" + name)[at + 100] ^= 1;
  std::string error;
  uint64_t put = 0;
  for (uint64_t version = 2; version < 300 && error.empty(); ++version) {
    try {
      put_version(*store, version);
      ++put;
    } catch (const CorruptionError& e) {
      error = e.what();
    }
  }
  const StoreStats stats = store->stats();
  CHECK(put > 0);
  CHECK(error.find("thermocline repair /s/a") != std::string::npos);
  CHECK(error.find(std::to_string(stats.set_aside_log_bound)) != std::string::npos);
  CHECK(stats.log_bytes < 2 * stats.set_aside_log_bound);
  store->commit("after");  // what was put is not lost
  store.reset();
}

// Partitions are set aside because the device cannot read: above the bound put() reports the I/O error, not corruption.
TEST(StoreDamage, PutAboveTheBoundReportsAnUnreadableDevice) {
  auto mem = std::make_shared<MemFs>();
  mem->make_dir("/a b");
  auto fs = std::make_shared<testing::FaultFs>(mem);
  auto store = SsdStore::open(fs, "/a b/s", damage_options());
  put_version(*store, 1);
  store->merge_all();
  fs->arm({.fault = testing::Fault::kIoError, .ops = testing::kReads, .for_good = true});
  std::string error;
  for (uint64_t version = 2; version < 300 && error.empty(); ++version) {
    try {
      put_version(*store, version);
    } catch (const IoError& e) {
      CHECK_EQ(e.code, EIO);
      error = e.what();
    }
  }
  CHECK(error.find(std::to_string(store->stats().set_aside_log_bound)) != std::string::npos);
  CHECK(error.find("run: thermocline repair '/a b/s'") != std::string::npos);
}

// The log of a set-aside partition that was copied forward is repaired like any other: its newest rows and deletions
// are exact, and where a copy is lost no older row takes its place.
TEST(StoreDamage, RepairKeepsRowsThatWereCopiedForward) {
  for (const bool damage_copies : {false, true}) {
    auto fs = std::make_shared<MemFs>();
    make_damaged(*fs, fs);
    uint64_t copies = 0, version = 0;
    {
      auto faults = std::make_shared<testing::FaultFs>(fs);
      auto store = SsdStore::open(faults, "/s/a", damage_options());
      for (int i = 0; i < 10; ++i) put_version(*store, ++version);
      std::vector<uint64_t> deleted(kKeys / 2);
      for (uint64_t k = 0; k < deleted.size(); ++k) deleted[k] = kKeys / 2 + k;
      store->erase(deleted.data(), deleted.size());
      copies = faults->points()["copy.written"];
      // Other keys, until everything above was copied.
      for (int i = 0; i < 400 && faults->points()["copy.written"] < copies + 2; ++i)
        put_range(*store, kKeys, kKeys + 20000);
      CHECK(faults->points()["copy.written"] >= copies + 2);
      CHECK_EQ(store->stats().damaged_partitions, 1u);
      store->commit("end");
    }
    uint64_t pages = 0;
    for (auto& name : fs->list("/s/a")) {
      if (!damage_copies || !name.starts_with("log-")) continue;
      auto& bytes = fs->bytes("/s/a/" + name);
      for (size_t at = 4096; at < bytes.size(); at += 4096)
        if (++pages % 7 == 0) bytes[at + 100] ^= 1;
    }
    const RepairReport report = repair_store(fs, "/s/a", {});
    CHECK(!report.losses.empty());
    auto store = SsdStore::open(fs, "/s/a", damage_options());
    store->check();
    std::vector<uint64_t> keys(kKeys);
    std::vector<uint8_t> rows(kKeys * kRow), found(kKeys);
    for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k;
    store->get(keys.data(), kKeys, found.data(), {rows.data(), kRow});
    uint64_t absent = 0;
    for (uint64_t k = 0; k < kKeys; ++k) {
      if (k >= kKeys / 2) {
        CHECK(!found[k]);
        continue;
      }
      absent += !found[k];
      if (!found[k]) continue;
      CHECK(std::memcmp(&rows[k * kRow], &k, 8) == 0);
      CHECK(std::memcmp(&rows[k * kRow + 8], &version, 8) == 0);
    }
    CHECK_EQ(absent > 0, damage_copies);
  }
}

// A damaged log page keeps its partition's log. Newer rows are exact before and after a reopen; a row whose newest
// version is on the page raises, and its older version is never returned.
TEST(StoreDamage, DamagedLogPageHidesNoNewerRow) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  auto store = SsdStore::open(fs, "/s/a", damage_options());
  put_version(*store, 1);
  store->merge_all();
  put_version(*store, 2, 400);  // too few for a merge
  store->commit("");
  store.reset();
  uint64_t damaged = 0;
  for (auto& name : fs->list("/s/a")) {
    if (!name.starts_with("log-")) continue;
    auto& bytes = fs->bytes("/s/a/" + name);
    bytes[bytes.size() - 4096 + 100] ^= 1;  // the last row page
    ++damaged;
  }
  CHECK_EQ(damaged, 1u);
  store = SsdStore::open(fs, "/s/a", damage_options());
  auto read = [&](uint64_t oldest, uint64_t least_lost) {
    uint64_t lost = 0;
    for (uint64_t k = 0; k < kKeys; ++k) {
      uint8_t found = 0;
      Row row;
      try {
        store->get(&k, 1, &found, {row.data(), kRow});
        uint64_t version;
        std::memcpy(&version, row.data() + 8, 8);
        CHECK(found && version >= (k < 400 ? oldest : 1));
      } catch (const CorruptionError&) {
        CHECK(k < 400);
        ++lost;
      }
    }
    CHECK(lost >= least_lost && lost <= 4096 / (kRow + 8));
  };
  read(2, 1);
  // The merge of their partition fails. Newer versions of half of the rows, then of all, are exact.
  CHECK_THROWS(CorruptionError, store->merge_all());
  CHECK(store->stats().damaged_partitions > 0);
  put_version(*store, 3, 200);
  read(2, 0);
  std::string error;
  uint64_t version = 4;
  put_version(*store, version, 400);
  while (error.empty()) {  // up to the bound
    expect_version(*store, version, 400);
    try {
      put_version(*store, version + 1, 400);
      ++version;
    } catch (const CorruptionError& e) {
      error = e.what();
    }
    CHECK(version < 300);
  }
  CHECK(error.find("nothing more can be put") != std::string::npos && error.find("log-") != std::string::npos);
  CHECK(error.find("Rows put so far can be committed") != std::string::npos);
  CHECK(error.find("thermocline repair /s/a") != std::string::npos);
  read(version, 0);
  store->commit("newer");
  store.reset();
  store = SsdStore::open(fs, "/s/a", damage_options());
  read(version, 0);
  store.reset();
  repair_store(fs, "/s/a", {});
  store = SsdStore::open(fs, "/s/a", damage_options());
  store->check();
  read(version, 0);
}

// Every base file is damaged: find_damage() lists each, warnings name the first three and count the others.
TEST(StoreDamage, ManyDamagedFilesAreListedAndCounted) {
  auto fs = std::make_shared<MemFs>();
  make_damaged(*fs, fs);
  uint64_t files = 0;
  for (auto& name : fs->list("/s/a"))
    if (name.starts_with("base-") && files++ > 0) fs->bytes("/s/a/" + name)[4096 + 100] ^= 1;
  CHECK(files > 4);
  auto store = SsdStore::open(fs, "/s/a", damage_options());
  CHECK_EQ(store->find_damage().size(), files);
  put_version(*store, 1);
  CHECK_THROWS(CorruptionError, store->merge_all());
  CHECK_EQ(store->stats().damaged_partitions, files);
  const std::vector<std::string> warnings = store->take_warnings();
  CHECK_EQ(warnings.size(), 4u);
  CHECK(warnings[3].find("(" + std::to_string(files) + " in all)") != std::string::npos);
  CHECK(store->take_warnings().empty());
}

// Power loss at any operation while the log of a set-aside partition is copied forward and committed: the store opens
// at the last commit that returned, or at the one in progress, with exactly its rows.
void crash_copies(uint64_t seed, size_t states) {
  auto start = std::make_shared<MemFs>();
  make_damaged(*start, start);
  auto record = std::make_shared<testing::RecordFs>(start);
  auto fs = std::make_shared<testing::FaultFs>(record);
  constexpr uint64_t kVersions = 10;
  {
    auto store = SsdStore::open(fs, "/s/a", damage_options());
    for (uint64_t version = 1; version <= kVersions; ++version) {
      put_version(*store, version);
      record->marker("begin " + std::to_string(version));
      store->commit(std::to_string(version));
      record->marker("end " + std::to_string(version));
      if (version > 2) store->release(store->epochs().front());
    }
    CHECK(fs->points()["copy.written"] > 2);
    CHECK_EQ(store->stats().damaged_partitions, 1u);
  }
  const testing::Recording recording = record->recording();
  uint64_t committed = 0, in_progress = 0;
  const size_t visited = testing::for_each_crash(recording, seed, states, [&](testing::CrashState& state) {
    uint64_t begun = 0, ended = 0;
    for (size_t i = 0; i < state.prefix; ++i)
      if (recording.ops[i].kind == testing::OpKind::kMarker) {
        const std::string& text = recording.ops[i].path;
        (text.starts_with("begin") ? begun : ended) = std::stoull(text.substr(text.find(' ')));
      }
    auto store = SsdStore::open(state.fs, "/s/a", damage_options());
    const uint64_t found = store->note().empty() ? 0 : std::stoull(store->note());
    if (found < ended || found > begun) throw testing::Failure(state.what + ": opened commit " + store->note());
    if (found > 0) expect_version(*store, found);
    (found == ended ? committed : in_progress) += 1;
    if ((committed + in_progress) % 8 == 0) {  // it can be used: the copies go on
      for (uint64_t version = 100; version < 104; ++version) put_version(*store, version);
      store->commit("103");
      expect_version(*store, 103);
    }
  });
  std::printf("[%zu crash states, %llu at a commit in progress] ", visited, (unsigned long long)in_progress);
  CHECK(committed > 0);
}

TEST(StoreCrash, SomeStatesWhileLogsOfSetAsidePartitionsAreCopied) { crash_copies(1, 60); }
TEST(FaultsCrash, WhileLogsOfSetAsidePartitionsAreCopied) {
  for (uint64_t seed = 1; seed <= testing::scaled(4, 20); ++seed) {
    if (testing::in_part(seed)) crash_copies(seed, testing::scaled(150, 500));
  }
}

// A pull of a damaged row raises; other rows of the same store do not.
TEST(StoreDamage, DamagedRowsRaiseAndOthersDoNot) {
  auto fs = std::make_shared<MemFs>();
  make_damaged(*fs, fs);
  auto store = SsdStore::open(fs, "/s/a", damage_options());
  put_version(*store, 1, 100);
  uint64_t lost = 0;
  for (uint64_t k = 0; k < kKeys; ++k) {
    uint8_t found;
    Row row;
    try {
      store->get(&k, 1, &found, {row.data(), kRow});
      CHECK(found);
      CHECK(std::memcmp(row.data(), &k, 8) == 0);
    } catch (const CorruptionError&) {
      ++lost;
    }
  }
  CHECK(lost > 0 && lost <= 4096 / (kRow + 8));
}

// ---- memory

TEST(StoreBudget, FilterIsGivenUpBeforePutFails) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = damage_options();
  o.filter_bits = 64;
  o.mem_budget = 1u << 20;
  o.segment_bytes = o.partition_bytes = 1u << 20;
  auto store = SsdStore::open(fs, "/s/a", o);
  uint64_t keys = 0;
  while (!store->stats().filter_given_up) {
    put_range(*store, keys, keys + 2000);
    keys += 2000;
    CHECK(keys < 1000000);
    CHECK(store->stats().mem_total <= o.mem_budget);
  }
  const auto warnings = store->take_warnings();
  CHECK_EQ(warnings.size(), 1u);
  CHECK(warnings[0].find("filter") != std::string::npos && warnings[0].find("1048576") != std::string::npos);
  for (int i = 0; i < 20; ++i, keys += 2000) put_range(*store, keys, keys + 2000);
  CHECK(store->stats().mem_total <= o.mem_budget);
  CHECK(store->take_warnings().empty());
  CHECK_EQ(store->count(), keys);
  store->merge_all();
  store->commit("");
  store.reset();
  // The files keep the filter: a larger budget loads it, the same budget gives it up at open.
  store = SsdStore::open(fs, "/s/a", o);
  CHECK(store->stats().filter_given_up);
  CHECK_EQ(store->take_warnings().size(), 1u);
  store.reset();
  o.mem_budget = 64u << 20;
  store = SsdStore::open(fs, "/s/a", o);
  CHECK(!store->stats().filter_given_up);
  CHECK(store->take_warnings().empty());
  CHECK_EQ(store->count(), keys);
}

TEST(StoreBudget, ExpectedRowsThatDoNotFitAreRefusedAtOpen) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.expected_rows = 1000000;
  SsdStore::open(fs, "/s/a", o)->close();
  o.expected_rows = 10000000000;
  try {
    SsdStore::open(fs, "/s/a", o);
    CHECK(false);
  } catch (const BudgetError& e) {
    const std::string text = e.what();
    CHECK(text.find("10000000000 rows") != std::string::npos && text.find("16777216") != std::string::npos);
  }
}

}  // namespace
}  // namespace thermocline
