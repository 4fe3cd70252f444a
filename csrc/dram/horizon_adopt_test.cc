// Rows that a tier above trains: pins of a horizon follow them up and down.
#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "dram/horizon.h"
#include "dram/tier_test_util.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline {
namespace {

using Ids = std::vector<uint64_t>;
using BatchPtr = std::unique_ptr<HorizonBatch>;
using PartPtr = std::unique_ptr<HorizonPart>;

BatchPtr add(Horizon& horizon, const Ids& ids) { return horizon.add(ids.data(), ids.size()); }

void push(DramTier& tier, const Ids& keys, float value) {
  const std::vector<float> rows(keys.size() * 4, value);
  tier.push(keys.data(), keys.size(), reinterpret_cast<const uint8_t*>(rows.data()), true, true);
}

size_t adopt(Horizon& horizon, const Ids& keys) { return horizon.adopt(keys.data(), keys.size()); }

// Pulls so many other rows that all rows without a pin leave the tier.
void replace_unpinned(DramTier& tier) {
  const uint64_t room = tier.capacity() - tier.pinned();
  for (uint64_t first : {uint64_t{1} << 40, uint64_t{1} << 41}) {
    const auto slots = pull(tier, range(first, first + room));
    tier.unpin(slots.data(), slots.size(), false);
  }
}

// One part with all keys of the window, of which the tier above has `above`.
void skip_and_load(Horizon& horizon, const std::set<uint64_t>& above) {
  for (PartPtr part; (part = horizon.next_part(1 << 20)) && !part->keys().empty();) {
    std::vector<uint8_t> skipped;
    for (uint64_t key : part->keys()) skipped.push_back(above.count(key));
    horizon.skip(*part, skipped.data());
    horizon.load_part(*part);
  }
}

TEST(HorizonAdopt, ARowThatReturnsStaysUntilItsBatch) {
  for (const bool adopts : {false, true}) {
    MapStore store(kLayout.bytes());
    DramTier tier(options(1 << 16), &store);
    Horizon horizon(tier);
    const BatchPtr batch = add(horizon, range(0, 100));
    skip_and_load(horizon, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
    CHECK(batch->loaded());
    CHECK_EQ(horizon.pinned(), 90u);
    CHECK_EQ(horizon.absent(), 10u);
    push(tier, range(0, 10), 7);
    push(tier, range(500, 510), 7);
    Ids returned = range(0, 10);
    for (uint64_t key : range(500, 510)) returned.push_back(key);  // of no batch
    if (adopts) {
      CHECK_EQ(adopt(horizon, returned), 10u);
      CHECK_EQ(adopt(horizon, returned), 0u);  // a key holds one pin
      CHECK_EQ(horizon.pinned(), 100u);
      CHECK_EQ(horizon.absent(), 0u);
    }
    replace_unpinned(tier);
    const int gets = store.gets;
    Row row;
    for (uint64_t key : range(0, 10)) {
      tier.read(&key, 1, reinterpret_cast<uint8_t*>(row.data()));
      CHECK_EQ(row[0], 7.0f);
    }
    CHECK_EQ(store.gets - gets, adopts ? 0 : 10);  // each a read of its own
    batch->release();
    CHECK_EQ(horizon.pinned(), 0u);
    CHECK_EQ(horizon.absent(), 0u);
    CHECK_EQ(horizon.unique(), 0u);
    tier.check(true);
  }
}

TEST(HorizonAdopt, ABatchThatMovesUpUnpinsAllItsRows) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16), &store);
  Horizon horizon(tier);
  const BatchPtr first = add(horizon, range(0, 60)), second = add(horizon, range(20, 100));
  skip_and_load(horizon, {});
  CHECK_EQ(horizon.pinned(), 100u);
  first->release(true);
  CHECK_EQ(horizon.pinned(), 40u);  // rows of the second batch only
  CHECK_EQ(horizon.absent(), 40u);
  CHECK_EQ(tier.pinned(), 40u);
  push(tier, range(20, 30), 3);
  CHECK_EQ(adopt(horizon, range(0, 30)), 10u);
  CHECK_EQ(horizon.pinned(), 50u);
  second->release();
  CHECK_EQ(horizon.unique(), 0u);
  CHECK_EQ(horizon.absent(), 0u);
  tier.check(true);
}

// Else another thread may evict a row between its push and its adoption.
TEST(HorizonAdopt, RowsAreAdoptedBeforeTheirPushUnpinsThem) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16), &store);
  Horizon horizon(tier);
  const Ids keys = range(0, 300);
  const BatchPtr batch = add(horizon, range(0, 100));
  skip_and_load(horizon, {keys.begin(), keys.end()});
  const std::vector<float> rows(keys.size() * 4, 3);
  const auto push_then = [&](const DramTier::WhilePinned& f) {
    tier.push(keys.data(), keys.size(), reinterpret_cast<const uint8_t*>(rows.data()), true, true, {nullptr, 0}, f);
  };
  size_t seen = 0;
  CHECK_THROWS(Error, push_then([](const uint64_t*, size_t) { throw Error("adoption fails"); }));
  CHECK_EQ(tier.pinned(), 0u);
  push_then([&](const uint64_t* part, size_t n) {
    seen += n;
    CHECK(tier.pinned() >= n);
    horizon.adopt(part, n);
  });
  CHECK_EQ(seen, keys.size());
  CHECK_EQ(tier.pinned(), 100u);
  batch->release();
  tier.check(true);
}

