// The DRAM tier: a cache of rows within a byte budget, over an optional store. Start here.
//
// pull() pins the rows of a batch. Resident rows are pinned in place. Missing rows are read from the store in one
// request; rows that the store does not have get their initial values. A pinned row stays in its slot until it is
// unpinned; kernels (kernels.h) read and write it there. Unpinned rows are evicted in the order of the policy
// (shard.h). Dirty rows are written to the store in large batches: those that are evicted next ahead of need, by a
// background thread.
//
// Implementation: tier.cc (budget, grouping by shard), pull.cc (pin, load, unpin), row_access.cc (read, push, copies,
// erase),
// writeback.cc (free slots, eviction, flush, invariants), write_ahead.cc (writes ahead of evictions).
//
// Invariants:
//  1. A row has one current copy. While an evicted dirty row is written to the store it stays in the index; a pull
//     during the write pins it and so cancels the eviction.
//  2. free + resident == capacity when no call is in progress; a failed pull leaves no pin.
//  3. A dirty bit is set only for a slot that holds a row.
//  4. Result, plan and eviction order do not depend on the number of threads.
//  5. The bytes of rows, metadata, index and scratch memory never exceed the budget. All are mapped at the start and
//     touched as rows arrive: slots are used in order, and the index of a shard grows (Shard::reserve). Its temporary
//     copy while it grows is not counted: the last one is made when half of the rows are still untouched.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "dram/background_task.h"
#include "dram/initial.h"
#include "dram/kernels.h"
#include "dram/row_layout.h"
#include "dram/scratch.h"
#include "dram/shard.h"
#include "util/fair_mutex.h"
#include "util/hash.h"
#include "util/huge_buffer.h"
#include "util/row_store.h"
#include "util/thread_pool.h"

namespace thermocline {

struct TierOptions {
  // Behaviour.
  RowLayout layout{};
  Initial initial{};
  size_t budget = 0;    // bytes: index, metadata, rows, buffers and `reserved`
  size_t reserved = 0;  // bytes of the budget that the caller uses for batches in flight; counted as buffers
  Policy policy = Policy::kLruLfu;
  // Performance.
  int threads = 1;
  int shards = 0;  // a power of two up to 256; 0: derived from the capacity, never from the number of threads
  // Rows to be evicted next that are kept clean by a background thread; default: the slots that three recent pulls
  // took, 1/16 to 1/4 of the capacity. 0: pulls write the rows that they evict.
  std::optional<size_t> write_ahead;
};

struct TierStats {
  uint64_t capacity = 0, resident = 0, free = 0, pinned = 0, dirty = 0, shards = 0;
  uint64_t hits = 0, misses = 0;  // keys of pull(); misses == from_store + initialised + pushed
  uint64_t from_store = 0, initialised = 0, pushed = 0;
  uint64_t loaded_ahead = 0;                      // misses of a look-ahead of training; its hits are not counted
  uint64_t read_ahead = 0;                        // rows that a look-ahead of read() loaded: in no other counter
  uint64_t reads = 0, read_hits = 0;              // keys of read()
  uint64_t read_from_store = 0;                   // of reads: rows that read() itself read from the store
  uint64_t evictions = 0, flushed = 0, puts = 0;  // flushed: rows written to the store by `puts` calls
  uint64_t written_ahead = 0;                     // of flushed: by the background thread
  uint64_t puts_in_pulls = 0;                     // of puts: a pull waited for them
  uint64_t bytes_rows = 0, bytes_metadata = 0, bytes_index = 0, bytes_buffers = 0, bytes_total = 0, budget = 0;
  std::string kernels;
};

// Thread safety: all calls may run concurrently, except where a method states otherwise. Rows are not locked: while one
// thread writes a row (kernels, write, push), no other thread may read or write that row or call flush().
class DramTier {
 public:
  // `store` may be null: then nothing is evicted, and a full tier is an error. It must outlive the tier.
  DramTier(const TierOptions& options, RowStore* store);

