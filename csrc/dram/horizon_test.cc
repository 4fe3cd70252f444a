#include "dram/horizon.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "dram/dedup.h"
#include "dram/pins.h"
#include "dram/tier_test_util.h"
#include "testing/test.h"
#include "util/hash.h"

namespace thermocline {
namespace {

using Ids = std::vector<uint64_t>;
using BatchPtr = std::unique_ptr<HorizonBatch>;
using PartPtr = std::unique_ptr<HorizonPart>;

Ids random_ids(std::mt19937_64& random, size_t ids, uint64_t keys) {
  Ids out(ids);
  for (auto& id : out) id = random() % (1 + random() % keys);
  return out;
}

BatchPtr add(Horizon& horizon, const Ids& ids) { return horizon.add(ids.data(), ids.size()); }

void load_all(Horizon& horizon, size_t part) {
  while (horizon.load(part)) {
  }
}

struct Plain {
  Ids keys, ids;
  std::vector<uint32_t> inverse, starts, order;
};

Plain expand(const HorizonBatch& batch) {
  Plain p{Ids(batch.unique()), Ids(batch.ids()), std::vector<uint32_t>(batch.ids()),
          std::vector<uint32_t>(batch.unique() + 1), std::vector<uint32_t>(batch.ids())};
  batch.expand({p.keys.data(), p.inverse.data(), p.starts.data(), p.order.data(), p.ids.data()});
  return p;
}

TEST(Horizon, BatchesAreDeduplicatedWhateverElseTheWindowHas) {
  std::mt19937_64 random(1);
  const Ids ids = random_ids(random, 100000, 50000);
  Plain first;
  for (int threads : {1, 3}) {
    DramTier tier(options(threads == 1 ? 1 << 20 : 128 << 20, Policy::kLruLfu, threads), nullptr);
    Horizon horizon(tier);
    std::vector<BatchPtr> others;
    for (int i = 0; i < threads; ++i) others.push_back(add(horizon, random_ids(random, 20000, 30000)));
    const BatchPtr batch = add(horizon, ids);
    others.push_back(add(horizon, random_ids(random, 20000, 90000)));
    const Plain p = expand(*batch);
    CHECK(p.ids == ids);
    CHECK_EQ(std::set<uint64_t>(ids.begin(), ids.end()).size(), p.keys.size());
    CHECK_EQ(std::set<uint64_t>(p.keys.begin(), p.keys.end()).size(), p.keys.size());
    for (size_t u = 0; u < p.keys.size(); ++u) {
      CHECK(p.starts[u] < p.starts[u + 1]);
      for (uint32_t j = p.starts[u]; j < p.starts[u + 1]; ++j) {
        CHECK_EQ(ids[p.order[j]], p.keys[u]);
        CHECK_EQ(p.inverse[p.order[j]], u);
        CHECK(j == p.starts[u] || p.order[j] > p.order[j - 1]);
      }
    }
    CHECK_EQ(p.starts.back(), ids.size());
    if (threads == 1) first = p;
    else CHECK(horizon.partitions() > 16 && p.keys.size() == first.keys.size());
  }
}

TEST(Horizon, MemoryPerIdAndPerKeyIsBounded) {
  DramTier tier(options(512 << 20), nullptr);
  Horizon horizon(tier);
  CHECK_EQ(horizon.partitions(), 256u);
  std::mt19937_64 random(6);
  const size_t empty = horizon.bytes();
  std::deque<BatchPtr> window;
  size_t of_batches = 0;
  for (int b = 0; b < 40; ++b) {
    Ids ids(100000);
    for (auto& id : ids) id = random() % 400000;
    window.push_back(add(horizon, ids));
    const HorizonBatch& batch = *window.back();
    // 18 bits per id; a key's index needs at most 11 bits: a partition has 1,563 +- 40 keys.
    CHECK(batch.bytes() <= (100000 * 18 + batch.unique() * 11) / 8 + 257 * 4 + 512);
    of_batches += batch.bytes();
    while (horizon.load(1 << 14)) {
    }
  }
  const size_t keys = horizon.unique();
  CHECK(keys > 390000);
  // Entry 16, hash table 5.4 to 7.2, list of the keys to load up to 5, marks of one partition.
  CHECK(horizon.bytes() - of_batches - empty <= keys * 28 + 16384);
  window.clear();
  tier.check(true);
}

TEST(Horizon, RowsArePinnedUntilNoBatchOfTheWindowUsesThem) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  Horizon horizon(tier);
  std::mt19937_64 random(2);
  std::vector<Ids> ids;
  std::vector<BatchPtr> batches;
  for (int b = 0; b < 8; ++b) {
    ids.push_back(random_ids(random, 300, 400));
    batches.push_back(add(horizon, ids.back()));
    CHECK(!batches.back()->loaded());
    if (b % 3 == 2) load_all(horizon, 50);
  }
  load_all(horizon, 50);
  std::vector<size_t> release = {0, 2, 1, 3, 7, 4, 5, 6};  // any order
  std::set<size_t> left(release.begin(), release.end());
  CHECK_EQ(tier.stats().hits, 0u);
  for (size_t b : release) {
    CHECK(batches[b]->loaded());
    std::vector<uint32_t> slots(batches[b]->unique());
    CHECK_EQ(batches[b]->take(slots.data()), 0u);
    for (size_t u = 0; u < slots.size(); ++u) {
      const Row row = initial_row(tier, batches[b]->key(u));
      CHECK(std::equal(row.begin(), row.end(), row_at(tier, slots[u])));
    }
    batches[b]->release();
    left.erase(b);
    std::set<uint64_t> used;
    for (size_t other : left) used.insert(ids[other].begin(), ids[other].end());
    CHECK_EQ(tier.stats().pinned, used.size());
    CHECK_EQ(horizon.pinned(), used.size());
    CHECK_EQ(horizon.unique(), used.size());
  }
  tier.check(true);
}

// A batch is loaded one cycle of the sweep after it was added, also while the window slides.
TEST(Horizon, TheSweepLoadsEveryBatchInACycle) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(4 << 20), &store);
  Horizon horizon(tier);
  std::mt19937_64 random(3);
  std::deque<BatchPtr> window;
  size_t complete = 0, late = 0;
  for (int step = 0; step < 400; ++step) {
    window.push_back(add(horizon, random_ids(random, 200, 20000)));
    horizon.load(random() % 600 + 20);
    if (window.size() < 12) continue;
    const bool loaded = window.front()->loaded();
    std::vector<uint32_t> slots(window.front()->unique());
    const size_t missing = window.front()->take(slots.data());
    CHECK(!loaded || missing == 0);
    complete += loaded;
    late += missing;
    window.pop_front();
  }
  CHECK(complete > 50);
  CHECK_EQ(horizon.late(), late);
  window.clear();
  for (int part = 0; part < 100; ++part) horizon.load(100);  // erases the keys that it does not find in use
  CHECK_EQ(horizon.unique(), 0u);
  tier.check(true);
}

