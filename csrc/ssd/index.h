// What the store keeps in DRAM: the partitions with their bases' fences, the live extents, and where each newer row is.
//
// Thread safety: none of its own. The store's index lock guards it: const methods shared, the others exclusive.
// Invariants: 1. the partitions cover all hashes, in order, without overlap. 2. An extent is listed while some
// partition has not merged it. 3. Every row of an extent newer than its partition's base has an entry in that
// partition's tables.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "ssd/cursor.h"
#include "ssd/delta_table.h"
#include "ssd/files.h"
#include "ssd/manifest.h"

namespace thermocline::ssd {

struct Partition {
  uint64_t lo = 0, hi = 0;
  std::shared_ptr<const BaseFile> base;             // null: no rows
  uint64_t merged_seq = 0;                          // extents up to this one are in the base
  std::vector<std::shared_ptr<DeltaTable>> tables;  // entries of newer extents
  uint64_t pending = 0;                             // rows in the log not merged yet; never 0 while there are any
  std::string damage;                               // why it cannot be merged; empty: it can
  std::exception_ptr damage_error;                  // the same, as it was thrown
};

struct HashAndPage {
  uint64_t hash;
  uint32_t page;  // of the extent's segment
};

struct LogPage {
  const std::shared_ptr<DataFile>& segment;
  uint64_t page;
};

class Index {
 public:
  explicit Index(const Geometry& g, double log_ratio) : g_(g), log_ratio_(log_ratio) {}

  void clear();
  // Opening: all partitions in order, then all extents in order. With no partitions: one, empty.
  void load_partitions(std::vector<Partition> partitions);
  // Adds an extent that is newer than all others, with its rows in hash order.
  void add_extent(std::shared_ptr<Extent> extent, const std::vector<HashAndPage>& rows);
  // Opening, at last: extents to come begin at this number, even where no older one is left in the log.
  void start_at(uint64_t next_seq) { last_seq_ = next_seq - 1; }

  size_t size() const { return partitions_.size(); }
  const Partition& partition(size_t i) const { return *partitions_[i]; }
  size_t partition_of(uint64_t hash) const;
  // The newest page of the log that may hold the hash's row; with `older`, the newest before *older. False: none.
  static bool candidate(const Partition& p, uint64_t hash, const uint32_t* older, uint32_t* vpage);
  LogPage log_page(uint32_t vpage) const;
  // Row page of the base that would hold the hash, starting the search at `hint`. False: certainly not in the base, by
  // the fences or by the filter.
  static bool base_page(const BaseFile& base, uint64_t hash, uint32_t* page, uint32_t hint);

  PartitionView view(size_t i) const;
  Manifest manifest() const;  // partitions, segments and extents filled in
  std::vector<std::shared_ptr<DataFile>> files() const;

  // Merging: begin() picks the partition that is furthest behind (size(): none has anything) and freezes its tables;
  // finish() replaces it by the pieces written, whose bases cover it in order.
  struct Merge {
    Partition* partition = nullptr;
    PartitionView view;
    uint64_t seq = 0;
    size_t frozen_tables = 0;
    uint64_t frozen_pending = 0;
    uint64_t rows = 0;  // at most, in the result
  };
  bool begin_merge(Merge* merge);
  // Loading: the partition of these hashes, if it has no row and holds them all; finish_merge() replaces it too.
  bool begin_load(uint64_t first, uint64_t last, Merge* merge);
  void finish_merge(const Merge& merge, std::vector<Partition> pieces);

  uint64_t pending() const { return pending_; }  // rows
  uint64_t mergeable() const;                    // those of partitions without damage
  uint64_t base_rows() const { return base_rows_; }
  uint64_t base_bytes() const;
  uint64_t log_bytes() const;
  uint64_t log_rows() const;
  size_t extents() const { return extents_.size(); }
  uint64_t memory() const;
  std::string damage() const;  // of the first partition that has any
  void throw_damage() const;   // likewise; returns if there is none
  const std::deque<std::shared_ptr<Extent>>& live_extents() const { return extents_; }

 private:
  void insert(Partition& p, uint64_t hash, uint32_t vpage, size_t expected);
  void drop_merged_extents();

  const Geometry g_;
  const double log_ratio_;
  std::vector<std::shared_ptr<Partition>> partitions_;
  std::deque<std::shared_ptr<Extent>> extents_;         // by seq
  std::deque<std::shared_ptr<Extent>> segment_starts_;  // first live extent of each segment, oldest first
  uint64_t last_seq_ = 0;
  uint64_t pending_ = 0, base_rows_ = 0;
};

}  // namespace thermocline::ssd
