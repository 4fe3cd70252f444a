// Sorting of a batch by key hash, for reads and writes.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "util/hash.h"

namespace thermocline::ssd {

struct Item {
  uint64_t hash;
  uint32_t index;  // in the caller's arrays
};

// Sorts by hash, then by index. `other` is working memory. Radix passes over the upper bits of the distance from the
// least hash, then std::sort within equal upper bits.
inline void sort_items(std::vector<Item>& items, std::vector<Item>& other) {
  auto less = [](const Item& a, const Item& b) { return a.hash != b.hash ? a.hash < b.hash : a.index < b.index; };
  if (items.size() < 512) {
    std::sort(items.begin(), items.end(), less);
    return;
  }
  uint64_t lo = ~uint64_t{0}, hi = 0;
  for (auto& item : items) lo = std::min(lo, item.hash), hi = std::max(hi, item.hash);
  const int scale = lo == hi ? 0 : std::countl_zero(hi - lo);
  constexpr int kBits = 11;
  constexpr uint64_t kMask = (1u << kBits) - 1;
  const int passes = items.size() < 65536 ? 2 : 3;  // more bits than the logarithm of the size: few are equal in all
  auto upper = [=](const Item& item) { return (item.hash - lo) << scale >> (64 - kBits * passes); };
  other.resize(items.size());
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = kBits * pass;
    std::array<uint32_t, kMask + 1> start{};
    for (auto& item : items) ++start[(upper(item) >> shift) & kMask];
    uint32_t sum = 0;
    for (auto& s : start) {
      uint32_t n = s;
      s = sum;
      sum += n;
    }
    for (auto& item : items) other[start[(upper(item) >> shift) & kMask]++] = item;
    items.swap(other);
  }
  // Equal upper bits are rare, except for repeated and crafted keys.
  for (size_t i = 0; i < items.size();) {
    size_t end = i + 1;
    while (end < items.size() && upper(items[end]) == upper(items[i])) ++end;
    if (end - i > 1)
      std::sort(items.begin() + static_cast<ptrdiff_t>(i), items.begin() + static_cast<ptrdiff_t>(end), less);
    i = end;
  }
}

inline void sort_items(std::vector<Item>& items) {
  std::vector<Item> other;
  sort_items(items, other);
}

// Keeps the last of items with equal hashes. Equal hashes mean equal keys: the hash is a bijection.
inline void keep_last(std::vector<Item>& items) {
  size_t out = 0;
  for (size_t i = 0; i < items.size(); ++i)
    if (i + 1 == items.size() || items[i + 1].hash != items[i].hash) items[out++] = items[i];
  items.resize(out);
}

}  // namespace thermocline::ssd
