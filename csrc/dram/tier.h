// The memory tier: a cache of rows, over a store or by itself, within a byte budget. Start here.
//
// A batch pulls its working set: rows that are here are pinned, missing ones are read from the store in one request
// or, if the store does not have them, begin with their initial values. Pinned rows stay at their slot, where kernels
// (kernels.h) read and write them in place, until they are unpinned. Unpinned rows leave in the order of the policy
// (shard.h); dirty ones are written to the store straight from their slots, in large batches.
//
// One truth: a row on its way to the store stays in the index until the store has it; a pull in between keeps it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dram/initial.h"
#include "dram/kernels.h"
#include "dram/row_layout.h"
#include "dram/scratch.h"
#include "dram/shard.h"
#include "util/huge_buffer.h"
#include "util/row_store.h"
#include "util/thread_pool.h"

namespace thermocline {

struct TierOptions {
  // Behaviour.
  RowLayout layout{};
  Initial initial{};
  size_t budget = 0;  // bytes: index, metadata, rows and buffers
  Policy policy = Policy::kLruLfu;
  // Performance.
  int threads = 1;
  int shards =
      0;  // a power of two up to 256; 0: from the capacity. Never from the threads: plans do not depend on them
};

struct TierStats {
  uint64_t capacity = 0, resident = 0, free = 0, pinned = 0, dirty = 0, shards = 0;
  uint64_t hits = 0, misses = 0;  // of pulls; misses = from_store + initialised + pushed
  uint64_t from_store = 0, initialised = 0, pushed = 0;
  uint64_t reads = 0, read_hits = 0;              // of read()
  uint64_t evictions = 0, flushed = 0, puts = 0;  // flushed: rows written to the store, by `puts` calls
  uint64_t bytes_rows = 0, bytes_metadata = 0, bytes_index = 0, bytes_buffers = 0, bytes_total = 0, budget = 0;
  std::string kernels;
};

// Thread safety: all calls may run concurrently. Rows themselves are not locked: while one thread writes a pinned row
// (kernels, write), no other may read or write that row, nor flush().
class DramTier {
 public:
  // `store` may be null: then nothing can be evicted, and a full tier is an error. It must outlive the tier.
  DramTier(const TierOptions& options, RowStore* store);

  // Pins the rows of `keys` and gives their slots. All or nothing: after an exception no pin is left.
  // Throws BudgetError when they cannot all be here at once. A repeated key is pinned once per occurrence.
  void pull(const uint64_t* keys, size_t n, uint32_t* slots);
  // Gives back one pin per slot. `dirty`: the rows were changed. `keys`, those the slots were pulled for, may be null;
  // with them it is faster.
  void unpin(const uint32_t* slots, size_t n, bool dirty, const uint64_t* keys = nullptr);
  // Says that pinned rows were changed, before they are unpinned: a flush() in between writes them.
  void mark_dirty(const uint32_t* slots, size_t n);

  struct Sources {
    size_t here = 0, store = 0;  // the others are initial rows
  };
  // The rows as they are now; those of unknown keys are initial rows. Inserts nothing, visits nothing.
  Sources read(const uint64_t* keys, size_t n, uint8_t* rows);
  // Replaces whole rows, wherever they are, without reading the store. Of a repeated key the last one wins; `unique`:
  // there is none, which is faster. Large batches are pushed in parts: after an exception some of the rows may be in.
  void push(const uint64_t* keys, size_t n, const uint8_t* rows, bool dirty, bool unique = false);
  // Copies between pinned slots and a buffer.
  void copy_out(const uint32_t* slots, size_t n, uint8_t* rows);
  void write(const uint32_t* slots, size_t n, const uint8_t* rows);

  // Writes all dirty rows to the store, or to `to`: after that they are clean. Costs as much as there are dirty rows.
  void flush(RowStore* to = nullptr);
  // The next dirty rows, at most `max`, from slot *next on, which moves past them; 0: no more. Changes nothing. Alone:
  // no other call may be in progress.
  size_t dirty_rows(uint32_t* next, size_t max, uint64_t* keys, uint8_t* rows) const;
  // Evicts until `rows` slots are free, or nothing more can be evicted. A pull does this by itself; calling it earlier,
  // from another thread, takes the writing out of the pull.
  void make_room(size_t rows);

  // Throws Error unless the books balance: no key twice, every row in its list, and if `idle` (no call in progress, no
  // batch in flight) free + resident == capacity and nothing pinned.
  void check(bool idle);
  TierStats stats() const;

  const RowLayout& layout() const { return options_.layout; }
  const InitialRows& initial() const { return initial_; }
  uint32_t capacity() const { return plan_.capacity; }
  Rows rows() const {
    return {slab_.as<uint8_t>(), row_bytes_,      options_.layout.dim, codec_.plain() ? nullptr : &codec_,
            meta_.as<uint8_t>(), sizeof(SlotMeta)};
  }
  const Codec& codec() const { return codec_; }
  // Of a table that learns its step: what codes mean from now on. No other call that looks into rows may be in
  // progress.
  void set_scale(float step) { codec_.layout.precision.step = step; }
  ThreadPool& pool() { return pool_; }
  // Throws Error if a slot is not below the capacity.
  void check_slots(const uint32_t* slots, size_t n) const;

 private:
  static constexpr uint32_t kMaxShards = 256;
  // How a budget is divided.
  struct Plan {
    uint32_t capacity, shards, buckets;  // buckets of the index, per shard
    size_t scratch_keys;
    size_t rows, metadata, index, buffers;
    size_t total() const { return rows + metadata + index + buffers; }
  };
  static Plan plan_for(uint32_t capacity, size_t row_bytes, const TierOptions& options);
  static Plan make_plan(size_t row_bytes, const TierOptions& options);

