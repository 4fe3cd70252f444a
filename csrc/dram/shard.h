// One shard of the DRAM tier: the hash index of its keys, and the eviction order of its rows.
//
// Slots belong to the tier: any shard can use any slot. A shard maps its keys to slots. All lists are intrusive: the
// links and the sentinels are SlotMeta entries.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace thermocline {

enum class Policy : uint8_t {
  kLruLfu = 0,  // unpinned rows enter an LRU list; its oldest rows move to an LFU list; evictions take from the LFU
  kLru = 1,
  kLfu = 2,
  kNever = 3,  // no store: nothing is evicted, no list is kept
};

inline constexpr uint32_t kNoSlot = ~uint32_t{0};

// The top bits of a hash: hashes of one prefix are a range.
inline constexpr uint8_t hash_prefix(uint64_t hash) { return static_cast<uint8_t>(hash >> 56); }

// Transitions: kFree -> kLoading (insert) -> kReady (loaded) -> kEvicting (chosen, dirty) -> kFree (written, unpinned);
// kLoading -> kErased (erased meanwhile) -> kReady (loaded: the initial row); kLoading and kErased -> kFailed (load
// error) -> kFree (last pin released); kReady -> kFree (chosen, clean);
// kEvicting -> kReady (pinned meanwhile, or the write failed); kReady -> kWriting (a copy is written ahead) -> kReady.
enum class SlotState : uint8_t {
  kFree = 0,
  kLoading = 1,   // in the index, row not loaded yet; pinned by the loading call
  kReady = 2,     // in the index, row valid
  kEvicting = 3,  // in the index, row valid and being written to the store; a pull may pin it, which keeps it resident
  kFailed = 4,    // loading failed: removed from the index, still pinned
  kWriting = 5,   // as kReady, and a copy is being written to the store: not evicted until that has ended
  kErased = 6,    // as kLoading, but the row that is being read must not be used: the loading call sets the initial row
};

inline bool is_loading(SlotState s) { return s == SlotState::kLoading || s == SlotState::kErased; }
inline bool is_written(SlotState s) { return s == SlotState::kWriting || s == SlotState::kEvicting; }
inline bool is_loaded(SlotState s) { return s == SlotState::kReady || s == SlotState::kWriting; }

// All-zero memory is a free slot.
struct SlotMeta {
  uint64_t key;         // written by atomic stores: see DramTier::unwritten_rows()
  uint32_t prev, next;  // links of one of the shard's lists if `list` is not kNone; `next` also links free slots
  uint32_t pins;
  uint8_t state;  // SlotState; written under the shard's mutex or by the loading call, read by waiting threads
  uint8_t list;
  uint8_t visits;  // halved per age: see Shard::age_
  uint8_t age;

  uint64_t load_key() const { return std::atomic_ref(const_cast<uint64_t&>(key)).load(std::memory_order_relaxed); }
  SlotState load_state() const {
    return static_cast<SlotState>(std::atomic_ref(const_cast<uint8_t&>(state)).load(std::memory_order_acquire));
  }
  void store_state(SlotState s) { std::atomic_ref(state).store(static_cast<uint8_t>(s), std::memory_order_release); }
  // Replaces kLoading by `s`. False: it was another state.
  bool end_loading(SlotState s) {
    auto loading = static_cast<uint8_t>(SlotState::kLoading);
    return std::atomic_ref(state).compare_exchange_strong(loading, static_cast<uint8_t>(s), std::memory_order_acq_rel);
  }
  // Whether the slot has the row of this key and is kReady. Without the shard's mutex the answer is valid as long as no
  // row is evicted or erased.
  bool holds(uint64_t wanted) const {
    return load_state() == SlotState::kReady &&
           std::atomic_ref(const_cast<uint64_t&>(key)).load(std::memory_order_relaxed) == wanted;
  }
};
static_assert(sizeof(SlotMeta) == 24);

// A key of a batch: its position in the batch, and the part of its hash that the index stores.
struct Probe {
  uint32_t index;
  uint32_t tag;
};

// Invariants, while `mutex` is held:
//  1. Every key of the index has exactly one slot, and the slot's metadata has that key.
//  2. A resident slot is in exactly one list if it is loaded and unpinned, else in none (policy kNever: always in
//  none).
//     Therefore every listed slot can be evicted, after the end of its write if it is kWriting.
//  3. resident_ is the number of index entries, linked_ the number of listed slots.
// Thread safety: the caller holds `mutex` for every call except prefetch() and peek().
class alignas(64) Shard {
 public:
  static constexpr uint32_t kVisitLists = 64;
  static constexpr uint32_t kLists = 1 + kVisitLists;  // the LRU, then one per number of visits

  std::mutex mutex;

  // `index` is zeroed memory of `most_buckets` words, of which the shard uses more and more as it grows; `sentinels` is
  // the first of kLists slots used as list heads. `prefixes` has hash_prefix() of the key of every slot in use.
  void init(SlotMeta* meta, uint8_t* prefixes, uint32_t sentinels, uint64_t* index, uint32_t most_buckets,
            Policy policy, uint32_t fair_share);