TEST(Horizon, LoadsInHashOrder) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  Horizon horizon(tier);
  const BatchPtr batch = add(horizon, range(0, 3000));
  const auto top = [](uint64_t key) { return hash_key(key) >> 60; };  // of 16 partitions
  uint64_t last = 0;
  size_t loaded = 0;
  for (size_t size; (size = horizon.next_part(1000)->keys().size()) > 0; loaded += size) {
    const PartPtr part = horizon.next_part(1000);  // the same again
    CHECK_EQ(part->keys().size(), size);
    CHECK(size <= 1000);
    for (uint64_t key : part->keys()) {
      CHECK(top(key) >= last);
      last = top(key);
    }
    horizon.load_part(*part);
  }
  CHECK_EQ(loaded, 3000u);
  CHECK(batch->loaded());
}

TEST(Horizon, SkippedRowsAreLeftToTheirBatch) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  {
    Horizon horizon(tier);
    const BatchPtr batch = add(horizon, range(0, 100));
    const PartPtr part = horizon.next_part(100);
    std::vector<uint8_t> skip(100, 0);
    std::fill_n(skip.begin(), 40, 1);
    horizon.load_part(*part, skip.data());
    CHECK(batch->loaded());
    CHECK_EQ(horizon.pinned(), 60u);
    CHECK_EQ(horizon.unique(), 100u);
    CHECK_EQ(horizon.absent(), 40u);
    CHECK_EQ(tier.stats().resident, 60u);
    {
      Pins pins(tier, {batch.get()});
      CHECK_EQ(horizon.late(), 40u);
      CHECK_EQ(tier.stats().pinned, 100u);
      for (size_t u = 0; u < 100; ++u) CHECK_EQ(pull(tier, {batch->key(u)})[0], pins.slots()[u]);
      tier.unpin(pins.slots().data(), 100, false);
    }
    CHECK_EQ(tier.stats().pinned, 0u);
    CHECK_EQ(horizon.absent(), 0u);
  }
  tier.check(true);
}

