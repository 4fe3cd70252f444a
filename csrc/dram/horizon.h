// The look-ahead of a DRAM tier: a window of coming batches, whose rows are loaded in hash order and pinned until the
// last batch that uses them has been released.
//
// A batch alone has few keys per page of the store. The new keys of hundreds of batches, taken in hash order, make
// dense reads. The horizon is a hash table of all keys of the window, divided by the top bits of the hash:
//
//   add        numbers the keys of a batch, and deduplicates it: the ids are hashed once, for the look-ahead and for
//              training. Keeps 18 bits per id and 12 to 18 per unique key of a batch of 100,000 ids
//   load       the sweep: visits the partitions in a cycle. A visit loads and pins the keys added since the last one,
//              so a batch is loaded one cycle after it was added. Several parts of a sweep may be loaded at once, so
//              that the store reads while other parts are gathered, pinned and published
//   take       the slots of a batch's rows, without a lookup
//   release    ends a batch. Rows that no batch of the window uses are unpinned
//
// A horizon is a hint: a row that it has not loaded is read by the pull of the batch that needs it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "dram/horizon_partition.h"
#include "dram/tier.h"
#include "util/packed_array.h"

namespace thermocline {

class Horizon;

// A batch of a horizon. Thread safety: as Horizon. The horizon must outlive it.
class HorizonBatch {
 public:
  ~HorizonBatch() { release(); }
  HorizonBatch(const HorizonBatch&) = delete;

  size_t ids() const { return ids_; }
  size_t unique() const { return unique_; }
  size_t bytes() const {
    return order_.bytes() + indices_.bytes() + first_key_.size() * sizeof(uint32_t) + sizeof(*this);
  }
  // Whether the sweep has visited all keys since the batch was added.
  bool loaded() const;
  // The part of a cycle that the sweep has to visit until loaded().
  double to_visit() const;

  // The working set (dedup.h), and the ids. The order of the keys depends on the ids only. Each pointer may be null.
  struct Expanded {
    uint64_t* keys = nullptr;     // [unique()]
    uint32_t* inverse = nullptr;  // [ids()]
    uint32_t* starts = nullptr;   // [unique() + 1]
    uint32_t* order = nullptr;    // [ids()]
    uint64_t* ids = nullptr;      // [ids()]
  };
  // Not after release().
  void expand(const Expanded& out) const;
  // slots[u]: the slot of key u, or kNoSlot. Returns the number of rows that are not loaded. The horizon keeps the
  // others pinned until release(), also if it is dropped. Not after release().
  size_t take(uint32_t* slots);
  // Undoes take(): drop() unpins the rows again.
  void untake();
  uint64_t key(size_t u) const;  // not after release()
  void release();

 private:
  friend class Horizon;
  static constexpr size_t kRanges = 16;  // of the partitions, for parallel loops
  class Walk;
  HorizonBatch(Horizon& horizon, size_t ids);

  Horizon& horizon_;
  const size_t ids_;
  size_t unique_ = 0;
  PackedArray order_;    // [ids_] positions grouped by key, times two; bit 0 marks the first of each key
  PackedArray indices_;  // [unique_] of the keys in their partitions, in the order of partitions
  std::array<uint32_t, kRanges + 1> first_id_{};  // of each range, in order_
  std::vector<uint32_t> first_key_;               // of each partition, in indices_, and their end
  uint64_t loaded_at_ = 0;                        // value of Horizon::position_
  std::atomic<bool> released_{false};
};

// Keys of the next partitions of a sweep, to be loaded together. Destroyed without Horizon::load_part(), its keys are
// visited again. The horizon must outlive it. Thread safety: used by one thread at a time.
class HorizonPart {
 public:
  ~HorizonPart();
  HorizonPart(const HorizonPart&) = delete;
  const std::vector<uint64_t>& keys() const { return keys_; }

 private:
  friend class Horizon;
  explicit HorizonPart(Horizon& horizon) : horizon_(horizon) {}

