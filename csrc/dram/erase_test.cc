// DramTier::erase(): initial rows in place of pinned ones, free slots, and no old row from a pull in progress. Rows
// that the store does not have yet.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "dram/tier.h"
#include "dram/tier_test_util.h"
#include "testing/test.h"

namespace thermocline {
namespace {

bool is_initial(DramTier& tier, uint64_t key) {
  Row row;
  tier.read(&key, 1, reinterpret_cast<uint8_t*>(row.data()));
  return row == initial_row(tier, key);
}

TEST(DramErase, PinnedRowsAreOverwrittenAndOthersFreed) {
  MapStore store(kLayout.bytes());
  for (RowStore* lower : {static_cast<RowStore*>(&store), static_cast<RowStore*>(nullptr)}) {
    DramTier tier(options(1 << 16), lower);
    const auto keys = range(0, 40);
    const auto slots = pull(tier, keys);
    for (uint32_t slot : slots) row_at(tier, slot)[0] = 7;
    tier.unpin(slots.data() + 20, 20, true);
    tier.mark_dirty(slots.data(), 20);
    const auto erased = range(10, 50);  // ten pinned, twenty unpinned, ten absent
    CHECK_EQ(tier.erase(erased.data(), erased.size()), 30u);
    CHECK_EQ(tier.stats().resident, 20u);
    CHECK_EQ(tier.stats().dirty, 10u);
    for (uint64_t key = 0; key < 50; ++key) CHECK_EQ(is_initial(tier, key), key >= 10);
    tier.unpin(slots.data(), 20, false);
    tier.check(true);
    const auto again = pull(tier, erased);
    tier.unpin(again.data(), again.size(), false);
    tier.check(true);
  }
}

// A store whose calls begin, and go on when they may.
class SlowStore : public MapStore {
 public:
  using MapStore::MapStore;
  void get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) override {
    MapStore::get(keys, n, found, rows);
    wait();
  }
  void put(const uint64_t* keys, size_t n, RowsIn rows) override {
    wait();
    MapStore::put(keys, n, rows);
  }
  std::atomic<bool> slow{false}, called{false}, may_end{false};