  // An error of a write ahead is thrown by the next pull() that needs slots; flush() writes its rows again.
  //
  // Pins the rows of `keys` and writes their slots. All or nothing: an exception leaves no pin. Throws BudgetError if
  // the rows cannot all be resident at once. A repeated key is pinned once per occurrence. Blocks on the store, and on
  // rows that another thread loads. `purpose`: how TierStats counts the rows; kAheadOfRead, for unique keys, inserts no
  // row that the store does not have, and sets its slot to kNoSlot.
  enum class Purpose : uint8_t { kBatch, kAheadOfPull, kAheadOfRead };
  void pull(const uint64_t* keys, size_t n, uint32_t* slots, Purpose purpose = Purpose::kBatch);
  // Releases one pin per slot. `dirty`: the rows were changed. `keys` (the keys the slots were pulled for) may be null;
  // passing them is faster. `batches`: of a look-ahead, see Shard::unpin(). Never blocks on the store.
  void unpin(const uint32_t* slots, size_t n, bool dirty, const uint64_t* keys = nullptr,
             const uint8_t* batches = nullptr);
  // Marks pinned rows as changed, so that a flush() before their unpin() writes them.
  void mark_dirty(const uint32_t* slots, size_t n);

  // Where read() took rows from; the remaining rows are initial rows.
  struct Sources {
    size_t resident = 0, store = 0;
  };
  // Copies the current rows; unknown keys get initial rows. Inserts nothing and does not count as a visit. `slots`, if
  // not null, receives the slots of rows that keep them, for push(): those in a tier without a store; else kNoSlot.
  Sources read(const uint64_t* keys, size_t n, uint8_t* rows, uint32_t* slots = nullptr);
  // Slots that read() has returned for the keys of a push, kNoSlot if unknown, and slots_version() before that read().
  struct KnownSlots {
    const uint32_t* slots;
    uint64_t version;
  };
  // Replaces whole rows without reading the store. The last row of a repeated key wins; `unique` states that no key
  // repeats, which is faster. Large batches are pushed in parts: after an exception some rows may be in the tier.
  // `known` saves lookups of unique keys; a slot that has lost its key since is not used.
  void push(const uint64_t* keys, size_t n, const uint8_t* rows, bool dirty, bool unique = false,
            KnownSlots known = {nullptr, 0});
  // Differs between tiers and changes with erase(): a slot of the same version still has its key.
  uint64_t slots_version() const { return slots_version_; }
  bool keeps_slots() const { return store_ == nullptr; }
  // Replaces the rows of `keys` by their initial rows, as if they had never been trained: frees the slots of unpinned
  // rows, and overwrites pinned ones. The caller has removed the keys from the store before, while none of these rows
  // was dirty or being written (end_writes), and no other call may change them. Pulls that are loading one of these
  // rows set the initial row; a read() in progress may still return the old one. Returns the number of rows that were
  // resident. Waits for no I/O.
  size_t erase(const uint64_t* keys, size_t n);
  // Drops changes of the rows of `keys` that the store does not have: waits for writes in progress, by evictions, ahead
  // of them or by flush(), and starts no other.
  void end_writes(const uint64_t* keys, size_t n);
  // Counts `rows` rows that a batch uses without a pull, because a look-ahead holds their pins.
  void count_hits(size_t rows) { hits_ += rows; }
  // Copy rows between pinned slots and a buffer.
  void copy_out(const uint32_t* slots, size_t n, uint8_t* rows);
  void write(const uint32_t* slots, size_t n, const uint8_t* rows);

  // Writes the dirty rows of a range to the store, or to `to`, and marks them clean. Cost: proportional to the rows
  // written; of a part of the keys, also a pass over the keys of all dirty rows, in parallel.
  void flush(RowStore* to = nullptr, KeyRange range = {});
  // Copies the next dirty rows of a range, at most `max`, starting at slot *next, and advances *next. 0: no more rows.
  // Changes nothing. No dirty row may change, be written or evicted meanwhile: without a store, pulls may be in
  // progress.
  size_t dirty_rows(uint32_t* next, size_t max, uint64_t* keys, uint8_t* rows, KeyRange range = {});
  // Calls add(key, row, row_bytes) for the rows of a range that the store may not have yet: dirty ones, and those that
  // are being written. A row whose write has ended meanwhile may be missing: the caller then looks at the store. No row
  // of the range may change meanwhile; other calls may be in progress. Waits for no I/O.
  void unwritten_rows(KeyRange range, const std::function<void(uint64_t, const uint8_t*, size_t)>& add);
  // Writes the dirty rows among about `rows` rows to be evicted next; they stay resident and become clean. Returns the
  // number written. A background thread calls it (TierOptions::write_ahead).
  size_t write_ahead(size_t rows);
  // Stops the background thread, after a pass in progress: from then on only pulls and flush() write to the store. Call
  // it before the store's rows are replaced below a tier that is given up.
  void stop_write_ahead() { background_.stop(); }