  Horizon& horizon_;
  uint64_t begin_ = 0;             // value of Horizon::gathered_ before the part
  std::vector<uint32_t> numbers_;  // of the keys; empty: the part is over
  std::vector<uint64_t> keys_;     // in the order of partitions
};

// Thread safety: one thread adds; all other calls may run concurrently with it and each other.
// Invariants: 1. A key of the window holds at most one pin. 2. After drop() and the end of all loads, only keys of
// batches that were taken and not released hold pins; after destruction none. 3. position_ <= the begin of every part
// that is not over.
class Horizon {
 public:
  static constexpr uint32_t kMaxPartitions = 256;
  static constexpr size_t kScratchBytes = 33;  // per id of the largest batch: working memory of add()
  static constexpr size_t kPartBytes = 37;     // per key of a part: HorizonPart, and working memory of load_part()

  // `tier` must outlive the horizon. `training`: the batches will pull their rows; else they will read() them.
  explicit Horizon(DramTier& tier, bool training = true);
  ~Horizon();
  Horizon(const Horizon&) = delete;

  std::unique_ptr<HorizonBatch> add(const uint64_t* ids, size_t n);

  // The next part of the sweep: up to `max` keys to load, of the next `partitions` partitions, in their order. Empty:
  // there were none in these partitions.
  std::unique_ptr<HorizonPart> next_part(size_t max, uint32_t partitions = kMaxPartitions);
  // Loads and pins the rows of a part, except those with skip[i] != 0. Throws BudgetError, and changes nothing, if the
  // tier cannot hold them beside the rows pinned already: the keys are visited again. After another error the rows of
  // the part are left to the batches that need them.
  void load_part(HorizonPart& part, const uint8_t* skip = nullptr);
  // next_part() and load_part(). Returns whether the part had keys.
  bool load(size_t max);
  // Unpins all rows that no taken batch uses, and loads no more.
  void drop();

  uint32_t partitions() const { return count_; }
  size_t unique() const;
  size_t absent() const { return absent_; }        // of unique(): visited keys whose rows the tier need not hold
  size_t pinned() const { return pinned_; }        // rows
  size_t late() const { return late_; }            // rows that were not loaded when their batch was taken
  uint64_t position() const { return position_; }  // partitions loaded by the sweep so far
  uint64_t gathered() const { return gathered_; }  // the same, with those of the parts in progress
  size_t bytes() const;                            // of this object and its batches, without the rows in the tier

 private:
  friend class HorizonBatch;
  friend class HorizonPart;
  struct Scratch;
  struct Unpins {
    std::vector<uint32_t> slots;
    std::vector<uint64_t> keys;
    std::vector<uint8_t> batches;  // that used the row: the tier keeps rows with many
    void add(const HorizonEntry& e, uint32_t slot);
    void add(const Unpins& others);
  };

  void scatter(const uint64_t* ids, size_t n, Scratch& s);
  void number(uint32_t p, Scratch& s);
  void pack(Scratch& s, HorizonBatch& batch);
  PackedArray packed(const uint32_t* numbers, size_t n, uint32_t most);
  void publish(HorizonPart& part, const std::vector<uint32_t>& slots);
  void put_back(HorizonPart& part);
  void end_part(HorizonPart& part);
  void advance();
  void release(HorizonBatch& batch);
  void release_range(const HorizonBatch& batch, size_t range, Unpins* unpins);
  void unpin(const Unpins& unpins);
  void unpin_rows(const Unpins& unpins);  // of rows that pinned_ does not count

  DramTier& tier_;
  const DramTier::Purpose purpose_;
  const uint32_t count_;  // of partitions: a power of two, and a multiple of HorizonBatch::kRanges
  const int shift_;       // of a hash: its partition
  std::unique_ptr<HorizonPartition[]> partitions_;
  std::unique_ptr<Scratch> scratch_;  // of the adding thread
  std::atomic<size_t> marks_bytes_{0};

  // The sweep. Written under sweep_mutex_, which is locked before the mutex of a partition.
  std::mutex sweep_mutex_;
  std::atomic<uint64_t> position_{0};  // partitions loaded so far
  std::atomic<uint64_t> gathered_{0};  // number gathered_ % count_ is the next one to visit
  std::vector<uint64_t> begins_;       // of the parts in progress

  std::atomic<bool> dropped_{false};
  std::atomic<size_t> pinned_{0}, absent_{0}, late_{0}, batch_bytes_{0};
  std::mutex taken_mutex_;  // held by take() and drop(); protects taken_
  std::set<const HorizonBatch*> taken_;
};

}  // namespace thermocline
