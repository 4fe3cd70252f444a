// One shard of the memory tier: the hash index of its keys, and the order in which its rows may leave.
//
// Slots belong to the tier, not to a shard: a shard only knows which of its keys lies in which slot, so that any shard
// can use any slot. All lists are intrusive: their links are in the slots' metadata, and so are the sentinels.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace thermocline {

enum class Policy : uint8_t {
  kLruLfu = 0,  // a visited row enters an LRU list; what leaves it falls into an LFU; what leaves that is evicted
  kLru = 1,
  kLfu = 2,
  kNever = 3,  // no store below: nothing leaves, so no list is kept
};

inline constexpr uint32_t kNoSlot = ~uint32_t{0};

enum class SlotState : uint8_t {
  kFree = 0,
  kLoading = 1,  // in the index, its row not yet there; pinned by the loader
  kReady = 2,
  kLeaving = 3,  // chosen for eviction, its row being written to the store; a pull may still pin and so keep it
  kFailed = 4,   // loading failed: no longer in the index; free when its last pin goes
};

// Zeroed memory is a free slot.
struct SlotMeta {
  uint64_t key;
  uint32_t prev, next;  // in one of the shard's lists, when `list` is not kNone; `next` also links free slots
  uint32_t pins;
  uint8_t state;  // SlotState; written under the shard's lock or by the loader, read by those who wait for it
  uint8_t list;
  uint8_t visits;  // decayed: see Shard::age_
  uint8_t age;

  SlotState load_state() const {
    return static_cast<SlotState>(std::atomic_ref(const_cast<uint8_t&>(state)).load(std::memory_order_acquire));
  }
  void store_state(SlotState s) { std::atomic_ref(state).store(static_cast<uint8_t>(s), std::memory_order_release); }
};
static_assert(sizeof(SlotMeta) == 24);

// A key of a batch, by its place in the batch and the part of its hash that finds it in the index.
struct Probe {
  uint32_t index;
  uint32_t tag;
};

// Invariants, under the lock:
//  1. Every key of the index is in exactly one slot, and that slot's metadata names the key.
//  2. A resident slot is in exactly one list if it is ready and unpinned, and in none otherwise (policy kNever: always
//     in none): whatever is at the end of a list can be evicted.
// Thread safety: the caller holds `mutex` for every call.
class alignas(64) Shard {
 public:
  static constexpr uint32_t kVisitLists = 64;
  static constexpr uint32_t kLists = 1 + kVisitLists;  // the LRU, then one per number of visits

  std::mutex mutex;

  // `index` is zeroed memory of `buckets` words; `sentinels` is the first of kLists slots used as list heads.
  void init(SlotMeta* meta, uint32_t sentinels, uint64_t* index, uint32_t buckets, Policy policy, uint32_t fair_share);

  uint32_t find(uint32_t tag, uint64_t key) const;
  // Ahead of a find: first this, then the slot that is likely, told by the tag alone, or kNoSlot; its metadata is on
  // its way then. At last, whether it is the one.
  void prefetch(uint32_t tag) const { __builtin_prefetch(&index_[home(tag)]); }
  uint32_t likely(uint32_t tag) const;
  uint32_t verified(uint32_t likely, uint32_t tag, uint64_t key) const {
    return likely != kNoSlot && meta_[likely].key != key ? find(tag, key) : likely;  // equal tags
  }
  // Finds and pins: slots[probe.index] is the slot or kNoSlot. Returns how many were found; `waits` is set when one
  // of them is not ready.
  size_t find_and_pin(const Probe* probes, size_t n, const uint64_t* keys, uint32_t* slots, bool* waits);
  bool full() const { return resident_ + 1 >= buckets_; }
  // The key must be absent, the shard not full. The slot begins loading, with one pin.
  void insert(uint32_t tag, uint64_t key, uint32_t slot);
  // Takes a key out of the index. Its slot is the caller's.
  void erase(uint32_t tag, uint32_t slot);

  void pin(uint32_t slot);
  // Returns true when the slot is to be freed: its loading had failed and this was the last pin.
  bool unpin(uint32_t slot);
  // The next row to evict, taken out of its list, or kNoSlot.
  uint32_t victim();
  // Puts an unpinned ready slot into the list of its policy.
  void link(uint32_t slot);

  uint32_t evictable() const { return linked_; }
  uint32_t resident() const { return resident_; }
  uint32_t pinned() const { return pinned_; }
  // Throws Error with both sides of the violated sum.
  void check(const std::string& name, uint32_t capacity) const;

 private:
  static constexpr uint8_t kNone = 0, kInLru = 1, kInVisits = 2;  // SlotMeta::list

  uint32_t home(uint32_t tag) const { return static_cast<uint32_t>((uint64_t{tag} * buckets_) >> 32); }
  uint32_t after(uint32_t bucket) const { return bucket + 1 == buckets_ ? 0 : bucket + 1; }
  uint32_t sentinel(uint32_t list) const { return sentinels_ + list; }
  bool empty(uint32_t list) const { return meta_[sentinel(list)].next == sentinel(list); }
  void push_newest(uint32_t list, uint32_t slot);
  void unlink(uint32_t slot);
  void visit(uint32_t slot);
  void grow_old();
  uint8_t visits(const SlotMeta& m) const;
  void link_by_visits(uint32_t slot);
  uint32_t least_visited();

  // Constant after init().
  SlotMeta* meta_ = nullptr;
  uint64_t* index_ = nullptr;  // tag << 32 | slot + 1; 0: empty. Linear probing, deletion by shifting back
  uint32_t sentinels_ = 0;
  uint32_t buckets_ = 0;
  uint32_t lru_rows_ = 0;  // policy lru_lfu: rows of the LRU list before the oldest fall into the LFU
  uint32_t visits_per_age_ = 0;
  Policy policy_ = Policy::kLruLfu;
  // Protected by mutex.
  uint32_t resident_ = 0;
  uint32_t pinned_ = 0;  // slots with pins, resident or failed
  uint32_t linked_ = 0;
  uint32_t lru_size_ = 0;
  uint64_t nonempty_ = 0;  // bit v: the list of v visits may have rows
  uint32_t visits_now_ = 0;
  uint8_t age_ = 0;  // each age halves all visit counts, so that what was hot once does not stay for ever
};

}  // namespace thermocline