// The tier above was asked for a part, and evicts some of these rows before their keys are skipped.
TEST(HorizonAdopt, RowsThatReturnWhileTheirPartIsLoadedArePinned) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16), &store);
  Horizon horizon(tier);
  const BatchPtr batch = add(horizon, range(0, 100));
  const PartPtr part = horizon.next_part(1 << 20);
  CHECK_EQ(part->keys().size(), 100u);
  push(tier, range(0, 100), 3);
  CHECK_EQ(adopt(horizon, range(0, 50)), 0u);  // not yet
  std::vector<uint8_t> skipped;
  for (uint64_t key : part->keys()) skipped.push_back(key < 70);
  horizon.skip(*part, skipped.data());
  CHECK_EQ(horizon.pinned(), 50u);
  CHECK_EQ(horizon.absent(), 20u);
  CHECK_EQ(part->keys().size(), 30u);
  CHECK(!batch->loaded());
  horizon.load_part(*part);
  CHECK_EQ(horizon.pinned(), 80u);
  CHECK(batch->loaded());
  batch->release();
  tier.check(true);
}

TEST(HorizonAdopt, ASkippedPartIsOver) {
  DramTier tier(options(1 << 16), nullptr);
  Horizon horizon(tier);
  const BatchPtr batch = add(horizon, range(0, 100));
  {
    const PartPtr part = horizon.next_part(1 << 20);
    horizon.skip(*part, std::vector<uint8_t>(100, 1).data());
    CHECK(part->keys().empty());
    horizon.load_part(*part);
  }
  CHECK(batch->loaded());
  CHECK_EQ(horizon.position(), horizon.partitions());
}

TEST(HorizonAdopt, PinsLeaveRoomForBatches) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16), &store);
  Horizon horizon(tier);
  const Ids keys = range(0, tier.capacity());
  const BatchPtr batch = add(horizon, keys);
  skip_and_load(horizon, {keys.begin(), keys.end()});
  push(tier, keys, 1);
  const auto most = static_cast<size_t>(Horizon::kPinnedShare * tier.capacity());
  CHECK_EQ(adopt(horizon, keys), most);
  CHECK_EQ(adopt(horizon, keys), 0u);
  CHECK_EQ(tier.pinned(), most);
  horizon.drop();
  CHECK_EQ(tier.pinned(), 0u);
  CHECK_EQ(adopt(horizon, keys), 0u);
  batch->release();
  CHECK_EQ(horizon.absent(), 0u);
  tier.check(true);
}

// A tier above of few rows: each batch moves its rows up, and evicts those of the batch before it.
TEST(HorizonAdopt, RowsMoveUpAndDownWhileOthersAreLoaded) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 20), &store);
  {
    Horizon horizon(tier);
    std::mutex mutex;
    std::deque<std::pair<BatchPtr, Ids>> queue;
    std::set<uint64_t> above;
    std::atomic<bool> done{false};
    std::thread loader([&] {
      while (!done) {
        const PartPtr part = horizon.next_part(64);
        std::vector<uint8_t> skipped;
        {
          std::lock_guard lock(mutex);
          for (uint64_t key : part->keys()) skipped.push_back(above.count(key));
        }
        horizon.skip(*part, skipped.data());
        if (skipped.size() % 5 != 4) horizon.load_part(*part);  // else put back
      }
    });
    std::thread trainer([&] {
      Ids before;
      for (int trained = 0; trained < 600;) {
        std::pair<BatchPtr, Ids> batch;
        {
          std::lock_guard lock(mutex);
          if (queue.empty()) continue;
          batch = std::move(queue.front());
          queue.pop_front();
          for (uint64_t key : batch.second) above.insert(key);
        }
        std::vector<float> rows(batch.second.size() * 4);
        tier.read(batch.second.data(), batch.second.size(), reinterpret_cast<uint8_t*>(rows.data()));
        batch.first->release(true);
        if (++trained == 500) horizon.drop();
        {
          std::lock_guard lock(mutex);
          for (uint64_t key : before) above.erase(key);
          for (uint64_t key : batch.second) above.insert(key);
        }
        Ids down;
        std::set_difference(before.begin(), before.end(), batch.second.begin(), batch.second.end(),
                            std::back_inserter(down));
        push(tier, down, static_cast<float>(trained));
        adopt(horizon, down);
        before = batch.second;
      }
    });
    std::mt19937_64 random(7);
    for (int i = 0; i < 600; ++i) {
      std::set<uint64_t> keys;
      while (keys.size() < 80) keys.insert(random() % (1 + random() % 2000));
      Ids ids(keys.begin(), keys.end());
      BatchPtr batch = add(horizon, ids);
      std::lock_guard lock(mutex);
      queue.emplace_back(std::move(batch), std::move(ids));
    }
    trainer.join();
    done = true;
    loader.join();
    CHECK_EQ(horizon.pinned(), 0u);
  }
  tier.check(true);
}

}  // namespace
}  // namespace thermocline
