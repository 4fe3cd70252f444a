// Index of the newer rows of one partition: key hash -> log page, six bytes per slot.
//
// A slot has 16 bits of the hash (the tag) and a page number, not the key: the reader compares the key on the page.
// Therefore two versions of one key are two entries, and an entry may refer to a page without the key ("false page"). A
// table never grows, because it does not have the full hashes: a full partition gets another table, and a merge drops
// them all.
//
// Slots are in hash order, so that lookups of a sorted batch access memory sequentially. Rows that are inserted in hash
// order (a scan of another store) crowd one region of such a table; a `mixed` table spreads them.
// Thread safety: protected by the store's index lock: insert() exclusive, other methods shared.
#pragma once

#include <cstdint>
#include <vector>

#include "util/hash.h"

namespace thermocline::ssd {

class DeltaTable {
 public:
  // For hashes in [lo, hi].
  DeltaTable(uint64_t lo, uint64_t hi, uint32_t capacity, bool mixed = false)
      : mixed_(mixed),
        lo_(lo),
        scale_(capacity / (static_cast<double>(hi - lo) + 1.0)),
        tags_(capacity, 0),
        pages_(capacity, 0) {}

  // False: the table is full, or full near the slot of the hash; use another table.
  bool insert(uint64_t hash, uint32_t page) {
    if (full()) return false;
    uint32_t cap = capacity(), at = home(hash);
    for (uint32_t probe = 0; probe < kMaxProbe && probe < cap; ++probe) {
      if (tags_[at] == 0) {
        tags_[at] = tag_of(hash);
        pages_[at] = page;
        ++count_;
        return true;
      }
      if (++at == cap) at = 0;
    }
    return false;
  }

  // Calls fn(page) for every entry that may belong to the hash, in no particular order.
  template <class Fn>
  void find(uint64_t hash, Fn&& fn) const {
    uint32_t cap = capacity(), at = home(hash);
    const uint16_t tag = tag_of(hash);
    for (uint32_t probe = 0; probe < kMaxProbe && probe < cap; ++probe) {
      uint16_t here = tags_[at];
      if (here == 0) return;
      if (here == tag) fn(pages_[at]);
      if (++at == cap) at = 0;
    }
  }

  uint32_t capacity() const { return static_cast<uint32_t>(tags_.size()); }
  uint32_t count() const { return count_; }
  bool full() const { return count_ >= capacity() - capacity() / 8; }
  bool mixed() const { return mixed_; }
  uint64_t memory() const { return sizeof(*this) + capacity() * (sizeof(uint16_t) + sizeof(uint32_t)); }
  static uint64_t slot_bytes() { return sizeof(uint16_t) + sizeof(uint32_t); }

 private:
  static constexpr uint32_t kMaxProbe = 1024;

  static uint16_t tag_of(uint64_t hash) {
    auto tag = static_cast<uint16_t>(hash >> 16);
    return tag == 0 ? 1 : tag;  // 0 marks an empty slot
  }
  uint32_t home(uint64_t hash) const {
    if (mixed_) return static_cast<uint32_t>((mix64(hash) >> 32) * capacity() >> 32);
    auto at = static_cast<uint64_t>(static_cast<double>(hash - lo_) * scale_);
    return at < tags_.size() ? static_cast<uint32_t>(at) : capacity() - 1;
  }

  const bool mixed_;
  const uint64_t lo_;
  const double scale_;
  std::vector<uint16_t> tags_;
  std::vector<uint32_t> pages_;
  uint32_t count_ = 0;
};

}  // namespace thermocline::ssd