  // Throws Error if an invariant is violated: no key twice, every row in its list and, if `idle` (no call in progress,
  // nothing pinned), free + resident == capacity and no pins.
  void check(bool idle);
  TierStats stats() const;
  // Counters of stats() that are requested often: stats() takes time proportional to the capacity.
  size_t pinned() const;
  uint64_t loaded_ahead() const { return loaded_ahead_ + read_ahead_; }
  uint64_t rows_read_from_store() const { return read_from_store_; }
  size_t calls_at_once() const { return plan_.scratches; }  // of pull(), read() and push(); others wait

  const RowLayout& layout() const { return options_.layout; }
  const InitialRows& initial() const { return initial_; }
  uint32_t capacity() const { return plan_.capacity; }
  Rows rows() const {
    return {slab_.as<uint8_t>(), stride_,         options_.layout.dim, codec_.plain() ? nullptr : &codec_,
            meta_.as<uint8_t>(), sizeof(SlotMeta)};
  }
  const Codec& codec() const { return codec_; }
  // Sets the learned quantization scale of the table. No other call that encodes or decodes rows may be in progress.
  void set_scale(float scale) { codec_.layout.precision.scale = scale; }
  ThreadPool& pool() { return pool_; }
  // Throws Error if a slot is not below the capacity.
  void check_slots(const uint32_t* slots, size_t n) const;

 private:
  static constexpr uint32_t kMaxShards = 256;
  static constexpr size_t kTaskRows = 4096;
  // Division of the budget.
  struct Plan {
    uint32_t capacity, shards, buckets;  // buckets: of the index, per shard
    size_t scratches, scratch_keys;
    size_t staged_rows;                     // copies of rows that are being written ahead
    size_t rows, metadata, index, buffers;  // bytes
    size_t total() const { return rows + metadata + index + buffers; }
  };
  static Plan plan_for(uint32_t capacity, const TierOptions& options);
  static Plan make_plan(const TierOptions& options);
  RowStore* check_row_bytes(RowStore* store) const;

  struct Hash {
    uint32_t shard, tag;
  };
  Hash hash(uint64_t key) const;
  uint8_t* row(uint32_t slot) const { return slab_.as<uint8_t>() + slot * stride_; }
  SlotMeta* meta() const { return meta_.as<SlotMeta>(); }

  // Grouping by shard (tier.cc).
  using ShardTask = std::function<void(Shard& shard, const Probe* probes, size_t n)>;
  // Groups keys by shard and runs f(shard, probes, count) per group, in parallel, under the shard's mutex. With
  // `positions`, key i of the group is keys[positions[i]]; without, keys[i]. probe.index is i.
  void for_key_groups(Scratch& s, const uint64_t* keys, const uint32_t* positions, size_t n, const ShardTask& f);
  // Groups pinned slots by the shard of their keys. `keys` may be null: then the keys are read from the metadata. The
  // tags of the probes are 0.
  void for_slot_groups(Scratch& s, const uint32_t* slots, const uint64_t* keys, size_t n, const ShardTask& f);
  template <typename KeyOf>
  void group(const Scratch::Grouping& g, size_t n, const KeyOf& key_of, bool with_tags, const ShardTask& f);
  // Single-threaded grouping: the probes of shard h are probes[starts[h]] .. [starts[h + 1] - 1].
  void sort_by_shard(const uint64_t* keys, size_t n, Probe* probes, uint32_t* starts) const;
  // Runs f(shard, probes, count) per shard of the keys, on this thread, under the shard's mutex. Shards whose mutex
  // another thread has come last: an eviction and write_ahead() have one after the other for milliseconds, and a caller
  // that waits for each in turn follows them through all shards.
  void for_free_shards_first(const uint64_t* keys, size_t n, const ShardTask& f);
  size_t cached_keys(const Scratch& s) const;
  // Runs f(begin, end) over ranges of n rows, in parallel.
  template <typename F>
  void for_rows(size_t n, const F& f) {
    const size_t tasks = n / kTaskRows + 1;
    pool_.parallel(tasks, [&](size_t t) { f(n * t / tasks, n * (t + 1) / tasks); });
  }

