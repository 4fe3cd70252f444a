// SsdStore against a map: random operations, durability, concurrency and invalid use.
#include "ssd/store.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "ssd/store_test_util.h"
#include "testing/mem_fs.h"
#include "testing/test.h"
#include "util/error.h"
#include "util/hash.h"

namespace thermocline {
namespace {

using testing::MemFs;

void random_operations(uint64_t seed, bool background, int steps) {
  std::mt19937_64 rng(seed);
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.background_merge = background;
  o.filter_bits = seed % 2 ? 8 : 0;
  constexpr uint64_t kKeys = 20000;
  std::map<uint64_t, Oracle> committed{{0, {}}};
  Oracle now;
  auto store = SsdStore::open(fs, "/s/store", o);
  for (int step = 0; step < steps; ++step) {
    uint64_t choice = rng() % 100;
    if (choice < 70) {
      size_t n = rng() % 4 == 0 ? 1 + rng() % 5000 : 1 + rng() % 50;
      std::vector<uint64_t> keys(n);
      std::vector<uint8_t> rows(n * kRow);
      for (auto& k : keys) k = rng() % kKeys;
      for (auto& b : rows) b = static_cast<uint8_t>(rng());
      if (rng() % 5 == 0) {
        store->erase(keys.data(), n);
        for (auto k : keys) now.erase(k);
      } else {
        if (n % 3 == 0) store->load(keys.data(), n, {rows.data(), kRow});
        else store->put(keys.data(), n, {rows.data(), kRow});
        for (size_t i = 0; i < n; ++i) std::memcpy(now[keys[i]].data(), &rows[i * kRow], kRow);
      }
    } else if (choice < 80) {
      uint64_t epoch = store->commit("note " + std::to_string(step));
      committed[epoch] = now;
      CHECK_EQ(store->note(), "note " + std::to_string(step));
      if (committed.size() > 4) {
        auto oldest = committed.begin();
        if (oldest->first != 0) store->release(oldest->first);
        committed.erase(oldest);
      }
    } else if (choice < 84) {
      uint64_t back = committed.rbegin()->first;
      store.reset();
      store = SsdStore::open(fs, "/s/store", o);
      CHECK_EQ(store->epoch(), back);
      now = committed[back];
    } else if (choice < 86 && committed.rbegin()->first > 0) {
      auto pick = committed.begin();
      std::advance(pick, rng() % committed.size());
      if (pick->first == 0) continue;
      StoreOptions old = o;
      old.create = false;
      old.epoch = pick->first;
      if (rng() % 2) {
        old.read_only = true;
        auto view = SsdStore::open(fs, "/s/store", old);
        expect_equal(*view, pick->second, kKeys);
      } else {  // continue from an older commit
        store.reset();
        store = SsdStore::open(fs, "/s/store", old);
        now = pick->second;
      }
    } else if (choice < 88) {
      store->merge_all();
    } else if (choice < 94) {
      expect_equal(*store, now, kKeys);
    } else {
      store->check();
    }
  }
  expect_equal(*store, now, kKeys);
  store->check();
  store->merge_all();
  expect_equal(*store, now, kKeys);
  CHECK(store->stats().partitions > 1);
  CHECK(store->stats().merges > 0);
}

TEST(Store, RandomOperationsWithInlineMerges) {
  for (uint64_t seed = 1; seed <= 8; ++seed) random_operations(seed, false, 300);
}

TEST(Store, RandomOperationsWithBackgroundMerges) {
  for (uint64_t seed = 1; seed <= 8; ++seed) random_operations(100 + seed, true, 300);
}

TEST(Store, UncommittedRowsAreLostAfterReopen) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  auto store = SsdStore::open(fs, "/s/a", small_options());
  uint64_t key = 7;
  Row row{1, 2, 3};
  store->put(&key, 1, {row.data(), kRow});
  CHECK_EQ(store->count(), 1u);
  store.reset();
  store = SsdStore::open(fs, "/s/a", small_options());
  CHECK_EQ(store->epoch(), 0u);
  CHECK_EQ(store->count(), 0u);
  store->put(&key, 1, {row.data(), kRow});
  CHECK_EQ(store->commit("x"), 1u);
  store.reset();
  store = SsdStore::open(fs, "/s/a", small_options());
  CHECK_EQ(store->count(), 1u);
  CHECK_EQ(store->note(), std::string("x"));
}

TEST(Store, AllKeysAreValidAndTheLastOfABatchWins) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  auto store = SsdStore::open(fs, "/s/a", small_options());
  std::vector<uint64_t> keys{0, ~uint64_t{0}, 1ull << 63, 0};
  std::vector<uint8_t> rows(4 * kRow);
  for (size_t i = 0; i < 4; ++i) rows[i * kRow] = static_cast<uint8_t>(i + 1);
  for (int round = 0; round < 2; ++round) {
    store->put(keys.data(), 4, {rows.data(), kRow});
    std::vector<uint8_t> found(4), out(4 * kRow);
    store->get(keys.data(), 4, found.data(), {out.data(), kRow});
    CHECK(found[0] && found[1] && found[2] && found[3]);
    CHECK_EQ(int{out[0]}, 4);
    CHECK_EQ(int{out[3 * kRow]}, 4);
    CHECK_EQ(int{out[kRow]}, 2);
    CHECK_EQ(store->count(), 3u);
    store->merge_all();
  }
}