  struct Hash {
    uint32_t shard, tag;
  };
  Hash hash(uint64_t key) const;
  uint8_t* row(uint32_t slot) const { return slab_.as<uint8_t>() + slot * row_bytes_; }
  SlotMeta* meta() const { return meta_.as<SlotMeta>(); }

  // Groups keys by shard, then runs f(shard, probes, count) for each group, in parallel, under the shard's lock.
  // probe.index counts in `pick`, the places of the keys in the batch, or in `keys` itself if there is none.
  using ShardTask = std::function<void(Shard& shard, const Probe* probes, size_t n)>;
  void by_shard(Scratch& s, const uint64_t* keys, const uint32_t* pick, size_t n, const ShardTask& f);
  // The same for slots in use, and their keys if the caller has them: a slot's shard follows from its key, and without
  // the keys all metadata must be read for that. The tags of the probes are not set.
  void slots_by_shard(Scratch& s, const uint32_t* slots, const uint64_t* keys, size_t n, const ShardTask& f);
  template <typename KeyOf>
  void group(Scratch& s, size_t n, const KeyOf& key_of, uint32_t* tags, const ShardTask& f);
  // The same for the keys of one task: probes by shard, those of shard h from starts[h] to starts[h + 1].
  void group_one(const uint64_t* keys, size_t n, Probe* probes, uint32_t* starts) const;
  // each(shard, i, slot) for the keys of one task, under the shard's lock; a key that is not here has kNoSlot.
  // ahead(i, slot) comes some time before, when the slot is only likely.
  template <typename Ahead, typename Each>
  void each_found(const uint64_t* keys, size_t begin, size_t end, const Ahead& ahead, const Each& each);
  // f(begin, end) for the tasks of n keys, in parallel.
  template <typename F>
  void for_tasks(size_t n, const F& f);
  bool replace_all(const uint64_t* keys, size_t n, const uint8_t* rows, bool dirty);
  // f(begin, end) over ranges of n rows, in parallel.
  template <typename F>
  void for_rows(size_t n, const F& f);

  size_t cached_keys(const Scratch& s) const;
  // pull and push: `given` are the rows to begin with instead of the store's.
  void acquire(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, const uint8_t* given);
  void release(Scratch& s, const uint32_t* slots, const uint64_t* keys, size_t n, bool dirty);
  void roll_back(Scratch& s, const uint32_t* slots, size_t n);
  void require_room(size_t needed, size_t missing);
  [[noreturn]] void throw_no_room(size_t needed, size_t missing, size_t available) const;
  // Both tell whether some row is being loaded by another thread.
  bool find_present(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, size_t* hits);
  // From the place `next` on; returns where it stopped.
  size_t load_missing(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, const uint8_t* given, size_t next,
                      bool* waits);
  void fill(Scratch& s, size_t n, const uint8_t* given);
  void fail_loading(const uint32_t* slots, size_t n);
  void wait_ready(const uint32_t* slots, size_t n);
  void wake_waiting();

  size_t take_free(uint32_t* slots, size_t n);
  void give_free(const uint32_t* slots, size_t n);
  void take_slots(Scratch& s, uint32_t* slots, size_t n, size_t needed);
  // Returns how many rows it chose; those pulled meanwhile stay.
  size_t evict(Scratch& s, size_t n);
  size_t choose_victims(Scratch& s, size_t n, size_t* dirty);
  size_t choose_from(Shard& shard, size_t n, uint64_t* keys, uint32_t* slots, size_t* dirty);
  void settle_leaving(Scratch& s, size_t dirty, bool written);

  RowStore* check_row_bytes(RowStore* store) const;
  bool clear_dirty(uint32_t slot);
  void set_dirty(uint32_t slot);
  std::atomic<uint64_t>* dirty_words() const { return dirty_.as<std::atomic<uint64_t>>(); }

  // Constant after construction.
  const TierOptions options_;
  const size_t row_bytes_;
  RowStore* const store_;
  const InitialRows initial_;
  Codec codec_;  // only its step changes
  const Plan plan_;
  HugeBuffer slab_, meta_, index_;
  HugeBuffer dirty_;  // one bit per slot: set by any thread, so atomic words
  std::unique_ptr<Shard[]> shards_;
  ThreadPool pool_;
  ScratchPool scratch_;        // of calls that may wait for the store
  ScratchPool small_scratch_;  // of unpin(), which must not wait behind those

  // Locks, in the order in which they may be taken: writeback_mutex_, a shard's, free_mutex_.
  std::mutex writeback_mutex_;     // held while rows travel to the store: evict(), flush(). Slots are freed under it
  uint32_t next_shard_ = 0;        // protected by writeback_mutex_: who gives the odd victim
  mutable std::mutex free_mutex_;  // protects the three below
  uint32_t free_head_ = kNoSlot;   // a list through SlotMeta::next
  uint32_t free_listed_ = 0;
  uint32_t never_used_ = 0;  // slots from here on were never given out
  std::mutex wait_mutex_;    // with ready_: waiting for rows that another thread loads or evicts
  std::condition_variable ready_;

  std::atomic<uint64_t> hits_{0}, misses_{0}, from_store_{0}, initialised_{0}, pushed_{0}, reads_{0}, read_hits_{0},
      evictions_{0}, flushed_{0}, puts_{0};
};

}  // namespace thermocline