// Rows that several batches of the window used outlive rows of one batch that were released later.
TEST(Horizon, RowsOfManyBatchesAreEvictedLast) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16, Policy::kLruLfu, 1, 1), &store);
  const uint64_t hot = tier.capacity() / 8, once = tier.capacity() / 4;
  Horizon horizon(tier);
  std::vector<BatchPtr> batches;
  for (int b = 0; b < 3; ++b) batches.push_back(add(horizon, range(0, hot)));
  load_all(horizon, 1000);
  batches.clear();
  for (uint64_t k = 0; k < 10; ++k) {  // more than the tier holds
    const BatchPtr batch = add(horizon, range(hot + k * once, hot + (k + 1) * once));
    load_all(horizon, 1000);
  }
  CHECK(tier.stats().evictions > tier.capacity());
  const auto before = tier.stats().hits;
  const auto slots = pull(tier, range(0, hot));
  CHECK_EQ(tier.stats().hits - before, hot);
  tier.unpin(slots.data(), slots.size(), false);
  tier.check(true);
}

// The list of recent rows has at most half of the rows that may be evicted, also if most rows are pinned.
TEST(DramTier, PinnedRowsDoNotTurnThePolicyIntoLru) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16, Policy::kLruLfu, 1, 1), &store);
  const uint64_t cap = tier.capacity(), hot = cap / 16;
  const auto held = pull(tier, range(0, cap * 3 / 4));
  const auto visit = [&](uint64_t begin, uint64_t end) {
    const auto slots = pull(tier, range(begin, end));
    tier.unpin(slots.data(), slots.size(), false);
  };
  for (int i = 0; i < 3; ++i) visit(cap, cap + hot);
  for (uint64_t k = 2 * cap; k < 4 * cap; k += hot) visit(k, k + hot);
  const auto before = tier.stats().hits;
  visit(cap, cap + hot);
  CHECK_EQ(tier.stats().hits - before, hot);
  tier.unpin(held.data(), held.size(), false);
  tier.check(true);
}

TEST(Horizon, AKeyThatIsLateInSeveralBatchesNeedsOneSlot) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(64 << 10), &store);
  const size_t capacity = tier.capacity(), shared = capacity / 2;
  {
    Horizon horizon(tier);
    const BatchPtr first = add(horizon, range(0, capacity - 10)), second = add(horizon, range(shared, capacity));
    {
      Pins pins(tier, {first.get(), second.get()});
      CHECK_EQ(tier.stats().pinned, capacity);
      size_t at = 0;
      for (const HorizonBatch* batch : {first.get(), second.get()}) {
        for (size_t u = 0; u < batch->unique(); ++u, ++at) {
          const uint32_t slot = pull(tier, {batch->key(u)})[0];
          CHECK_EQ(slot, pins.slots()[at]);
          tier.unpin(&slot, 1, false);
        }
      }
      CHECK_EQ(tier.stats().misses, capacity);
      CHECK_EQ(tier.stats().initialised, capacity);
    }
    CHECK_EQ(tier.stats().pinned, 0u);
  }
  tier.check(true);
}

TEST(Horizon, APartThatDoesNotFitChangesNothingAndCanBeRepeated) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(64 << 10), &store);
  const size_t capacity = tier.capacity();
  Horizon first(tier), second(tier);
  const BatchPtr a = add(first, range(0, capacity / 2));
  const BatchPtr b = add(second, range(capacity, capacity + capacity * 3 / 4));
  load_all(first, 100);
  CHECK_THROWS(BudgetError, load_all(second, 100));
  CHECK(!b->loaded());
  CHECK(second.pinned() <= capacity / 2);
  a->release();
  load_all(second, 100);
  CHECK(b->loaded());
  CHECK_EQ(second.pinned(), capacity * 3 / 4);
  second.drop();
  second.drop();
  tier.check(true);
}

// Gets wait until two of them run at the same time.
class PairedStore : public MapStore {
 public:
  using MapStore::MapStore;
  void get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) override {
    const int running = ++running_;
    if (running > most) most = running;
    for (int i = 0; i < 2000 && most < 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    MapStore::get(keys, n, found, rows);
    --running_;
  }
  std::atomic<int> most{0};

 private:
  std::atomic<int> running_{0};
};

TEST(Horizon, PartsAreLoadedAtOnce) {
  PairedStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  Horizon horizon(tier);
  const BatchPtr batch = add(horizon, range(0, 2000));
  const PartPtr first = horizon.next_part(700), second = horizon.next_part(700);
  CHECK(!first->keys().empty() && !second->keys().empty());
  std::thread loader([&] { horizon.load_part(*first); });
  horizon.load_part(*second);
  loader.join();
  CHECK_EQ(store.most.load(), 2);
  CHECK_EQ(horizon.pinned(), first->keys().size() + second->keys().size());
  CHECK_EQ(horizon.position(), horizon.gathered());
  load_all(horizon, 700);
  CHECK_EQ(horizon.pinned(), 2000u);
  batch->release();
  tier.check(true);
}

