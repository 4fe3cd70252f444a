// A map from 64-bit keys to counts above 0: open addressing, linear probing, no tombstones.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>

#include "util/hash.h"
#include "util/huge_buffer.h"

namespace thermocline {

// The content does not depend on the order of operations that lead to it; the order of `for_each` does.
class KeyCounts {
 public:
  static constexpr size_t kSlotBytes = 12;

  explicit KeyCounts(size_t slots) : slots_(slots < 2 ? 2 : slots), memory_(slots_ * sizeof(Slot)) {}

  size_t size() const { return size_; }
  // The largest number of keys: beyond it, probes become long.
  size_t limit() const { return slots_ * 4 / 5; }
  size_t bytes() const { return memory_.size(); }

  // Where the search for a key begins: callers with many keys compute and prefetch it first.
  size_t home(uint64_t key) const {
    return static_cast<size_t>((static_cast<unsigned __int128>(hash_key(key)) * slots_) >> 64);
  }
  void prefetch(size_t home) const { __builtin_prefetch(table() + home); }

  // The place of a key, until another key is added or removed.
  using Place = size_t;
  Place find(uint64_t key) const { return find(key, home(key)); }

  // 0: the key is not in the map.
  uint32_t get(Place place) const { return table()[place].value; }
  uint32_t value_of(uint64_t key) const { return get(find(key)); }

  // Sets the value, above 0, of the key of this place. A new key must not exceed the limit.
  void put(Place place, uint64_t key, uint32_t value) {
    if (table()[place].value == 0) {
      assert(size_ < slots_ - 1);
      ++size_;
    }
    table()[place] = {key, value};
  }

  // As `put`; 0 removes the key.
  void set(uint64_t key, uint32_t value) {
    const Place place = find(key);
    if (value != 0) put(place, key, value);
    else if (get(place) != 0) erase(place);
  }

  // Removes the key of this place. Moves later keys of the run back, so that each stays reachable from its home.
  void erase(Place hole) {
    for (size_t i = next(hole); table()[i].value != 0; i = next(i)) {
      const size_t from = home(table()[i].key);
      const bool reachable = hole <= i ? (hole < from && from <= i) : (hole < from || from <= i);
      if (reachable) continue;
      table()[hole] = table()[i];
      hole = i;
    }
    table()[hole] = {0, 0};
    --size_;
  }

  template <typename Fn>
  void for_each(Fn&& fn) const {
    for (size_t i = 0; i < slots_; ++i)
      if (table()[i].value != 0) fn(uint64_t{table()[i].key}, uint32_t{table()[i].value});
  }

 private:
  struct __attribute__((packed)) Slot {
    uint64_t key;
    uint32_t value;  // 0: the slot is free
  };
  static_assert(sizeof(Slot) == kSlotBytes);

  Slot* table() const { return memory_.as<Slot>(); }
  size_t next(size_t i) const { return i + 1 == slots_ ? 0 : i + 1; }

  // The slot of the key, or the free slot where it belongs.
  size_t find(uint64_t key, size_t home) const {
    size_t i = home;
    while (table()[i].value != 0 && table()[i].key != key) i = next(i);
    return i;
  }

  size_t slots_;
  HugeBuffer memory_;
  size_t size_ = 0;
};

}  // namespace thermocline