 private:
  void wait() {
    called = true;
    while (slow && !may_end) std::this_thread::yield();
  }
};

// A step that deletes rows waits for no read of a batch ahead: neither of other rows nor of these.
TEST(DramErase, PullsThatHaveReadOldRowsGiveInitialRows) {
  SlowStore store(kLayout.bytes());
  const std::vector<uint64_t> keys{5, 6};
  const std::vector<Row> old(2, Row{1, 2, 3, 4});
  store.put(keys.data(), 2, RowsIn{reinterpret_cast<const uint8_t*>(old.data()), kLayout.bytes()});
  DramTier tier(options(1 << 16), &store);
  store.slow = true;
  store.called = false;
  std::vector<uint32_t> slots;
  std::thread puller([&] { slots = pull(tier, keys); });
  while (!store.called) std::this_thread::yield();
  CHECK_EQ(tier.erase(keys.data(), 1), 1u);  // the pull ends only after this
  CHECK_EQ(tier.erase(keys.data(), 1), 1u);
  store.may_end = true;
  puller.join();
  CHECK(std::memcmp(row_at(tier, slots[0]), initial_row(tier, 5).data(), kLayout.bytes()) == 0);
  CHECK(std::memcmp(row_at(tier, slots[1]), old[1].data(), kLayout.bytes()) == 0);
  tier.unpin(slots.data(), 2, false);
  tier.check(true);
}

// Rows that are being written, by an eviction, ahead of one or by a flush, are unwritten until the store has them.
TEST(DramErase, RowsThatAreBeingWritten) {
  enum class By { kEviction, kWriteAhead, kFlush };
  for (const By by : {By::kEviction, By::kWriteAhead, By::kFlush}) {
    const bool ahead = by == By::kWriteAhead;
    SlowStore store(kLayout.bytes());
    TierOptions o = options(1 << 16);
    if (ahead) o.write_ahead = 1000;
    DramTier tier(o, &store);
    const auto keys = range(0, tier.capacity());
    auto slots = pull(tier, keys);
    for (size_t i = 0; i < slots.size(); ++i) row_at(tier, slots[i])[0] = static_cast<float>(keys[i]);
    const auto unwritten = [&](KeyRange range) {
      std::set<uint64_t> found;
      tier.unwritten_rows(range, [&](uint64_t key, const uint8_t* row, size_t bytes) {
        float first;
        std::memcpy(&first, row, 4);
        CHECK(bytes == kLayout.bytes() && first == static_cast<float>(key) && found.insert(key).second);
      });
      return found;
    };
    CHECK(unwritten({}).empty());
    store.called = false;
    store.slow = true;
    tier.unpin(slots.data(), slots.size(), true);
    std::thread writer([&] {
      if (ahead) tier.write_ahead(tier.capacity());
      else if (by == By::kFlush) tier.flush();
      else pull(tier, range(1'000'000, 1'000'010));
    });
    while (!store.called) std::this_thread::yield();
    CHECK_EQ(unwritten({}).size(), keys.size());
    const KeyRange low{0, ~uint64_t{0} / 300};
    for (uint64_t key : unwritten(low)) CHECK(low.contains(key));
    std::atomic<bool> ended{false};
    std::thread eraser([&] {
      tier.end_writes(keys.data(), keys.size());
      ended = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!ended);
    store.may_end = true;
    eraser.join();
    writer.join();
    CHECK(unwritten({}).empty());
    if (by != By::kFlush) CHECK(store.size() < keys.size());  // the others were dropped
  }
}

// Freed slots get rows of other keys while reads copy rows: a read returns the row of its key, never another.
TEST(DramErase, ReadsBesideAnEraseAndSlotsThatAreUsedAgain) {
  TierOptions o = options(1 << 20);
  o.layout.dim = 1024;  // copies take long enough to meet an erase
  DramTier tier(o, nullptr);
  const size_t bytes = o.layout.bytes(),
               n = tier.capacity() / 4;  // a read pins rows that are being loaded: these are not freed
  const auto first = range(0, n), second = range(1'000'000, 1'000'000 + n);
  const auto use = [&](const std::vector<uint64_t>& keys) {
    const auto slots = pull(tier, keys);
    tier.unpin(slots.data(), slots.size(), false);
  };
  use(first);
  std::atomic<bool> stop{false};
  std::atomic<size_t> wrong{0}, reads{0};
  std::vector<std::jthread> readers;
  const auto end = [&] {
    stop = true;
    readers.clear();
  };
  for (const auto* keys : {&first, &second}) {
    readers.emplace_back([&, keys] {
      std::vector<uint8_t> rows(n * bytes), initial(n * bytes);
      for (size_t i = 0; i < n; ++i) tier.initial().store((*keys)[i], &initial[i * bytes]);
      while (!stop) {
        tier.read(keys->data(), n, rows.data());
        wrong += rows != initial;
        ++reads;
      }
    });
  }
  try {
    for (int turn = 0; turn < 1000 || reads < 20; ++turn) {
      CHECK_EQ(tier.erase(first.data(), n), n);
      use(second);
      CHECK_EQ(tier.erase(second.data(), n), n);
      use(first);
    }
  } catch (...) {
    end();
    throw;
  }
  end();
  CHECK_EQ(wrong.load(), 0u);
  tier.check(true);
}

// A thread that has the mutex of one shard keeps a step waiting for the rows of that shard only.
TEST(DramErase, OtherShardsDoNotWaitForOneThatIsInUse) {
  MapStore store(kLayout.bytes());
  TierOptions o = options(1 << 16);
  o.shards = 8;
  DramTier tier(o, &store);
  const auto keys = range(0, 100);
  const auto slots = pull(tier, keys);
  tier.unpin(slots.data(), slots.size(), true);
  std::atomic<bool> held{false}, may_end{false};
  std::thread holder([&] {
    tier.unwritten_rows({}, [&](uint64_t, const uint8_t*, size_t) {
      held = true;
      while (!may_end) std::this_thread::yield();
    });
  });
  while (!held) std::this_thread::yield();
  std::atomic<size_t> seen{0};
  std::thread other([&] { tier.unwritten_rows({}, [&](uint64_t, const uint8_t*, size_t) { ++seen; }); });
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (seen < 60 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  const size_t seen_meanwhile = seen;
  may_end = true;
  holder.join();
  other.join();
  CHECK(seen_meanwhile >= 60 && seen_meanwhile < keys.size());
  CHECK_EQ(seen.load(), keys.size());
}

TEST(DramErase, DirtyRowsOfARange) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 16), &store);
  const auto keys = range(0, 300);
  const auto slots = pull(tier, keys);
  tier.mark_dirty(slots.data(), 200);
  const KeyRange low{0, ~uint64_t{0} / 4}, high{~uint64_t{0} / 4 + 1, ~uint64_t{0}};
  const auto expected = static_cast<size_t>(
      std::count_if(keys.begin(), keys.begin() + 200, [&](uint64_t key) { return low.contains(key); }));
  const auto dirty = [&](KeyRange part) {
    std::vector<uint64_t> found(300);
    std::vector<uint8_t> rows(300 * kLayout.bytes());
    uint32_t next = 0;
    size_t n = 0;
    while (const size_t more = tier.dirty_rows(&next, 7, found.data() + n, rows.data(), part)) n += more;
    for (size_t i = 0; i < n; ++i) CHECK(part.contains(found[i]) && found[i] < 200);
    return n;
  };
  CHECK(expected > 20 && expected < 100);
  CHECK_EQ(dirty(low), expected);
  CHECK_EQ(dirty(high), 200 - expected);
  tier.flush(nullptr, low);
  CHECK_EQ(store.size(), expected);
  CHECK_EQ(dirty(low), 0u);
  CHECK_EQ(dirty({}), 200 - expected);
  tier.flush();
  CHECK_EQ(store.size(), 200u);
  tier.unpin(slots.data(), slots.size(), false);
  tier.check(true);
}