TEST(Horizon, ABatchIsNotLoadedBeforeAPartThatWasGivenUp) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  Horizon horizon(tier);
  const BatchPtr batch = add(horizon, range(0, 2000));
  std::vector<PartPtr> parts;
  while (horizon.gathered() < horizon.partitions()) parts.push_back(horizon.next_part(500));
  CHECK(parts.size() >= 4);
  for (size_t i : {3, 1, 2}) horizon.load_part(*parts[i]);  // in any order
  for (size_t i = 4; i < parts.size(); ++i) horizon.load_part(*parts[i]);
  CHECK_EQ(horizon.position(), 0u);
  const BatchPtr later = add(horizon, range(2000, 2100));
  parts[0].reset();  // put back
  CHECK_EQ(horizon.position(), 0u);
  CHECK_EQ(horizon.gathered(), 0u);
  CHECK(!batch->loaded());
  load_all(horizon, 500);
  CHECK(batch->loaded());
  CHECK_EQ(horizon.pinned(), 2100u);
  std::vector<uint32_t> slots(batch->unique());
  CHECK_EQ(batch->take(slots.data()), 0u);
  batch->release();
  later->release();
  tier.check(true);
}

TEST(Horizon, AfterAnErrorOfTheStoreRowsAreLeftToTheirBatch) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  Horizon horizon(tier);
  const BatchPtr batch = add(horizon, range(0, 200));
  store.fail_gets = true;
  CHECK_THROWS(IoError, horizon.load(100));
  store.fail_gets = false;
  load_all(horizon, 100);
  CHECK(batch->loaded());
  CHECK(horizon.pinned() > 50 && horizon.pinned() < 150);
  batch->release();
  tier.check(true);
}

TEST(Horizon, DropKeepsTheRowsOfTakenBatches) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  {
    Horizon horizon(tier);
    const BatchPtr first = add(horizon, range(0, 100)), second = add(horizon, range(50, 150));
    load_all(horizon, 60);
    {
      Pins pins(tier, {first.get()});
      horizon.drop();
      CHECK_EQ(tier.stats().pinned, 100u);
      CHECK(second->loaded());  // nothing more will be
      CHECK(!horizon.load(60));
      Pins late(tier, {second.get()});
      CHECK_EQ(horizon.late(), 50u);
    }
    CHECK_EQ(tier.stats().pinned, 0u);
    const BatchPtr unused = add(horizon, range(0, 10));
    CHECK(unused->loaded());
  }
  tier.check(true);
  Horizon horizon(tier);
  BatchPtr batch = add(horizon, range(0, 10));
  batch.reset();  // released before it was loaded
  load_all(horizon, 10);
  CHECK_EQ(horizon.unique(), 0u);
  tier.check(true);
}

TEST(Horizon, EvaluationInsertsNoRowThatTheStoreDoesNotHave) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  const Row row{1, 2, 3, 4};
  for (uint64_t key : {3, 5, 60}) store.put(&key, 1, RowsIn{reinterpret_cast<const uint8_t*>(row.data()), 16, nullptr});
  Horizon horizon(tier, false);
  const BatchPtr batch = add(horizon, range(0, 100));
  load_all(horizon, 30);
  CHECK_EQ(tier.stats().resident, 3u);
  CHECK_EQ(tier.stats().pinned, 3u);
  CHECK_EQ(tier.stats().read_ahead, 3u);
  CHECK_EQ(tier.stats().misses, 0u);
  batch->release();
  tier.check(true);
}

TEST(Horizon, ThreadsAddLoadTakeAndDropAtOnce) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  {
    Horizon horizon(tier);
    std::mutex mutex;
    std::deque<BatchPtr> queue;
    std::atomic<bool> done{false};
    const auto load = [&] {
      for (int i = 0; !done; ++i) {
        if (i % 7 == 6) horizon.next_part(64);  // and put back
        else horizon.load(64);
      }
    };
    std::thread loader(load), second_loader(load);
    std::thread consumer([&] {
      for (int taken = 0; taken < 400;) {
        BatchPtr batch;
        {
          std::lock_guard lock(mutex);
          if (!queue.empty()) {
            batch = std::move(queue.front());
            queue.pop_front();
          }
        }
        if (!batch) continue;
        ++taken;
        Pins pins(tier, {batch.get()});
        for (size_t u = 0; u < batch->unique(); ++u) {
          const Row row = initial_row(tier, batch->key(u));
          CHECK(std::equal(row.begin(), row.end(), row_at(tier, pins.slots()[u])));
        }
        if (taken == 300) horizon.drop();
      }
    });
    std::mt19937_64 random(5);
    for (int i = 0; i < 400; ++i) {
      BatchPtr batch = add(horizon, random_ids(random, 100, 2000));
      std::lock_guard lock(mutex);
      queue.push_back(std::move(batch));
    }
    consumer.join();
    done = true;
    loader.join();
    second_loader.join();
  }
  tier.check(true);
}

}  // namespace
}  // namespace thermocline
