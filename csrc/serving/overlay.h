// The index of the rows that deltas changed since the base of a view.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "serving/snapshot_file.h"
#include "util/huge_buffer.h"
#include "util/huge_vector.h"

namespace thermocline::serving {

// Changed rows of several deltas, by key. The rows stay in the mapped files.
class Overlay {
 public:
  struct Entry {
    uint64_t key;
    const uint8_t* row;  // deleted() or a row; nullptr: unused entry
  };
  static const uint8_t* deleted();

  // The entries of `older` and then of `newer`; the last of a key counts.
  static std::shared_ptr<const Overlay> merge(const std::vector<std::shared_ptr<const Overlay>>& older,
                                              const std::shared_ptr<const SnapshotFile>& newer);
  size_t size() const { return size_; }
  uint64_t mem_bytes() const { return entries_.size(); }
  void prefetch(uint64_t h) const { __builtin_prefetch(&entries_.as<Entry>()[h & mask_]); }
  const Entry* find(uint64_t key, uint64_t h) const;
  // All entries, unused ones included.
  std::span<const Entry> entries() const { return {entries_.as<const Entry>(), mask_ + 1}; }

 private:
  explicit Overlay(size_t expected);
  void insert(uint64_t key, const uint8_t* row);

  HugeBuffer entries_;
  uint64_t mask_;
  size_t size_ = 0;
  std::vector<std::shared_ptr<const SnapshotFile>> files_;  // of the rows
};

// Bloom filter of changed keys, one word per key, so that most lookups of unchanged keys read no overlay: it has an
// eighth of the bytes of the overlays and stays in the processor's caches.
class ChangeFilter {
 public:
  explicit ChangeFilter(size_t keys) : words_(words_for(keys), 0), capacity_(keys) {}

  void add(uint64_t h) { words_[word(h)] |= bits(h); }
  bool may_contain(uint64_t h) const { return (words_[word(h)] & bits(h)) == bits(h); }
  void prefetch(uint64_t h) const { __builtin_prefetch(&words_[word(h)]); }
  size_t capacity() const { return capacity_; }
  uint64_t mem_bytes() const { return 8 * words_.size(); }

 private:
  static constexpr size_t kBitsPerKey = 12;
  static constexpr size_t kHugePageWords = HugeAllocator<uint64_t>::kHugePage / sizeof(uint64_t);

  // A filter that is nearly as large as a huge page fills one.
  static size_t words_for(size_t keys) {
    const size_t words = keys * kBitsPerKey / 64 + 1;
    return words >= kHugePageWords / 4 ? std::max(words, kHugePageWords) : words;
  }
  size_t word(uint64_t h) const {
    return static_cast<size_t>((static_cast<unsigned __int128>(h) * words_.size()) >> 64);
  }
  static uint64_t bits(uint64_t h) {
    return uint64_t{1} << (h & 63) | uint64_t{1} << (h >> 6 & 63) | uint64_t{1} << (h >> 12 & 63) |
           uint64_t{1} << (h >> 18 & 63);
  }

  HugeVector<uint64_t> words_;
  size_t capacity_;
};

}  // namespace thermocline::serving
