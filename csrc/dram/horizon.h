// The rows of the batches of a look-ahead: loaded together, in hash order, and pinned until their last use.
//
// A batch alone has few keys per page of the store. The unique keys of hundreds of batches, taken in hash order, make
// dense reads. Three phases:
//
//   add      collects the unique keys of the batches, and the last batch that uses each key. Gives every id the number
//            of its key, so that the caller can keep 4 bytes per id and get the ids back with keys_of()
//   load     pulls the keys into the DRAM tier, part by part in hash order, and pins them
//   release  unpins the rows whose last use was in a given batch
//
// A horizon is a hint: a row that it has not loaded is read by the pull of the batch that needs it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "dram/tier.h"

namespace thermocline {

// Thread safety: one thread adds, then one thread loads. release(), drop() and the counters may run concurrently with
// load(); keys_of() may run concurrently with everything after seal().
// Invariants: 1. A key of the horizon holds at most one pin. 2. After drop() or destruction it holds none.
class Horizon {
 public:
  static constexpr uint32_t kPartitions = 256;             // by the top bits of the hash: the order of the store
  static constexpr uint32_t kMaxPartitionKeys = 1u << 24;  // a key's number: partition << 24 | index in the partition

  // `tier` must outlive the horizon. `training`: the batches will pull their rows; else they will read() them.
  explicit Horizon(DramTier& tier, bool training = true)
      : tier_(tier), purpose_(training ? DramTier::Purpose::kAheadOfPull : DramTier::Purpose::kAheadOfRead) {}
  ~Horizon() { drop(); }
  Horizon(const Horizon&) = delete;

  // Adds ids of the current batch. numbers[i]: the number of ids[i]. Throws Error after seal().
  void add(const uint64_t* ids, size_t n, uint32_t* numbers);
  void end_batch();
  // Ends the first phase: frees the hash tables and groups the keys by their last batch.
  void seal();

  // Pulls up to `max` further keys. Returns whether keys are left. Throws BudgetError, and pins none of the part, if
  // the tier cannot hold it beside the rows pinned already: call again after rows were released.
  bool load(size_t max);
  // Unpins the rows whose last use is in batch `batch` or before. Ends the second phase: load() loads nothing more.
  void release(size_t batch);
  // Unpins all rows and ends the second phase.
  void drop();
  // out[i]: the key with number numbers[i].
  void keys_of(const uint32_t* numbers, size_t n, uint64_t* out) const;
  // Hints for the ranks that own the keys (distributed/key_sharding.py). keys[unique()]: all keys, grouped by owner
  // and, for each owner, by last batch. counts[world * batches()]: the size of each group.
  void keys_by_owner(uint32_t world, uint64_t* keys, uint32_t* counts) const;

  size_t unique() const;
  size_t batches() const { return batches_; }
  size_t pinned() const;  // rows
  size_t bytes() const;   // of this object, without the rows in the tier

 private:
  // Unique keys of one range of hashes, in order of first occurrence.
  struct Partition {
    std::vector<uint64_t> keys;
    std::vector<uint32_t> last;   // per key: its last batch
    std::vector<uint32_t> table;  // open addressing: index + 1 of a key; 0: empty. Size: a power of two
    uint32_t insert(uint64_t key, uint64_t hash, uint32_t batch);
    void grow();
  };
  struct Entry {
    uint64_t hash;
    uint32_t position;
  };
  void release_group(size_t batch);

  DramTier& tier_;
  const DramTier::Purpose purpose_;
  std::array<Partition, kPartitions> partitions_;
  size_t batches_ = 0;
  bool open_ = false;  // ids were added since end_batch()
  bool sealed_ = false;

  // Set by seal(), constant after it.
  std::vector<uint64_t> keys_;                     // in order of partitions
  std::array<uint32_t, kPartitions + 1> first_{};  // of the keys of a partition in keys_
  std::vector<uint32_t> by_last_use_;              // indices of keys_, grouped by last batch
  std::vector<uint32_t> groups_;                   // [batches + 1] start of each batch's group
  std::vector<uint32_t> slots_;                    // [loaded_] slot of each key

  mutable std::mutex mutex_;  // protects the members below
  size_t loaded_ = 0;         // keys_[0 .. loaded_) have been pulled
  size_t released_ = 0;       // batches whose group was released
  size_t pinned_ = 0;
  bool loading_ = true;
};

}  // namespace thermocline
