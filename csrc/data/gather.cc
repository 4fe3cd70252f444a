#include "data/gather.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "util/error.h"

namespace thermocline {
namespace {

struct Location {
  const Examples* block;
  size_t example;
  size_t first = 0, count = 0;  // its ids
};

// Number of examples to prefetch ahead: shuffled examples have random addresses.
constexpr size_t kAhead = 8;

void prefetch(const void* begin, size_t bytes) {
  constexpr size_t kLine = 64, kMost = 16;  // at most 16 cache lines: a processor tracks few outstanding misses
  const char* const p = static_cast<const char*>(begin);
  for (size_t i = 0; i < std::min(bytes, kMost * kLine); i += kLine) __builtin_prefetch(p + i);
}

std::vector<Location> find_examples(const std::vector<Examples>& blocks, const int64_t* order, size_t n) {
  std::vector<size_t> ends;  // examples up to the end of each block
  size_t total = 0;
  for (const Examples& block : blocks) ends.push_back(total += block.examples);
  std::vector<Location> locations(n);
  for (size_t i = 0; i < n; ++i) {
    if (order[i] < 0 || static_cast<size_t>(order[i]) >= total) {
      throw Error("gather_examples: no example " + std::to_string(order[i]) + " among " + std::to_string(total));
    }
    const auto e = static_cast<size_t>(order[i]);
    const auto b = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), e) - ends.begin());
    locations[i] = {&blocks[b], e - (ends[b] - blocks[b].examples)};
  }
  return locations;
}

}  // namespace

Gathered gather_examples(const std::vector<Examples>& blocks, size_t fields, size_t dense, const int64_t* order,
                         size_t n) {
  std::vector<Location> locations = find_examples(blocks, order, n);
  const bool weighted =
      std::any_of(blocks.begin(), blocks.end(), [](const Examples& b) { return b.weights != nullptr; });
  Gathered out;
  out.offsets.resize(n * fields + 1);
  out.dense.resize(n * dense);
  out.labels.resize(n);
  out.offsets[0] = 0;

  int64_t ids = 0;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      const Location& later = locations[i + kAhead];
      prefetch(later.block->offsets + later.example * fields, (fields + 1) * sizeof(int64_t));
    }
    const Examples* const block = locations[i].block;
    const int64_t* from = block->offsets + locations[i].example * fields;
    int64_t* to = out.offsets.data() + i * fields + 1;
    const int64_t shift = ids - from[0];
    bool right = from[0] >= 0 && static_cast<uint64_t>(from[fields]) <= block->id_count;
    for (size_t f = 0; f < fields; ++f) {
      right &= from[f] <= from[f + 1];
      to[f] = from[f + 1] + shift;
    }
    if (!right) throw Error("gather_examples: the offsets of example " + std::to_string(order[i]) + " leave its ids");
    locations[i].first = static_cast<size_t>(from[0]);
    locations[i].count = static_cast<size_t>(from[fields] - from[0]);
    ids += from[fields] - from[0];
  }

  out.ids.resize(static_cast<size_t>(ids));
  if (weighted) out.weights.resize(static_cast<size_t>(ids));
  size_t at = 0;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      const Location& later = locations[i + kAhead];
      prefetch(later.block->ids + later.first, later.count * sizeof(uint64_t));
      prefetch(later.block->dense + later.example * dense, dense * sizeof(float));
      prefetch(later.block->labels + later.example, sizeof(float));
      if (later.block->weights) prefetch(later.block->weights + later.first, later.count * sizeof(float));
    }
    const auto [block, e, first, count] = locations[i];
    std::copy_n(block->ids + first, count, out.ids.data() + at);
    if (weighted && block->weights) std::copy_n(block->weights + first, count, out.weights.data() + at);
    if (weighted && !block->weights) std::fill_n(out.weights.data() + at, count, 1.0f);
    std::copy_n(block->dense + e * dense, dense, out.dense.data() + i * dense);
    out.labels[i] = block->labels[e];
    at += count;
  }
  return out;
}

}  // namespace thermocline