  // Pull and unpin (pull.cc). `given`: rows of push(), used instead of the store's.
  void acquire(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, const uint8_t* given,
               Purpose purpose = Purpose::kBatch);
  // Returns false, and leaves no pin, if another thread failed to load one of the rows: this thread then loads it, so
  // that it raises the store's error itself.
  bool try_acquire(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, const uint8_t* given, Purpose purpose);
  // `batches`: see Shard::unpin(); null: 1 for all if `by_visits`, else 0.
  void release(Scratch& s, const uint32_t* slots, const uint64_t* keys, size_t n, bool dirty,
               const uint8_t* batches = nullptr, bool by_visits = false);
  void roll_back(Scratch& s, const uint32_t* slots, size_t n);
  void require_capacity(size_t needed, size_t missing);
  [[noreturn]] void throw_over_budget(size_t needed, size_t missing, size_t available) const;
  // Counters of one acquire().
  struct Progress {
    size_t hits = 0, from_store = 0, initialised = 0, pushed = 0;
    bool must_wait = false;  // some pinned row is being loaded or evicted by another thread
  };
  void pin_resident(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, Progress* progress);
  size_t load_missing(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, const uint8_t* given, size_t next,
                      Purpose purpose, Progress* progress);
  enum class Inserted { kAll, kIndexFull, kNoMemory };  // kIndexFull: of a shard
  Inserted insert_missing(Scratch& s, const uint64_t* keys, size_t missing, uint32_t* slots, Progress* progress);
  size_t select_own_loads(Scratch& s, const uint64_t* keys, size_t missing, const uint32_t* slots);
  size_t drop_unknown(Scratch& s, size_t loading, uint32_t* slots);
  void fill_rows(const Scratch::RowLoads& loads, size_t n, const uint8_t* given, Progress* progress);
  void count(const Progress& progress, size_t n, Purpose purpose);
  void fail_loading(const uint32_t* slots, size_t n);
  bool wait_ready(const uint32_t* slots, size_t n);  // false: another thread failed to load a row
  void notify_waiters();

  // Lookups without pins (row_access.cc).
  template <typename Prefetch, typename Visit>
  void for_each_lookup(const uint64_t* keys, size_t begin, size_t end, const Prefetch& prefetch, const Visit& visit);
  template <typename Prefetch, typename Visit>
  void for_each_unlocked(const uint64_t* keys, size_t begin, size_t end, const Prefetch& prefetch, const Visit& visit);
  template <typename F>
  void for_lookup_tasks(size_t n, const F& f);
  Sources read_part(Scratch& s, const uint64_t* keys, size_t n, uint8_t* rows, uint32_t* slots);
  size_t copy_resident(const Scratch::ReadStatus& lookups, const uint64_t* keys, size_t n, uint8_t* rows,
                       uint32_t* slots);
  bool copy_when_loaded(Scratch& s, uint32_t slot, uint8_t* row);
  size_t read_from_store(const Scratch::StoreReads& reads, size_t n, uint8_t* rows);
  template <typename F>
  void for_resident(const uint64_t* keys, size_t n, const F& f);
  bool replace_resident(const uint64_t* keys, size_t n, const uint8_t* rows, bool dirty);
  bool replace_known(const uint64_t* keys, size_t n, const uint8_t* rows, bool dirty, KnownSlots known);
  uint32_t known_slot(uint64_t key, uint32_t slot, bool valid);
  void set_dirty_rows(const uint32_t* slots, size_t n);
  static uint64_t next_slots_version();

  // Free slots and eviction (writeback.cc).
  size_t pop_free(uint32_t* slots, size_t n);
  void push_free(const uint32_t* slots, size_t n);
  void reserve_slots(Scratch& s, uint32_t* slots, size_t n, size_t needed);
  // Returns the number of rows chosen, including rows that a concurrent pull keeps.
  size_t evict(Scratch& s, size_t n);
  size_t choose_victims(const Scratch::Writeback& w, size_t n, size_t* dirty);
  size_t choose_victims_of(Shard& shard, size_t n, const Scratch::Writeback& w, size_t* dirty, uint32_t* wait_for);
  void finish_eviction(const Scratch::Writeback& w, size_t dirty, bool written);

