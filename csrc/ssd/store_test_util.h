// Small stores, a map as the oracle, and comparisons for the tests of SsdStore.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "ssd/store.h"
#include "testing/test.h"

namespace thermocline {

inline constexpr size_t kRow = 24;
using Row = std::array<uint8_t, kRow>;
using Oracle = std::map<uint64_t, Row>;

// Small files, so that merges and splits are frequent.
inline StoreOptions small_options() {
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

// Compares the scan of a range with the oracle.
inline void expect_equal_scan(SsdStore& store, const Oracle& oracle, KeyRange range) {
  auto scan = store.scan(range);
  std::vector<uint64_t> some(257);
  std::vector<uint8_t> some_rows(257 * kRow);
  size_t total = 0;
  while (size_t n = scan->next(257, some.data(), some_rows.data())) {
    for (size_t i = 0; i < n; ++i) {
      auto it = oracle.find(some[i]);
      CHECK(it != oracle.end());
      CHECK(range.contains(some[i]));
      CHECK(std::memcmp(&some_rows[i * kRow], it->second.data(), kRow) == 0);
    }
    total += n;
  }
  size_t expected = 0;
  for (auto& [key, row] : oracle) expected += range.contains(key);
  CHECK_EQ(total, expected);
}

// Compares get() of all keys below key_space, scans and count() with the oracle.
inline void expect_equal(SsdStore& store, const Oracle& oracle, uint64_t key_space) {
  std::vector<uint64_t> keys(key_space);
  for (uint64_t k = 0; k < key_space; ++k) keys[k] = k;
  std::vector<uint8_t> found(key_space), rows(key_space * kRow);
  store.get(keys.data(), keys.size(), found.data(), {rows.data(), kRow});
  for (uint64_t k = 0; k < key_space; ++k) {
    auto it = oracle.find(k);
    CHECK_EQ(found[k] != 0, it != oracle.end());
    if (found[k]) CHECK(std::memcmp(&rows[k * kRow], it->second.data(), kRow) == 0);
  }
  constexpr uint64_t kThird = ~uint64_t{0} / 3;  // ranges first: a scan of all rows empties the write buffer
  for (uint64_t part = 0; part < 3; ++part) {
    expect_equal_scan(store, oracle, {part * kThird, part == 2 ? ~uint64_t{0} : (part + 1) * kThird - 1});
  }
  expect_equal_scan(store, oracle, {hash_key(7), hash_key(7)});
  expect_equal_scan(store, oracle, {});
  CHECK_EQ(store.count(), oracle.size());
}

// Puts the keys [begin, end), each row with its key.
inline void put_range(SsdStore& store, uint64_t begin, uint64_t end) {
  std::vector<uint64_t> keys;
  for (uint64_t k = begin; k < end; ++k) keys.push_back(k);
  std::vector<uint8_t> rows(keys.size() * kRow, 0);
  for (size_t i = 0; i < keys.size(); ++i) std::memcpy(&rows[i * kRow], &keys[i], 8);
  store.put(keys.data(), keys.size(), {rows.data(), kRow});
}

}  // namespace thermocline
