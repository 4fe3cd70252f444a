// Sorting of a batch by key hash, for reads and writes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "util/hash.h"

namespace thermocline::ssd {

struct Item {
  uint64_t hash;
  uint32_t index;  // in the caller's arrays
};

// Sorts by hash, then by index: radix passes over the upper 33 bits, then std::sort within equal upper bits.
inline void sort_items(std::vector<Item>& items) {
  auto less = [](const Item& a, const Item& b) { return a.hash != b.hash ? a.hash < b.hash : a.index < b.index; };
  if (items.size() < 512) {
    std::sort(items.begin(), items.end(), less);
    return;
  }
  constexpr int kBits = 11, kPasses = 3;
  constexpr uint64_t kMask = (1u << kBits) - 1;
  std::vector<Item> other(items.size());
  for (int pass = 0; pass < kPasses; ++pass) {
    int shift = 64 - kBits * (kPasses - pass);
    std::array<uint32_t, kMask + 1> start{};
    for (auto& item : items) ++start[(item.hash >> shift) & kMask];
    uint32_t sum = 0;
    for (auto& s : start) {
      uint32_t n = s;
      s = sum;
      sum += n;
    }
    for (auto& item : items) other[start[(item.hash >> shift) & kMask]++] = item;
    items.swap(other);
  }
  // Equal upper 33 bits are rare, except for crafted keys.
  constexpr int kTie = 64 - kBits * kPasses;
  for (size_t i = 0; i < items.size();) {
    size_t end = i + 1;
    while (end < items.size() && (items[end].hash >> kTie) == (items[i].hash >> kTie)) ++end;
    if (end - i > 1)
      std::sort(items.begin() + static_cast<ptrdiff_t>(i), items.begin() + static_cast<ptrdiff_t>(end), less);
    i = end;
  }
}

// Keeps the last of items with equal hashes. Equal hashes mean equal keys: the hash is a bijection.
inline void keep_last(std::vector<Item>& items) {
  size_t out = 0;
  for (size_t i = 0; i < items.size(); ++i)
    if (i + 1 == items.size() || items[i + 1].hash != items[i].hash) items[out++] = items[i];
  items.resize(out);
}

}  // namespace thermocline::ssd
