// Long random operations on a store against the oracle, on one thread and on several threads with disjoint keys. `make
// test-sanitize` runs them under ASan, UBSan and TSan.
#include <cstdio>
#include <cstring>
#include <thread>

#include "ssd/store.h"
#include "testing/mem_fs.h"
#include "testing/store_driver.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline::testing {
namespace {

void fuzz(uint64_t key_ops, bool background) {
  uint64_t done = 0, commits = 0, merges = 0, lives = 0;
  for (uint64_t seed = 1; done < key_ops; ++seed, ++lives) {
    DriverOptions options(seed);
    options.store.background_merge = background;
    auto fs = std::make_shared<MemFs>();
    StoreDriver driver(fs, "/store", options);
    driver.open();
    try {
      for (int i = 0; i < 600; ++i) driver.step();
      driver.commit();
      driver.check_all();
      merges += driver.store().stats().merges;
      driver.close();
      verify_recovered(fs, "/store", options, driver.attempts(), "closed");
    } catch (const std::runtime_error& e) {
      throw Failure("seed " + std::to_string(seed) + ": " + e.what());
    }
    done += driver.key_ops();
    commits += driver.attempts().size();
  }
  std::printf("[%llu key operations, %llu stores, %llu commits, %llu merges] ", (unsigned long long)done,
              (unsigned long long)lives, (unsigned long long)commits, (unsigned long long)merges);
}

TEST(StoreFuzz, AgainstTheOracle) { fuzz(100'000, false); }
TEST(FaultsFuzz, OneMillionOperations) { fuzz(scaled(1'000'000, 10'000'000), false); }
TEST(FaultsFuzz, OneMillionOperationsWithBackgroundMerges) { fuzz(scaled(1'000'000, 10'000'000), true); }

// Threads put, delete and get disjoint keys, while one thread commits, releases, scans and checks.
void concurrent_threads(uint64_t rounds, uint64_t seed) {
  constexpr uint32_t kThreads = 4, kKeys = 4000;
  DriverOptions options(seed);
  StoreOptions o = options.store;
  o.row_bytes = options.row_bytes;
  o.create = true;
  o.background_merge = true;
  auto fs = std::make_shared<MemFs>();
  auto store = SsdStore::open(fs, "/store", o);
  std::vector<Snapshot> state(kThreads);  // per thread
  std::vector<std::exception_ptr> errors(kThreads + 1);
  auto work = [&](uint32_t t) {
    Snapshot& mine = state[t];
    mine.version.assign(kKeys, 0);
    std::mt19937_64 rng(seed * 100 + t);
    uint32_t version = 1;
    const size_t bytes = o.row_bytes;
    std::vector<uint64_t> keys;
    std::vector<uint32_t> which;
    std::vector<uint8_t> rows, found, expected(bytes);
    for (uint64_t r = 0; r < rounds; ++r) {
      const size_t n = 1 + rng() % 300;
      keys.resize(n);
      which.resize(n);
      rows.resize(n * bytes);
      found.resize(n);
      for (size_t i = 0; i < n; ++i) {
        which[i] = uint32_t(rng() % (kKeys / kThreads)) * kThreads + t;
        keys[i] = test_key(which[i]);
      }
      const uint64_t dice = rng() % 10;
      if (dice < 5) {
        for (size_t i = 0; i < n; ++i) {
          mine.version[which[i]] = version;
          make_row(keys[i], version++, &rows[i * bytes], bytes);
        }
        store->put(keys.data(), n, {rows.data(), bytes});
      } else if (dice < 6) {
        for (uint32_t k : which) mine.version[k] = 0;
        store->erase(keys.data(), n);
      } else {
        store->get(keys.data(), n, found.data(), {rows.data(), bytes});
        for (size_t i = 0; i < n; ++i) {
          const uint32_t want = mine.version[which[i]];
          make_row(keys[i], want, expected.data(), bytes);
          const bool right =
              want == 0 ? !found[i] : found[i] && std::memcmp(&rows[i * bytes], expected.data(), bytes) == 0;
          if (!right) throw Failure("thread " + std::to_string(t) + ": WRONG ROW of key " + std::to_string(keys[i]));
        }
      }
    }
  };
  std::atomic<uint32_t> running{kThreads};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        work(t);
      } catch (...) {
        errors[t] = std::current_exception();
      }
      --running;
    });
  }
  uint64_t commits = 0;
  try {
    std::mt19937_64 rng(seed);
    std::vector<uint64_t> keys(64);
    std::vector<uint8_t> rows(64 * o.row_bytes);
    for (; running > 0; ++commits) {
      store->commit("note " + std::to_string(commits));
      const auto epochs = store->epochs();
      if (epochs.size() > 3) store->release(epochs[rng() % (epochs.size() - 1)]);
      auto scan = store->scan();
      uint64_t scanned = 0;
      while (size_t n = scan->next(keys.size(), keys.data(), rows.data())) scanned += n;
      if (scanned > kKeys) throw Failure("scan returned more rows than there are keys");
      if (commits % 8 == 0) store->check();
      store->stats();
    }
  } catch (...) {
    errors[kThreads] = std::current_exception();
  }
  for (auto& t : threads) t.join();
  for (auto& e : errors) {
    if (e) std::rethrow_exception(e);
  }
  Snapshot want;
  want.version.resize(kKeys);
  for (uint32_t i = 0; i < kKeys; ++i) want.version[i] = state[i % kThreads].version[i];
  verify(*store, want, "after the threads");
  store->commit("last");
  store->check();
  store.reset();
  o.create = false;
  auto again = SsdStore::open(fs, "/store", o);
  verify(*again, want, "reopened");
  std::printf("[%llu commits] ", (unsigned long long)commits);
}

TEST(StoreFuzz, ConcurrentThreads) { concurrent_threads(300, 1); }
TEST(FaultsFuzz, ConcurrentThreads) {
  for (uint64_t seed = 2; seed < 8; ++seed) concurrent_threads(scaled(600, 6000), seed);
}

}  // namespace
}  // namespace thermocline::testing
