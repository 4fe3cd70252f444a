// Fixed working memory for calls in progress. Its size is part of the tier's byte budget, so it never grows: a call
// waits until a Scratch is idle, and processes a batch larger than `keys_max` in parts.
//
// A step of a call accesses the memory only through one of the views below. A view is a struct of typed pointers; each
// pointer has one meaning. Views of different steps may share memory. The table shows which; a view is valid from the
// moment its owner fills it until any view that shares one of its columns is filled.
//
//   view             column A (u64)  B (u32)  C (u32)    D (u32)     E (u32)        F (u8)      own columns
//   grouping()                       tags                                                       probes, shards
//   missing_rows()                            positions  free_slots
//   row_loads()      keys            slots    positions                             in_store
//   writeback()      keys            slots
//   read_status()                                                    loading_slots  status
//   store_reads()    keys                     positions                             in_store
//   pushed_slots()                                                   slots
//   rollback_slots()                 slots
//
// Order of use within one call:
//   pull, push  [pushed_slots] -> grouping -> missing_rows -> writeback (evictions) -> grouping -> row_loads;
//               after a failure rollback_slots -> grouping, without tags
//   read        read_status -> store_reads
//   flush       writeback
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "dram/shard.h"
#include "util/huge_buffer.h"

namespace thermocline {

class Scratch {
 public:
  // Bytes per key. A small Scratch only has the grouping() view, without tags.
  static constexpr size_t kSmallBytes = sizeof(Probe) + 1;
  static constexpr size_t kBytes = kSmallBytes + sizeof(uint64_t) + 4 * sizeof(uint32_t) + 1;

  // DramTier::group(): the keys of a batch sorted by shard.
  struct Grouping {
    Probe* probes;    // sorted by shard, in batch order within a shard
    uint8_t* shards;  // [i] shard of key i
    uint32_t* tags;   // [i] index tag of key i; consumed before the first shard task runs
  };
  // Keys of the batch that are not resident.
  struct MissingRows {
    uint32_t* positions;   // their positions in the batch
    uint32_t* free_slots;  // [k] slot reserved for positions[k]
  };
  // Rows that this call inserted into the index and must load. `positions` is filled by compacting
  // MissingRows::positions in place: entry j is written after all entries up to j were read.
  struct RowLoads {
    uint64_t* keys;
    uint32_t* slots;
    uint32_t* positions;
    uint8_t* in_store;  // result of RowStore::get
  };
  // Dirty rows on their way to the store.
  struct Writeback {
    uint64_t* keys;
    uint32_t* slots;
  };
  enum class ReadState : uint8_t { kMissing, kCopied, kLoading };
  // DramTier::read(), first pass: the result of the index lookup per key.
  struct ReadStatus {
    ReadState* status;
    uint32_t* loading_slots;  // [i] slot pinned by this call, if status[i] is kLoading
  };
  // DramTier::read(), second pass: keys to read from the store. Filled while ReadStatus::status is still read, except
  // for `in_store`, which is written after the last use of `status`.
  struct StoreReads {
    uint64_t* keys;
    uint32_t* positions;
    uint8_t* in_store;  // result of RowStore::get
  };

  Scratch(size_t keys_max, bool small) : keys_max_(keys_max), memory_(keys_max * (small ? kSmallBytes : kBytes)) {
    auto* next = memory_.as<uint8_t>();
    const auto take = [&](size_t width) { return std::exchange(next, next + keys_max * width); };
    probes_ = reinterpret_cast<Probe*>(take(sizeof(Probe)));
    if (!small) {
      a_ = reinterpret_cast<uint64_t*>(take(8));
      b_ = reinterpret_cast<uint32_t*>(take(4));
      c_ = reinterpret_cast<uint32_t*>(take(4));
      d_ = reinterpret_cast<uint32_t*>(take(4));
      e_ = reinterpret_cast<uint32_t*>(take(4));
      f_ = take(1);
    }
    shards_ = take(1);
  }

  size_t keys_max() const { return keys_max_; }  // elements of each array

  Grouping grouping() const { return {probes_, shards_, b_}; }
  MissingRows missing_rows() const { return {c_, d_}; }
  RowLoads row_loads() const { return {a_, b_, c_, f_}; }
  Writeback writeback() const { return {a_, b_}; }
  ReadStatus read_status() const { return {reinterpret_cast<ReadState*>(f_), e_}; }
  StoreReads store_reads() const { return {a_, c_, f_}; }
  uint32_t* pushed_slots() const { return e_; }    // DramTier::push(): the pinned slot of each key
  uint32_t* rollback_slots() const { return b_; }  // DramTier::roll_back(): slots to unpin

 private:
  size_t keys_max_;
  HugeBuffer memory_;
  Probe* probes_ = nullptr;
  uint8_t* shards_ = nullptr;
  // Columns A to F of the table above; null in a small Scratch.
  uint64_t* a_ = nullptr;
  uint32_t *b_ = nullptr, *c_ = nullptr, *d_ = nullptr, *e_ = nullptr;
  uint8_t* f_ = nullptr;
};

// Thread safety: all calls may run concurrently. A leased Scratch is used by the leasing call only.
class ScratchPool {
 public:
  ScratchPool(size_t count, size_t keys_max, bool small) {
    keys_max = (keys_max + 63) / 64 * 64;
    all_.reserve(count);  // idle_ points into it
    for (size_t i = 0; i < count; ++i) {
      all_.emplace_back(keys_max, small);
      idle_.push_back(&all_.back());
    }
  }

  // Blocks until a Scratch is idle.
  class Lease {
   public:
    explicit Lease(ScratchPool& pool) : pool_(pool) {
      std::unique_lock lock(pool_.mutex_);
      pool_.returned_.wait(lock, [&] { return !pool_.idle_.empty(); });
      scratch_ = pool_.idle_.back();
      pool_.idle_.pop_back();
    }
    ~Lease() {
      {
        std::lock_guard lock(pool_.mutex_);
        pool_.idle_.push_back(scratch_);
      }
      pool_.returned_.notify_one();
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Scratch& operator*() const { return *scratch_; }
    Scratch* operator->() const { return scratch_; }

   private:
    ScratchPool& pool_;
    Scratch* scratch_;
  };

 private:
  std::vector<Scratch> all_;  // constant after construction
  std::mutex mutex_;          // protects idle_
  std::condition_variable returned_;
  std::vector<Scratch*> idle_;
};

}  // namespace thermocline
