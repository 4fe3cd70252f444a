// The keys of a horizon whose hashes share the top byte: a hash table with stable numbers for its keys.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "util/hash.h"

namespace thermocline {

// A key of a horizon.
struct HorizonEntry {
  uint64_t key;
  // Slot of the pinned row, or one of the values below; read without the mutex by Horizon::take(). For an erased key:
  // the next one in the list of free indices.
  uint32_t slot;
  uint32_t uses : 24;  // batches, added and not released, that have the key
  uint32_t seen : 8;   // batches, added since the key is in the window, that have it; at most kMostSeen

  static constexpr uint32_t kMostSeen = 255;
  void use() {
    ++uses;
    if (seen < kMostSeen) ++seen;
  }

  static constexpr uint32_t kPending = ~uint32_t{0};  // in HorizonPartition::pending
  static constexpr uint32_t kLoading = ~uint32_t{0} - 1;
  static constexpr uint32_t kAbsent = ~uint32_t{0} - 2;  // the look-ahead does not load the row, or has unpinned it
  static bool pinned(uint32_t slot) { return slot < kAbsent; }
  uint32_t load_slot() const { return std::atomic_ref(const_cast<uint32_t&>(slot)).load(std::memory_order_acquire); }
  void store_slot(uint32_t value) { std::atomic_ref(slot).store(value, std::memory_order_release); }
};
static_assert(sizeof(HorizonEntry) == 16);

// Thread safety: the caller holds `mutex`, except for entry() of a key that an unreleased batch uses, and for the
// counters. Entries never move.
class HorizonPartition {
 public:
  static constexpr uint32_t kMaxKeys = (1u << 24) - 2;

  std::mutex mutex;
  std::vector<uint32_t> pending;  // indices of keys to load

  HorizonEntry& entry(uint32_t index) const {
    const uint32_t i = index + kFirstChunk;
    const auto chunk = static_cast<uint32_t>(std::bit_width(i)) - std::bit_width(kFirstChunk);
    return chunks_[chunk][i - (kFirstChunk << chunk)];
  }

  // Two steps that let the cache misses of several keys overlap.
  void prefetch_bucket(uint64_t hash) const {
    if (!table_.empty()) __builtin_prefetch(&table_[bucket(hash)]);
  }
  void prefetch_entry(uint64_t hash) const {
    if (table_.empty()) return;
    const uint32_t tag = tag_of(hash);
    size_t at = bucket(hash);
    for (uint32_t value; (value = table_[at]) != kEmpty; at = after(at)) {
      if (value >> 24 == tag && value != kTomb) return __builtin_prefetch(&entry(value & kIndex), 1);
    }
  }

  // A new key is kPending, with uses == 0.
  uint32_t find_or_insert(uint64_t key, uint64_t hash) {
    if (4 * (filled_ + 1) > 3 * table_.size()) rehash();
    const uint32_t tag = tag_of(hash);
    size_t at = bucket(hash), tomb = table_.size();
    for (uint32_t value; (value = table_[at]) != kEmpty; at = after(at)) {
      if (value == kTomb) {
        if (tomb == table_.size()) tomb = at;
      } else if (value >> 24 == tag && entry(value & kIndex).key == key) {
        return value & kIndex;
      }
    }
    const uint32_t index = new_index();
    filled_ += tomb == table_.size();
    table_[tomb == table_.size() ? at : tomb] = tag << 24 | index;
    entry(index) = {key, HorizonEntry::kPending, 0, 0};
    if (pending.size() == pending.capacity()) pending.reserve(pending.size() + pending.size() / 8 + 16);
    pending.push_back(index);
    return index;
  }

  void erase(uint32_t index) {
    HorizonEntry& e = entry(index);
    const uint64_t hash = hash_key(e.key);
    const uint32_t wanted = tag_of(hash) << 24 | index;
    size_t at = bucket(hash);
    while (table_[at] != wanted) at = after(at);
    table_[at] = kTomb;
    e.slot = std::exchange(free_, index);
    live_.store(live() - 1, std::memory_order_relaxed);
  }

  template <typename F>
  void for_each(const F& f) {
    for (uint32_t value : table_) {
      if (value < kTomb) f(value & kIndex, entry(value & kIndex));
    }
  }

  uint32_t indices() const { return used_; }  // all indices are below
  uint32_t live() const { return live_.load(std::memory_order_relaxed); }
  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint32_t kFirstChunk = 16, kChunks = 21;  // chunk c has kFirstChunk << c entries
  static constexpr uint32_t kIndex = (1u << 24) - 1;
  static constexpr uint32_t kEmpty = ~uint32_t{0}, kTomb = ~uint32_t{0} - 1, kNone = ~uint32_t{0};

  // The partition uses bits 63..56 of the hash.
  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 48) & 0xff; }
  size_t bucket(uint64_t hash) const { return (hash >> 16 & 0xffffffff) * table_.size() >> 32; }
  size_t after(size_t at) const { return at + 1 == table_.size() ? 0 : at + 1; }

  uint32_t new_index() {
    live_.store(live() + 1, std::memory_order_relaxed);
    if (free_ != kNone) {
      const uint32_t index = free_;
      free_ = entry(index).slot;
      return index;
    }
    const uint32_t i = used_ + kFirstChunk;
    if (std::has_single_bit(i)) {  // the first index of a chunk
      const auto chunk = static_cast<uint32_t>(std::bit_width(i)) - std::bit_width(kFirstChunk);
      chunks_[chunk] = std::make_unique_for_overwrite<HorizonEntry[]>(size_t{kFirstChunk} << chunk);
    }
    ++used_;
    count_bytes();
    return used_ - 1;
  }

  // Removes the tombs of erased keys, and changes the size so that 5/9 of the buckets have a key. All partitions grow
  // at about the same time: therefore not by a factor of two.
  void rehash() {
    const std::vector<uint32_t> before = std::exchange(table_, {});
    table_.assign(9 * size_t{live()} / 5 + 16, kEmpty);
    filled_ = 0;
    for (uint32_t value : before) {
      if (value >= kTomb) continue;
      size_t at = bucket(hash_key(entry(value & kIndex).key));
      while (table_[at] != kEmpty) at = after(at);
      table_[at] = value;
      ++filled_;
    }
    count_bytes();
  }

  // Entries of the last chunk that were never used have no memory yet.
  void count_bytes() {
    bytes_.store((table_.capacity() + pending.capacity()) * 4 + used_ * sizeof(HorizonEntry),
                 std::memory_order_relaxed);
  }

  std::array<std::unique_ptr<HorizonEntry[]>, kChunks> chunks_;
  std::vector<uint32_t> table_;  // open addressing: tag << 24 | index
  size_t filled_ = 0;            // buckets that are not empty
  uint32_t used_ = 0;            // indices given out so far
  uint32_t free_ = kNone;        // list of erased indices, through HorizonEntry::slot
  std::atomic<uint32_t> live_{0};
  std::atomic<size_t> bytes_{0};
};

}  // namespace thermocline
