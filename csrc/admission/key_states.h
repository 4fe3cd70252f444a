// A map from 64-bit keys to states from 1 to 255: open addressing, linear probing, no tombstones. Keys and states have
// arrays of their own: to find out whether a key is in the map reads one cache line of 8 keys, in most cases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "util/hash.h"
#include "util/huge_buffer.h"

namespace thermocline {

// Grows as needed. The content does not depend on the order of operations that lead to it; the order of `for_each`
// does.
class KeyStates {
 public:
  explicit KeyStates(size_t slots) : slots_(slots < 2 ? 2 : slots), keys_(slots_ * 8), states_(slots_) {}

  size_t size() const { return size_ + (zero_ != 0); }
  size_t bytes() const { return keys_.size() + states_.size(); }

  // Where the search for a key begins: callers with many keys compute and prefetch it first. Valid until the map grows.
  size_t home(uint64_t key) const {
    return static_cast<size_t>((static_cast<unsigned __int128>(hash_key(key)) * slots_) >> 64);
  }
  void prefetch(size_t home) const { __builtin_prefetch(keys() + home); }
  void prefetch_state(size_t home) const {
    prefetch(home);
    __builtin_prefetch(states() + home);
  }

  bool contains(uint64_t key, size_t home) const { return key == 0 ? zero_ != 0 : keys()[find(key, home)] == key; }

  // 0: the key is not in the map.
  uint8_t get(uint64_t key) const { return get(key, home(key)); }
  uint8_t get(uint64_t key, size_t home) const { return key == 0 ? zero_ : states()[find(key, home)]; }

  // 0 removes the key.
  void set(uint64_t key, uint8_t state) { set(key, home(key), state); }
  void set(uint64_t key, size_t first, uint8_t state) {
    if (key == 0) {
      zero_ = state;
      return;
    }
    size_t at = find(key, first);
    if (keys()[at] == key) {
      if (state == 0) return erase(at);
    } else {
      if (state == 0) return;
      if (size_ >= slots_ / 8 * 5) {  // beyond it, probes for keys that are missing become long
        grow();
        at = find(key, home(key));
      }
      ++size_;
      keys()[at] = key;
    }
    states()[at] = state;
  }

  template <typename Fn>
  void for_each(Fn&& fn) const {
    if (zero_ != 0) fn(uint64_t{0}, zero_);
    for (size_t i = 0; i < slots_; ++i)
      if (keys()[i] != 0) fn(uint64_t{keys()[i]}, uint8_t{states()[i]});
  }

 private:
  uint64_t* keys() const { return keys_.as<uint64_t>(); }
  uint8_t* states() const { return states_.as<uint8_t>(); }
  size_t next(size_t i) const { return i + 1 == slots_ ? 0 : i + 1; }

  // The slot of the key, which is not 0, or the free slot where it belongs.
  size_t find(uint64_t key, size_t home) const {
    size_t i = home;
    while (keys()[i] != 0 && keys()[i] != key) i = next(i);
    return i;
  }

  void grow() {
    KeyStates larger(2 * slots_);
    for_each([&](uint64_t key, uint8_t state) { larger.set(key, state); });
    std::swap(*this, larger);
  }

  // Moves later keys of the run back, so that each stays reachable from its home.
  void erase(size_t hole) {
    for (size_t i = next(hole); keys()[i] != 0; i = next(i)) {
      const size_t from = home(keys()[i]);
      const bool reachable = hole <= i ? (hole < from && from <= i) : (hole < from || from <= i);
      if (reachable) continue;
      keys()[hole] = keys()[i];
      states()[hole] = states()[i];
      hole = i;
    }
    keys()[hole] = 0;
    states()[hole] = 0;
    --size_;
  }

  size_t slots_;
  HugeBuffer keys_;    // 0: the slot is free
  HugeBuffer states_;  // 0 if the slot is free
  size_t size_ = 0;    // without key 0
  uint8_t zero_ = 0;   // state of key 0
};

}  // namespace thermocline
