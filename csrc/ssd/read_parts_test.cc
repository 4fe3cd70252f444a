// The parts of the read path alone: pieces of keys, requests, channels and the cost of the device.
#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "ssd/key_pieces.h"
#include "ssd/read_channel.h"
#include "ssd/read_cost.h"
#include "ssd/read_plan.h"
#include "testing/mem_fs.h"
#include "testing/test.h"

namespace thermocline::ssd {
namespace {

// Takes all pieces on several threads. Checks that every key is in one piece, at its place in the order.
std::vector<std::vector<Item>> all_pieces(const std::vector<uint64_t>& keys, size_t workers, uint64_t span = 0) {
  ThreadPool pool(static_cast<int>(workers));
  KeyPieces pieces(keys.data(), keys.size(), workers, 128, span, pool);
  std::vector<std::vector<std::vector<Item>>> taken(workers);
  pool.parallel(workers, [&](size_t w) {
    std::vector<Item> items, scratch;
    while (pieces.next(items, scratch)) taken[w].push_back(items);
  });
  CHECK(!pieces.left());
  // The indices, the ends of the groups, and the counts of each thread.
  if (keys.size() > KeyPieces::kMostKeys) CHECK(pieces.memory() <= keys.size() * 4 + (workers + 2) * 4 * 16384);
  std::vector<std::vector<Item>> all;
  for (auto& of_worker : taken) all.insert(all.end(), of_worker.begin(), of_worker.end());
  std::vector<bool> seen(keys.size());
  for (auto& piece : all) {
    CHECK(!piece.empty() && piece.size() <= (span ? KeyPieces::kMostSpanKeys : KeyPieces::kMostKeys));
    for (size_t i = 0; i < piece.size(); ++i) {
      CHECK(!seen[piece[i].index] && piece[i].hash == hash_key(keys[piece[i].index]));
      seen[piece[i].index] = true;
      if (i > 0) CHECK(piece[i - 1].hash <= piece[i].hash);
      if (i > 0 && piece[i - 1].hash == piece[i].hash) CHECK(piece[i - 1].index < piece[i].index);
    }
  }
  CHECK(std::count(seen.begin(), seen.end(), false) == 0);
  std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a[0].hash < b[0].hash; });
  return all;
}

TEST(StoreKeyPieces, EveryKeyIsInOnePieceAndPiecesDoNotOverlap) {
  std::mt19937_64 random(1);
  for (size_t n : {1, 2, 127, 129, 4000, 16384, 16385, 100000, 400000}) {
    for (size_t workers : {1, 2, 5}) {
      std::vector<uint64_t> keys(n);
      for (auto& key : keys) key = random();
      const auto pieces = all_pieces(keys, workers);
      for (size_t i = 1; i < pieces.size(); ++i) CHECK(pieces[i - 1].back().hash < pieces[i][0].hash);
      if (workers > 1 && n >= 4000) CHECK(pieces.size() >= 4 * workers);
    }
  }
}

// A look-ahead passes a range of hashes at a time: the groups divide that range, not all hashes.
TEST(StoreKeyPieces, KeysOfANarrowRangeOfHashesAreDivided) {
  std::mt19937_64 random(2);
  std::vector<uint64_t> keys;
  while (keys.size() < 40000) {
    const uint64_t key = random();
    if (hash_key(key) >> 57 == 3) keys.push_back(key);
  }
  for (auto& piece : all_pieces(keys, 2)) CHECK(piece.size() <= 6000);
}

// With a span, pieces have at least this many hashes, as far as every worker gets one.
TEST(StoreKeyPieces, PiecesOfADenseLookupAreNotNarrow) {
  std::mt19937_64 random(5);
  std::vector<uint64_t> keys;
  while (keys.size() < 160000) {
    const uint64_t key = random();
    if (hash_key(key) >> 62 == 1) keys.push_back(key);
  }
  const auto count = [&](size_t workers, uint64_t span) { return all_pieces(keys, workers, span).size(); };
  CHECK(count(4, 0) >= 40);
  CHECK(count(4, uint64_t{1} << 40) >= 40);            // narrower than the usual pieces
  const size_t eighths = count(4, uint64_t{1} << 59);  // an eighth of the keys: 20,000
  CHECK(eighths >= 8 && eighths <= 10);
  const size_t one_each = count(4, UINT64_MAX);
  CHECK(one_each >= 4 && one_each <= 6);
  CHECK(count(1, UINT64_MAX) == 3);  // at most kMostSpanKeys
}

TEST(StoreKeyPieces, RepeatedKeysAreDividedToo) {
  std::mt19937_64 random(3);
  std::vector<uint64_t> keys(70000, 7);
  all_pieces(keys, 3);
  for (size_t i = 0; i < keys.size(); i += 3) keys[i] = random();
  all_pieces(keys, 3);
}