  uint32_t find(uint32_t tag, uint64_t key) const;
  // A find in three steps, so that cache misses of several keys overlap: prefetch() the bucket; likely() returns the
  // slot with an equal tag, or kNoSlot, and prefetches its metadata; verified() compares the key.
  void prefetch(uint32_t tag) const {
    const uint32_t buckets = std::atomic_ref(const_cast<uint32_t&>(buckets_)).load(std::memory_order_relaxed);
    const uint64_t* const bucket = &index_[home(tag, buckets)];
    __builtin_prefetch(bucket);
    __builtin_prefetch(bucket + kProbed);  // of the next cache line, in most cases where the search goes on there
  }
  uint32_t likely(uint32_t tag) const;
  // likely() without the mutex: may return kNoSlot for a key that is being moved, and a slot that has lost its key. See
  // SlotMeta::holds().
  uint32_t peek(uint32_t tag) const;
  uint32_t verified(uint32_t likely, uint32_t tag, uint64_t key) const {
    return likely != kNoSlot && meta_[likely].key != key ? find(tag, key) : likely;  // tags collide
  }
  // Sets slots[probe.index] to the pinned slot, or to kNoSlot. Returns the number of keys found; sets *must_wait if one
  // of their slots is not ready.
  size_t find_and_pin(const Probe* probes, size_t n, const uint64_t* keys, uint32_t* slots, bool* must_wait);
  // Grows the index for `more` keys, as far as its memory allows: see full(). Needs a temporary copy of the entries;
  // returns false, and changes nothing, if there is no memory for it.
  bool reserve(size_t more);
  bool full() const { return resident_ + 1 >= buckets_; }
  // The key must be absent and the shard not full. The slot becomes kLoading, with one pin.
  void insert(uint32_t tag, uint64_t key, uint32_t slot);
  // Removes a key from the index. The caller then owns its slot.
  void erase(uint32_t tag, uint32_t slot);

  void pin(uint32_t slot);
  // Returns true if the caller must free the slot: its load failed and this was the last pin. `batches`: of a
  // look-ahead, that used the row while it was pinned. They count as visits, and the row does not enter the LRU, which
  // protects rows that may be needed soon: the look-ahead knows that it is not.
  bool unpin(uint32_t slot, uint32_t batches = 0);
  // Returns the next slot to evict, or kNoSlot; unlink() must follow, or no other call in between.
  uint32_t next_victim();
  void unlink(uint32_t slot);
  // Calls f(slot) for at most n slots, in about the order in which they will be evicted, until f returns false. Changes
  // no list.
  template <typename F>
  void for_next_victims(size_t n, const F& f) const {
    const auto visit_list = [&](uint32_t list) {
      for (uint32_t slot = meta_[sentinel(list)].prev; slot != sentinel(list); slot = meta_[slot].prev) {
        __builtin_prefetch(&meta_[meta_[slot].prev]);
        if (n == 0 || !f(slot)) return false;
        --n;
      }
      return true;
    };
    for (uint64_t lists = nonempty_; lists != 0; lists &= lists - 1) {
      if (!visit_list(1 + static_cast<uint32_t>(std::countr_zero(lists)))) return;
    }
    visit_list(0);
  }
  // Links an unpinned loaded slot into the list of the policy.
  void link(uint32_t slot);

  uint32_t evictable() const { return linked_; }
  uint32_t resident() const { return resident_; }
  uint32_t pinned() const { return pinned_; }
  // Throws Error, with both sides of a violated sum.
  void check(const std::string& name, uint32_t capacity) const;

 private:
  static constexpr uint8_t kNone = 0, kInLru = 1, kInVisits = 2;  // SlotMeta::list

  static constexpr uint32_t kFirstBuckets = 512;  // one page
  static constexpr uint32_t kProbed = 5;          // buckets that most searches are within
  static uint32_t home(uint32_t tag, uint32_t buckets) {
    return static_cast<uint32_t>((uint64_t{tag} * buckets) >> 32);
  }
  uint32_t home(uint32_t tag) const { return home(tag, buckets_); }
  void set_bucket(uint32_t bucket, uint64_t entry) {  // atomic for peek()
    std::atomic_ref(index_[bucket]).store(entry, std::memory_order_release);
  }
  void place(uint32_t tag, uint64_t entry);
  uint32_t after(uint32_t bucket) const { return bucket + 1 == buckets_ ? 0 : bucket + 1; }
  uint32_t sentinel(uint32_t list) const { return sentinels_ + list; }
  bool empty(uint32_t list) const { return meta_[sentinel(list)].next == sentinel(list); }
  void push_newest(uint32_t list, uint32_t slot);
  void visit(uint32_t slot, uint32_t times = 1);
  void start_age();
  uint8_t visits(const SlotMeta& m) const;
  void link_by_visits(uint32_t slot);
  uint32_t least_visited();

  // Constant after init().
  SlotMeta* meta_ = nullptr;
  uint8_t* prefixes_ = nullptr;  // written by atomic stores: read without the mutex
  uint64_t* index_ = nullptr;    // tag << 32 | slot + 1; 0: empty. Linear probing, deletion by backward shift
  uint32_t sentinels_ = 0;
  uint32_t most_buckets_ = 0;
  // Policy kLruLfu: rows of the LRU list beyond this number, or half of the rows in lists, move to the LFU lists.
  uint32_t lru_rows_ = 0;
  uint32_t visits_per_age_ = 0;
  Policy policy_ = Policy::kLruLfu;
  // Protected by mutex, except that prefetch() and peek() read buckets_.
  uint32_t buckets_ = 0;  // of the index, from kFirstBuckets to most_buckets_
  uint32_t resident_ = 0;
  uint32_t pinned_ = 0;  // slots with pins: resident or kFailed
  uint32_t linked_ = 0;
  uint32_t lru_size_ = 0;
  uint64_t nonempty_ = 0;  // bit v: the list of v visits may have rows
  uint32_t visits_now_ = 0;
  uint8_t age_ = 0;  // each age halves all visit counts, so that rows that were hot once can be evicted
};

}  // namespace thermocline