// Parts of one or two prefixes, and of more; rows that replaced evicted ones.
TEST(DramErase, DirtyRowsOfManyParts) {
  MapStore store(kLayout.bytes());
  DramTier tier(options(1 << 17), &store);
  std::set<uint64_t> expected;
  for (uint64_t first = 0; first < 3 * tier.capacity(); first += 100) {
    const auto keys = range(first, first + 100);
    const auto slots = pull(tier, keys);
    tier.unpin(slots.data(), slots.size(), true);
  }
  uint32_t next = 0;
  std::vector<uint64_t> found(tier.capacity());
  std::vector<uint8_t> rows(tier.capacity() * kLayout.bytes());
  const size_t all = tier.dirty_rows(&next, found.size(), found.data(), rows.data(), {});
  expected.insert(found.begin(), found.begin() + static_cast<ptrdiff_t>(all));
  CHECK(all > 300);
  for (uint64_t parts : {2, 100, 256, 257, 5000}) {
    std::set<uint64_t> seen;
    for (uint64_t part = 0; part < parts; ++part) {
      const auto begin = [&](uint64_t p) { return static_cast<uint64_t>((static_cast<__uint128_t>(p) << 64) / parts); };
      const KeyRange range{begin(part), part + 1 == parts ? ~uint64_t{0} : begin(part + 1) - 1};
      next = 0;
      const size_t n = tier.dirty_rows(&next, found.size(), found.data(), rows.data(), range);
      for (size_t i = 0; i < n; ++i) CHECK(range.contains(found[i]) && seen.insert(found[i]).second);
    }
    CHECK(seen == expected);
  }
  tier.check(true);
}

}  // namespace
}  // namespace thermocline
