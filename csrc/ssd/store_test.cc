// The store against a map: random batches, small files, so that merges, splits and reopenings are frequent.
#include "ssd/store.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "testing/mem_fs.h"
#include "testing/test.h"
#include "util/error.h"
#include "util/hash.h"

namespace thermocline {
namespace {

using testing::MemFs;

constexpr size_t kRow = 24;
using Row = std::array<uint8_t, kRow>;
using Oracle = std::map<uint64_t, Row>;

StoreOptions small_options() {
  StoreOptions o;
  o.row_bytes = kRow;
  o.create = true;
  o.mem_budget = 16u << 20;
  o.segment_bytes = 64u << 10;
  o.partition_bytes = 64u << 10;
  o.min_log_bytes = 32u << 10;
  o.write_buffer = 8u << 10;
  return o;
}

void expect_equal(SsdStore& store, const Oracle& oracle, uint64_t key_space) {
  std::vector<uint64_t> keys(key_space);
  for (uint64_t k = 0; k < key_space; ++k) keys[k] = k;
  std::vector<uint8_t> found(key_space), rows(key_space * kRow);
  store.get(keys.data(), keys.size(), found.data(), {rows.data(), kRow});
  for (uint64_t k = 0; k < key_space; ++k) {
    auto it = oracle.find(k);
    CHECK_EQ(found[k] != 0, it != oracle.end());
    if (found[k]) CHECK(std::memcmp(&rows[k * kRow], it->second.data(), kRow) == 0);
  }
  auto scan = store.scan();
  std::vector<uint64_t> some(257);
  std::vector<uint8_t> some_rows(257 * kRow);
  size_t total = 0;
  while (size_t n = scan->next(257, some.data(), some_rows.data())) {
    for (size_t i = 0; i < n; ++i) {
      auto it = oracle.find(some[i]);
      CHECK(it != oracle.end());
      CHECK(std::memcmp(&some_rows[i * kRow], it->second.data(), kRow) == 0);
    }
    total += n;
  }
  CHECK_EQ(total, oracle.size());
  CHECK_EQ(store.count(), oracle.size());
}

void random_life(uint64_t seed, bool background, int steps) {
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
    uint64_t what = rng() % 100;
    if (what < 70) {
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
    } else if (what < 80) {
      uint64_t epoch = store->commit("note " + std::to_string(step));
      committed[epoch] = now;
      CHECK_EQ(store->note(), "note " + std::to_string(step));
      if (committed.size() > 4) {
        auto oldest = committed.begin();
        if (oldest->first != 0) store->release(oldest->first);
        committed.erase(oldest);
      }
    } else if (what < 84) {
      uint64_t back = committed.rbegin()->first;
      store.reset();
      store = SsdStore::open(fs, "/s/store", o);
      CHECK_EQ(store->epoch(), back);
      now = committed[back];
    } else if (what < 86 && committed.rbegin()->first > 0) {
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
      } else {  // go back and live on from there
        store.reset();
        store = SsdStore::open(fs, "/s/store", old);
        now = pick->second;
      }
    } else if (what < 88) {
      store->merge_all();
    } else if (what < 94) {
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

TEST(Store, random_life_inline_merging) {
  for (uint64_t seed = 1; seed <= 8; ++seed) random_life(seed, false, 300);
}

TEST(Store, random_life_background_merging) {
  for (uint64_t seed = 1; seed <= 8; ++seed) random_life(100 + seed, true, 300);
}

// Pieces of ascending hash ranges, of sizes from one row to many files, then a life as any store's.
TEST(Store, loading_in_hash_order_writes_bases_and_no_log) {
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
      std::vector<uint64_t> piece(keys.begin() + static_cast<ptrdiff_t>(first),
                                  keys.begin() + static_cast<ptrdiff_t>(first + n));
      if (rng() % 2) std::shuffle(piece.begin(), piece.end(), rng);
      if (rng() % 2) piece.push_back(piece[rng() % n]);  // the last of equal keys wins
      std::vector<uint8_t> rows(piece.size() * kRow);
      for (auto& b : rows) b = static_cast<uint8_t>(rng());
      store->load(piece.data(), piece.size(), {rows.data(), kRow});
      for (size_t i = 0; i < piece.size(); ++i) std::memcpy(now[piece[i]].data(), &rows[i * kRow], kRow);
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
    // Among rows that are there, loading is putting.
    std::vector<uint8_t> rows(keys.size() * kRow, static_cast<uint8_t>(seed));
    store->load(keys.data(), keys.size() / 2, {rows.data(), kRow});
    for (size_t i = 0; i < keys.size() / 2; ++i) now[keys[i]].fill(static_cast<uint8_t>(seed));
    expect_equal(*store, now, kKeys);
    store->check();
    store->merge_all();
    expect_equal(*store, now, kKeys);
  }
}

// A copy of another store: its scan gives rows in hash order. Memory follows their number, not their order.
TEST(Store, rows_put_in_hash_order_take_no_more_memory) {
  constexpr uint64_t kKeys = 400000, kBatch = 20000;
  std::vector<uint64_t> keys(kKeys);
  for (bool load : {false, true}) {
    for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k;
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    StoreOptions o = small_options();
    o.background_merge = false;
    o.min_log_bytes = 64u << 20;  // all stay in the log
    uint64_t memory[2];
    for (bool sorted : {false, true}) {
      const std::string path = sorted ? "/s/sorted" : "/s/store";
      if (sorted) std::sort(keys.begin(), keys.end(), [](uint64_t a, uint64_t b) { return hash_key(a) < hash_key(b); });
      auto store = SsdStore::open(fs, path, o);
      std::vector<uint8_t> rows(kBatch * kRow, 7);
      const uint64_t other = kKeys;
      store->put(&other, 1, {rows.data(), kRow});  // from here on loading is putting
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

TEST(Store, few_rows_loaded_among_others_are_gathered_as_those_put_are) {
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

TEST(Store, loading_what_the_budget_has_no_index_for_is_an_error_before_it_is_written) {
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

TEST(Store, filter_spares_reads_and_never_hides_a_row) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.filter_bits = 10;
  constexpr uint64_t kKeys = 20000;
  std::vector<uint64_t> keys(kKeys), strangers(kKeys);
  std::vector<uint8_t> rows(kKeys * kRow), found(kKeys);
  for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k, strangers[k] = k + (1ull << 40);
  auto store = SsdStore::open(fs, "/s/a", o);
  store->put(keys.data(), kKeys, {rows.data(), kRow});
  store->merge_all();
  store->commit("");
  auto false_share = [&](SsdStore& s) {
    s.get(keys.data(), kKeys, found.data(), {rows.data(), kRow});
    for (auto f : found) CHECK(f);
    // A stranger reads a page only if the filter errs.
    uint64_t wanted = 0;
    for (uint64_t k : strangers) {
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

// Rows 0 .. n - 1, each saying its key.
void put_range(SsdStore& store, uint64_t begin, uint64_t end) {
  std::vector<uint64_t> keys;
  for (uint64_t k = begin; k < end; ++k) keys.push_back(k);
  std::vector<uint8_t> rows(keys.size() * kRow, 0);
  for (size_t i = 0; i < keys.size(); ++i) std::memcpy(&rows[i * kRow], &keys[i], 8);
  store.put(keys.data(), keys.size(), {rows.data(), kRow});
}

TEST(Store, forked_child_leaves_the_parents_files_alone) {
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

TEST(Store, one_put_far_above_the_limit_does_not_wait_for_ever) {
  for (int round = 0; round < 300; ++round) {
    auto fs = std::make_shared<MemFs>();
    fs->make_dir("/s");
    auto store = SsdStore::open(fs, "/s/a", small_options());
    put_range(*store, 0, 4000);  // from nothing to several times the limit
    put_range(*store, 4000, 8000);
    if (round % 50 == 0) CHECK_EQ(store->count(), 8000u);
  }
}

TEST(Store, damage_stops_one_partition_and_no_put) {
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

TEST(Store, link_checkpoint_is_of_the_commit_that_is_open) {
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

TEST(Store, close_does_not_wait_for_calls_that_keep_coming) {
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

TEST(Store, impossible_options_are_named) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.max_log_ratio = 0;
  CHECK_THROWS(Error, SsdStore::open(fs, "/s/a", o));
  o = small_options();
  o.partition_bytes = 0;
  CHECK_THROWS(Error, SsdStore::open(fs, "/s/a", o));
}

TEST(Store, opening_with_a_smaller_budget_merges_or_says_so) {
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

TEST(Store, memory_stays_within_its_budget) {
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

TEST(Store, merge_all_and_check_do_not_wait_for_a_paced_merge) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  o.partition_bytes = 16u << 20;  // merges of many megabytes, which run out of credit on the way
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

TEST(Store, uncommitted_rows_are_gone_after_reopening) {
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

TEST(Store, all_keys_are_legal_and_the_last_of_a_batch_wins) {
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

TEST(Store, readers_and_writers_at_once) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/s");
  StoreOptions o = small_options();
  auto store = SsdStore::open(fs, "/s/a", o);
  constexpr uint64_t kKeys = 5000;
  // Every row says which key it is and which round wrote it; rounds only rise.
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
  std::atomic<int> wrong{0};  // a CHECK may not fail on another thread
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

}  // namespace
}  // namespace thermocline