  // Writes ahead of evictions (write_ahead.cc).
  struct Staging {
    uint64_t* keys;
    uint32_t* slots;
    uint8_t* rows;
  };
  Staging staging() const {
    auto* keys = staging_.as<uint64_t>();
    auto* slots = reinterpret_cast<uint32_t*>(keys + plan_.staged_rows);
    return {keys, slots, reinterpret_cast<uint8_t*>(slots + plan_.staged_rows)};
  }
  bool stage_dirty(Shard& shard, size_t share, size_t* staged, bool* enough);
  void put_staged(size_t n);
  void end_writing(size_t n, bool written);
  void wait_until_written(uint32_t slot);
  void keep_reserve(size_t taken);
  void continue_reserve();

  // Per word of dirty_words(): the bits of the rows in `range`; with those of written_words(). The caller excludes
  // evictions, or accepts slots that have another row then.
  std::vector<uint64_t> dirty_words_of(KeyRange range, bool with_written = false);
  void set_written(uint32_t slot);
  void clear_written(uint32_t slot);
  std::atomic<uint64_t>* written_words() const { return written_.as<std::atomic<uint64_t>>(); }
  bool is_dirty(uint32_t slot) const;
  bool clear_dirty(uint32_t slot);
  void set_dirty(uint32_t slot);
  std::atomic<uint64_t>* dirty_words() const { return dirty_.as<std::atomic<uint64_t>>(); }

  // Constant after construction.
  const TierOptions options_;
  const size_t row_bytes_;
  const size_t stride_;  // bytes from slot to slot: see row_stride()
  RowStore* const store_;
  const InitialRows initial_;
  Codec codec_;  // except its scale: see set_scale()
  const Plan plan_;
  HugeBuffer slab_, meta_, index_;
  HugeBuffer dirty_;     // one bit per slot in atomic words: any thread may set a bit
  HugeBuffer written_;   // one bit per slot: set before its dirty bit is cleared, until the store has the row
  HugeBuffer prefixes_;  // one byte per slot: see Shard::init()
  HugeBuffer staging_;   // protected by write_ahead_mutex_
  std::unique_ptr<Shard[]> shards_;
  ThreadPool pool_;
  ScratchPool scratch_;        // for calls that may block on the store
  ScratchPool small_scratch_;  // for unpin(), which must not wait for those calls

  // Lock order: erase_mutex_, write_ahead_mutex_, writeback_mutex_, then one shard's mutex, then free_mutex_. Two shard
  // mutexes are never held at once. The holder of writeback_mutex_ may wait for the end of a write ahead, which does
  // not take it.
  FairMutex erase_mutex_;          // held by erase(); shared while rows are copied without their shard's mutex
  std::mutex write_ahead_mutex_;   // held during a pass of write_ahead() and by flush()
  std::mutex writeback_mutex_;     // held while rows are written to the store: evict(), flush()
  uint32_t next_shard_ = 0;        // protected by writeback_mutex_: first shard to give one victim more than the others
  mutable std::mutex free_mutex_;  // protects the next three members
  uint32_t free_head_ = kNoSlot;   // list through SlotMeta::next
  uint32_t free_listed_ = 0;
  uint32_t never_used_ = 0;  // slots from here on were never used
  std::mutex wait_mutex_;    // for ready_: rows that another thread loads or evicts
  std::condition_variable ready_;

  std::atomic<uint64_t> hits_{0}, misses_{0}, loaded_ahead_{0}, read_ahead_{0}, from_store_{0}, initialised_{0},
      pushed_{0}, reads_{0}, read_hits_{0}, read_from_store_{0}, evictions_{0}, flushed_{0}, puts_{0},
      written_ahead_{0}, puts_in_pulls_{0};
  std::atomic<uint64_t> slots_version_;
  std::atomic<size_t> reserve_;                 // rows to be evicted next that are kept clean
  std::atomic<size_t> recent_taken_{0};         // slots of the largest recent pull
  std::atomic<size_t> taken_since_pass_{0};     // slots
  std::atomic<bool> continue_at_unpin_{false};  // the last pass found too few unpinned rows
  BackgroundTask background_;                   // last: its thread uses all members above
};

}  // namespace thermocline