TEST(Store, LinkCheckpointCopiesTheOpenedCommit) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  auto store = SsdStore::open(fs, "/s/a", o);
  put_range(*store, 0, 10);
  store->commit("one");
  put_range(*store, 10, 20);
  store->commit("two");
  store.reset();
  o.create = false;
  o.epoch = 1;
  store = SsdStore::open(fs, "/s/a", o);
  store->link_checkpoint("/s/b");
  o.epoch.reset();
  auto copy = SsdStore::open(fs, "/s/b", o);
  CHECK_EQ(copy->note(), std::string("one"));
  CHECK_EQ(copy->count(), 10u);
  copy->check();
}

TEST(Store, ConcurrentReadersAndWriter) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  auto store = SsdStore::open(fs, "/s/a", o);
  constexpr uint64_t kKeys = 5000;
  // A row contains its key and the round that wrote it; rounds ascend.
  auto fill = [](uint64_t key, uint64_t round) {
    Row row{};
    std::memcpy(row.data(), &key, 8);
    std::memcpy(row.data() + 8, &round, 8);
    return row;
  };
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k;
  std::atomic<uint64_t> round_done{0};
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};  // CHECK must not fail on another thread
  auto reader = [&] {
    std::vector<uint8_t> found(kKeys), rows(kKeys * kRow);
    while (!stop) {
      uint64_t before = round_done;
      store->get(keys.data(), kKeys, found.data(), {rows.data(), kRow});
      for (uint64_t k = 0; k < kKeys && before > 0; ++k) {
        uint64_t key, round;
        std::memcpy(&key, &rows[k * kRow], 8);
        std::memcpy(&round, &rows[k * kRow + 8], 8);
        if (!found[k] || key != k || round < before) ++wrong;
      }
    }
  };
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) readers.emplace_back(reader);
  for (uint64_t round = 1; round <= 60; ++round) {
    std::vector<uint8_t> rows(kKeys * kRow);
    for (uint64_t k = 0; k < kKeys; ++k) {
      Row row = fill(k, round);
      std::memcpy(&rows[k * kRow], row.data(), kRow);
    }
    store->put(keys.data(), kKeys, {rows.data(), kRow});
    round_done = round;
    if (round % 10 == 0) {
      uint64_t epoch = store->commit("");
      if (epoch > 1) store->release(epoch - 1);
    }
  }
  stop = true;
  for (auto& r : readers) r.join();
  CHECK_EQ(wrong.load(), 0);
  store->check();
}

TEST(Store, CloseFinishesDuringContinuousCalls) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  auto store = SsdStore::open(fs, "/s/a", small_options());
  put_range(*store, 0, 5000);
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i)
    readers.emplace_back([&] {
      std::vector<uint64_t> keys(1000);
      std::vector<uint8_t> found(1000), rows(1000 * kRow);
      try {
        for (;;) store->get(keys.data(), keys.size(), found.data(), {rows.data(), kRow});
      } catch (const Error&) {  // closed
      }
    });
  store->close();
  for (auto& r : readers) r.join();
}

TEST(Store, ForkedChildDoesNotChangeFiles) {
  testing::TempDir dir;
  StoreOptions o = small_options();
  auto store = SsdStore::open(make_posix_fs(), dir / "s", o);
  put_range(*store, 0, 20000);
  pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    try {
      store->count();
    } catch (const Error&) {
      refused = true;
    }
    store->close();
    store.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  store->commit("");
  store.reset();
  store = SsdStore::open(make_posix_fs(), dir / "s/", o);
  CHECK_EQ(store->count(), 20000u);
}

TEST(Store, InvalidOptionsThrow) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.max_log_ratio = 0;
  CHECK_THROWS(Error, SsdStore::open(fs, "/s/a", o));
  o = small_options();
  o.partition_bytes = 0;
  CHECK_THROWS(Error, SsdStore::open(fs, "/s/a", o));
}

}  // namespace
}  // namespace thermocline