ReadPlan plan_of(const std::vector<uint64_t>& pages, uint32_t gap, uint32_t max_pages) {
  ReadPlan plan;
  plan.gap = gap;
  plan.max_pages = max_pages;
  for (uint64_t page : pages) plan.lookups.push_back({page, 0, 0, false});
  return plan;
}

TEST(StoreReadPlan, RequestsReadGapsUpToTheLimits) {
  const std::vector<uint64_t> pages{10, 10, 12, 15, 19, 20, 21, make_address(1, 0), make_address(1, 3)};
  auto request = [&](uint32_t first, uint32_t gap, uint32_t max_pages) {
    const ReadRequest r = next_request(plan_of(pages, gap, max_pages), first);
    CHECK(r.address == pages[first] && r.first_lookup == first);
    return std::pair(r.pages, r.end_lookup);
  };
  CHECK(request(0, 0, 256) == std::pair(1u, 2u));
  CHECK(request(0, 1, 256) == std::pair(3u, 3u));
  CHECK(request(0, 2, 256) == std::pair(6u, 4u));
  CHECK(request(0, 3, 256) == std::pair(12u, 7u));
  CHECK(request(0, 255, 256) == std::pair(12u, 7u));  // not into another file
  CHECK(request(0, 3, 11) == std::pair(11u, 6u));
  CHECK(request(0, 255, 1) == std::pair(1u, 2u));
  CHECK(request(7, 2, 256) == std::pair(4u, 9u));
}

TEST(StoreReadChannel, ReadsNeverShareSlots) {
  testing::MemFs fs;
  BufferSizes sizes{};
  sizes.read_slots = 64;
  sizes.slot_pages = 2;
  ReadChannel channel(fs, sizes, 4096);
  std::mt19937_64 random(4);
  std::vector<int> owner(128, -1);  // per page
  std::vector<std::pair<int, size_t>> taken;
  size_t longest = 0;
  for (int i = 0; i < 20000; ++i) {
    const size_t pages = 1 + random() % (i % 2 ? 4 : 32);
    const int slot = channel.take(pages * 4096);
    if (slot >= 0) {
      CHECK_EQ(channel.at(slot), channel.at(0) + slot * 2 * 4096);
      for (size_t p = 0; p < pages; ++p) {
        CHECK_EQ(owner.at(static_cast<size_t>(slot) * 2 + p), -1);
        owner[static_cast<size_t>(slot) * 2 + p] = i;
      }
      taken.push_back({slot, pages});
      longest = std::max(longest, pages);
    }
    if (slot < 0 || random() % 2) {
      CHECK(!taken.empty());  // an empty channel has room for every read
      std::swap(taken[random() % taken.size()], taken.back());
      const auto [first, count] = taken.back();
      for (size_t p = 0; p < count; ++p) owner[static_cast<size_t>(first) * 2 + p] = -1;
      channel.give(first, count * 4096);
      taken.pop_back();
    }
  }
  for (auto [slot, pages] : taken) channel.give(slot, pages * 4096);
  CHECK_EQ(longest, 32u);
  CHECK_EQ(channel.take(128 * 4096), 0);
}

TEST(StoreReadCost, EstimatesFollowTheDevice) {
  ReadCosts costs;
  auto probe = [&](double read_us, double page_us) {
    costs.add_lookup(1e6);
    CHECK(costs.begin_probe());
    costs.end_probe(ReadCost{read_us, page_us}, 0.01);
  };
  CHECK_EQ(costs.get().gap(), 3u);  // not measured
  probe(8, 2);
  CHECK_EQ(costs.get().gap(), 4u);
  probe(80, 20);  // one disturbed probe
  CHECK(costs.get().read_us < 27 && costs.get().read_us > 25);
  for (int i = 0; i < 20; ++i) probe(40, 2);  // slower requests for good
  CHECK(costs.get().gap() >= 19 && costs.get().gap() <= 20);
  for (int i = 0; i < 20; ++i) probe(4, 2);  // and faster again: the lowest cost ever is not kept, nor the highest
  CHECK_EQ(costs.get().gap(), 2u);
  CHECK_EQ(costs.probes(), 42u);
}

TEST(StoreReadCost, ProbesTakeABoundedShareOfTheTime) {
  ReadCosts costs;
  CHECK(costs.begin_probe());
  CHECK(!costs.begin_probe());  // one at a time
  costs.end_probe(std::nullopt, 0);
  CHECK(costs.begin_probe());  // it was not possible: again
  costs.end_probe(ReadCost{5, 2}, 0.010);
  costs.add_lookup(0.99);
  CHECK(!costs.begin_probe());
  costs.add_lookup(0.02);
  CHECK(costs.begin_probe());
  costs.end_probe(ReadCost{5, 2}, 0.010);
  CHECK(!costs.begin_probe());
}

}  // namespace
}  // namespace thermocline::ssd
