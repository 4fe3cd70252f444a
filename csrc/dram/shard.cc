#include "dram/shard.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <new>

#include "util/error.h"
#include "util/hash.h"

namespace thermocline {

void Shard::init(SlotMeta* meta, uint8_t* prefixes, uint32_t sentinels, uint64_t* index, uint32_t most_buckets,
                 Policy policy, uint32_t fair_share) {
  meta_ = meta;
  prefixes_ = prefixes;
  sentinels_ = sentinels;
  index_ = index;
  most_buckets_ = most_buckets;
  buckets_ = std::min(most_buckets, kFirstBuckets);
  policy_ = policy;
  lru_rows_ = fair_share / 2;
  visits_per_age_ = 16 * std::max<uint32_t>(fair_share, 64);
  for (uint32_t l = 0; l < kLists; ++l) meta_[sentinel(l)].prev = meta_[sentinel(l)].next = sentinel(l);
}

// ---- index

uint32_t Shard::find(uint32_t tag, uint64_t key) const {
  for (uint32_t b = home(tag); index_[b] != 0; b = after(b)) {
    const auto slot = static_cast<uint32_t>(index_[b]) - 1;
    if (index_[b] >> 32 == tag && meta_[slot].key == key) return slot;
  }
  return kNoSlot;
}

uint32_t Shard::likely(uint32_t tag) const {
  uint32_t b = home(tag);
  while (index_[b] != 0 && index_[b] >> 32 != tag) b = after(b);
  const uint32_t slot = static_cast<uint32_t>(index_[b]) - 1;  // an empty bucket gives kNoSlot
  if (slot != kNoSlot) __builtin_prefetch(&meta_[slot]);
  return slot;
}

uint32_t Shard::peek(uint32_t tag) const {
  constexpr int kMostBuckets = 64;  // entries may move while they are read: do not search for ever
  const uint32_t buckets = std::atomic_ref(const_cast<uint32_t&>(buckets_)).load(std::memory_order_relaxed);
  uint32_t b = home(tag, buckets);
  for (int i = 0; i < kMostBuckets; ++i, b = b + 1 == buckets ? 0 : b + 1) {
    const uint64_t entry = std::atomic_ref(index_[b]).load(std::memory_order_acquire);
    if (entry == 0) return kNoSlot;
    if (entry >> 32 != tag) continue;
    const uint32_t slot = static_cast<uint32_t>(entry) - 1;
    __builtin_prefetch(&meta_[slot]);
    return slot;
  }
  return kNoSlot;
}

// Processes blocks in four passes (index, metadata, list neighbours, pin), so that the cache misses of a block overlap.
size_t Shard::find_and_pin(const Probe* probes, size_t n, const uint64_t* keys, uint32_t* slots, bool* must_wait) {
  constexpr size_t kProbeBlock = 16;
  size_t hits = 0;
  uint32_t block_slots[kProbeBlock];
  for (size_t i = 0; i < std::min(kProbeBlock, n); ++i) prefetch(probes[i].tag);
  for (size_t begin = 0; begin < n; begin += kProbeBlock) {
    const size_t end = std::min(begin + kProbeBlock, n);
    for (size_t i = end; i < std::min(end + kProbeBlock, n); ++i) prefetch(probes[i].tag);
    for (size_t i = begin; i < end; ++i) block_slots[i - begin] = likely(probes[i].tag);
    for (size_t i = begin; i < end; ++i) {
      uint32_t& slot = block_slots[i - begin];
      slot = verified(slot, probes[i].tag, keys[probes[i].index]);
      if (slot == kNoSlot || meta_[slot].list == kNone) continue;
      __builtin_prefetch(&meta_[meta_[slot].prev]);
      __builtin_prefetch(&meta_[meta_[slot].next]);
    }
    for (size_t i = begin; i < end; ++i) {
      const uint32_t slot = block_slots[i - begin];
      slots[probes[i].index] = slot;
      if (slot == kNoSlot) continue;
      ++hits;
      pin(slot);
      if (!is_loaded(meta_[slot].load_state())) *must_wait = true;
    }
  }
  return hits;
}

// Keys are spread over the whole index at random. A full-size index would touch all its memory with the first batches,
// however few rows there are; therefore it doubles, at a load of 4/5. Entries are nearly in the order of their tags,
// before and after: a copy is sequential.
bool Shard::reserve(size_t more) {
  const size_t needed = (resident_ + more) * 5 / 4 + 2;
  if (needed <= buckets_ || buckets_ == most_buckets_) return true;
  const std::unique_ptr<uint64_t[]> entries(new (std::nothrow) uint64_t[size_t{resident_} + 1]);
  if (!entries) return false;
  size_t n = 0;
  for (uint32_t b = 0; b < buckets_; ++b) {
    if (index_[b] == 0) continue;
    entries[n++] = index_[b];
    set_bucket(b, 0);
  }
  uint64_t grown = buckets_;
  while (grown < needed) grown *= 2;
  std::atomic_ref(buckets_).store(static_cast<uint32_t>(std::min<uint64_t>(grown, most_buckets_)),
                                  std::memory_order_relaxed);
  for (size_t i = 0; i < n; ++i) place(static_cast<uint32_t>(entries[i] >> 32), entries[i]);
  return true;
}

void Shard::place(uint32_t tag, uint64_t entry) {
  uint32_t b = home(tag);
  while (index_[b] != 0) b = after(b);
  set_bucket(b, entry);
}

void Shard::insert(uint32_t tag, uint64_t key, uint32_t slot) {
  ++resident_;
  ++pinned_;
  SlotMeta& m = meta_[slot];
  std::atomic_ref(m.key).store(key, std::memory_order_relaxed);
  std::atomic_ref(prefixes_[slot]).store(hash_prefix(hash_key(key)), std::memory_order_relaxed);
  m.pins = 1;
  m.list = kNone;
  m.visits = 0;
  m.age = age_;
  m.store_state(SlotState::kLoading);
  place(tag, uint64_t{tag} << 32 | (slot + 1));  // last: peek() may find it at once
  visit(slot);
}

void Shard::erase(uint32_t tag, uint32_t slot) {
  uint32_t hole = home(tag);
  while (static_cast<uint32_t>(index_[hole]) != slot + 1) hole = after(hole);
  // Shift later entries of the probe sequence back, unless that puts one before its home bucket.
  for (uint32_t b = after(hole); index_[b] != 0; b = after(b)) {
    const uint32_t h = home(static_cast<uint32_t>(index_[b] >> 32));
    const bool movable = hole <= b ? (h <= hole || h > b) : (h <= hole && h > b);
    if (!movable) continue;
    set_bucket(hole, index_[b]);
    hole = b;
  }
  set_bucket(hole, 0);
  --resident_;
}

// ---- pins and lists

void Shard::pin(uint32_t slot) {
  SlotMeta& m = meta_[slot];
  if (m.list != kNone) unlink(slot);
  if (m.pins++ == 0) ++pinned_;
  if (policy_ != Policy::kNever) visit(slot);
}

bool Shard::unpin(uint32_t slot, uint32_t batches) {
  SlotMeta& m = meta_[slot];
  if (batches > 1 && policy_ != Policy::kNever) visit(slot, batches - 1);  // its pin was the first visit
  if (--m.pins != 0) return false;
  --pinned_;
  const SlotState state = m.load_state();
  if (is_loaded(state)) {
    if (batches > 0 && policy_ == Policy::kLruLfu) {
      link_by_visits(slot);
    } else {
      link(slot);
    }
  }
  return state == SlotState::kFailed;  // the evicting thread frees a kEvicting slot
}

void Shard::push_newest(uint32_t list, uint32_t slot) {
  const uint32_t s = sentinel(list), first = meta_[s].next;
  meta_[slot].prev = s;
  meta_[slot].next = first;
  meta_[first].prev = slot;
  meta_[s].next = slot;
}

void Shard::unlink(uint32_t slot) {
  SlotMeta& m = meta_[slot];
  meta_[m.prev].next = m.next;
  meta_[m.next].prev = m.prev;
  if (m.list == kInLru) --lru_size_;
  m.list = kNone;
  --linked_;
}

void Shard::link(uint32_t slot) {
  if (policy_ == Policy::kNever) return;
  if (policy_ == Policy::kLfu) return link_by_visits(slot);
  push_newest(0, slot);
  meta_[slot].list = kInLru;
  ++lru_size_;
  ++linked_;
}

void Shard::link_by_visits(uint32_t slot) {
  const uint8_t v = visits(meta_[slot]);
  push_newest(1 + v, slot);
  meta_[slot].list = kInVisits;
  nonempty_ |= uint64_t{1} << v;
  ++linked_;
}

uint32_t Shard::next_victim() {
  if (linked_ == 0) return kNoSlot;
  if (policy_ == Policy::kLruLfu) {
    // Rows move from the LRU to the LFU lists lazily: the order is only observable at an eviction.
    while (lru_size_ > std::min(lru_rows_, std::max(linked_ / 2, 1u))) {
      const uint32_t slot = meta_[sentinel(0)].prev;
      unlink(slot);
      link_by_visits(slot);
    }
  }
  return lru_size_ == linked_ ? meta_[sentinel(0)].prev : least_visited();
}

// Returns the oldest of the rows with the fewest visits. At least one LFU list must be non-empty.
uint32_t Shard::least_visited() {
  for (;;) {
    const auto v = static_cast<uint32_t>(std::countr_zero(nonempty_));
    if (!empty(1 + v)) return meta_[sentinel(1 + v)].prev;
    nonempty_ &= ~(uint64_t{1} << v);
  }
}

// ---- visits

uint8_t Shard::visits(const SlotMeta& m) const {
  const uint32_t ages = std::min<uint32_t>(static_cast<uint8_t>(age_ - m.age), 7);
  return static_cast<uint8_t>(m.visits >> ages);
}

void Shard::visit(uint32_t slot, uint32_t times) {
  SlotMeta& m = meta_[slot];
  m.visits = static_cast<uint8_t>(std::min<uint32_t>(visits(m) + times, kVisitLists - 1));
  m.age = age_;
  if ((visits_now_ += times) >= visits_per_age_) start_age();
}

void Shard::start_age() {
  visits_now_ = 0;
  ++age_;
  for (uint32_t v = 1; v < kVisitLists; ++v) {
    if (empty(1 + v)) continue;
    // Splice list v in front of the newest row of list v / 2.
    const uint32_t from = sentinel(1 + v), to = sentinel(1 + v / 2);
    const uint32_t newest = meta_[from].next, oldest = meta_[from].prev, old_newest = meta_[to].next;
    meta_[to].next = newest;
    meta_[newest].prev = to;
    meta_[oldest].next = old_newest;
    meta_[old_newest].prev = oldest;
    meta_[from].prev = meta_[from].next = from;
    nonempty_ |= uint64_t{1} << (v / 2);
  }
}

// ---- invariants

void Shard::check(const std::string& name, uint32_t capacity) const {
  const auto fail = [&](const std::string& violation) { throw Error("DRAM tier, shard " + name + ": " + violation); };
  uint32_t entries = 0, pinned = 0, unpinned = 0;
  for (uint32_t b = 0; b < buckets_; ++b) {
    if (index_[b] == 0) continue;
    ++entries;
    const auto slot = static_cast<uint32_t>(index_[b]) - 1;
    if (slot >= capacity) {
      fail("the index has slot " + std::to_string(slot) + ", the capacity is " + std::to_string(capacity));
    }
    const SlotMeta& m = meta_[slot];
    const auto tag = static_cast<uint32_t>(index_[b] >> 32);
    if (find(tag, m.key) != slot) fail("key " + std::to_string(m.key) + " is indexed twice, or cannot be found");
    if (prefixes_[slot] != hash_prefix(hash_key(m.key))) fail("key " + std::to_string(m.key) + " has another prefix");
    const SlotState state = m.load_state();
    if (state == SlotState::kFree || state == SlotState::kFailed) {
      fail("key " + std::to_string(m.key) + " is in the index but its slot is not in use");
    }
    pinned += m.pins != 0;
    const bool evictable = m.pins == 0 && is_loaded(state) && policy_ != Policy::kNever;
    if (evictable != (m.list != kNone)) fail("slot " + std::to_string(slot) + " is in the wrong list");
    unpinned += evictable;
  }
  if (entries != resident_) {
    fail("index entries " + std::to_string(entries) + " != resident rows " + std::to_string(resident_));
  }
  if (pinned > pinned_) {  // pinned < pinned_ is valid: failed slots are pinned but not in the index
    fail("pinned slots " + std::to_string(pinned) + " > pinned counter " + std::to_string(pinned_));
  }
  uint32_t walked = 0;
  for (uint32_t l = 0; l < kLists; ++l) {
    for (uint32_t s = meta_[sentinel(l)].next; s != sentinel(l); s = meta_[s].next, ++walked) {
      if (walked > linked_) fail("the lists have more than " + std::to_string(linked_) + " rows, the counter's value");
      if (meta_[s].list != (l == 0 ? kInLru : kInVisits)) fail("slot " + std::to_string(s) + " is in the wrong list");
      if (meta_[meta_[s].next].prev != s) fail("the links of slot " + std::to_string(s) + " are broken");
    }
    if (l == 0 && walked != lru_size_) {
      fail("rows in the LRU list " + std::to_string(walked) + " != counter " + std::to_string(lru_size_));
    }
  }
  if (walked != linked_ || unpinned != linked_) {
    fail("rows in lists " + std::to_string(walked) + ", unpinned rows " + std::to_string(unpinned) + ", counter " +
         std::to_string(linked_));
  }
}

}  // namespace thermocline
