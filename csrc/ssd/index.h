// The in-memory index of a store: the partitions with the fences of their base files, the live extents, and the log
// page of every row that is newer than its base.
//
// Thread safety: protected by the store's index lock: shared for const methods, exclusive for the others.
// Invariants:
//  1. The partitions cover all hashes, in order, without overlap.
//  2. An extent is listed while some partition has not merged it.
//  3. Every row of an extent newer than its partition's base has an entry in the partition's tables.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ssd/cursor.h"
#include "ssd/delta_table.h"
#include "ssd/files.h"
#include "ssd/manifest.h"
#include "util/thread_pool.h"

namespace thermocline::ssd {

struct Partition {
  uint64_t lo = 0, hi = 0;
  std::shared_ptr<const BaseFile> base;             // null: no rows
  uint64_t merged_seq = 0;                          // extents up to this number are merged into the base
  std::vector<std::shared_ptr<DeltaTable>> tables;  // entries of newer extents
  uint64_t pending = 0;                             // estimate of unmerged rows; 0 only if there are none
  bool merging = false;                             // between begin_merge() and finish_merge() or cancel_merge()
  std::string damage;               // error that prevents merging, with the repair command: the partition is set aside
  bool log_damaged = false;         // set aside, and its rows in the log cannot be copied
  std::exception_ptr damage_error;  // the exception with this message
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
  // Opening: first all partitions in order, then add_extent() for all extents in order. An empty list becomes one empty
  // partition.
  void load_partitions(std::vector<Partition> partitions);
  // Adds an extent that is newer than all others. `rows` are in hash order.
  void add_extent(std::shared_ptr<Extent> extent, const std::vector<HashAndPage>& rows);
  // Opening: the same for several extents, in order. Every thread adds the rows of some partitions.
  void add_extents(std::span<const std::shared_ptr<Extent>> extents, std::span<const std::vector<HashAndPage>> rows,
                   ThreadPool& threads);
  // Opening, last step: sets the number of the next extent, which may be larger than that of the newest live extent
  // + 1.
  void start_at(uint64_t next_seq) { last_seq_ = next_seq - 1; }

  size_t size() const { return partitions_.size(); }
  const Partition& partition(size_t i) const { return *partitions_[i]; }
  size_t partition_of(uint64_t hash) const;
  // Finds the newest log page that may have the row; with `before_page`, the newest before that page. False: none.
  static bool candidate(const Partition& p, uint64_t hash, const uint32_t* before_page, uint32_t* vpage);
  LogPage log_page(uint32_t vpage) const;
  // Finds the row page of the base that may have the row; the search starts at page `hint`. False: fences or filter
  // exclude the row.
  static bool base_page(const BaseFile& base, uint64_t hash, uint32_t* page, uint32_t hint);

  PartitionView view(size_t i) const;
  Manifest manifest() const;  // partitions, segments and extents filled in
  std::vector<std::shared_ptr<DataFile>> files() const;

  // A merge of one partition.
  struct Merge {
    Partition* partition = nullptr;
    PartitionView view;
    uint64_t seq = 0;
    size_t frozen_tables = 0;
    uint64_t frozen_pending = 0;
    uint64_t rows = 0;  // upper bound of the rows of the result
  };
  // Picks the partition whose merged extents are oldest, among those that no other merge has, and freezes its tables.
  // False, without changes: nothing more to merge, or may_begin(merge) is false; then merge->partition is set.
  // Several merges may run at once, each on its own partition.
  bool begin_merge(Merge* merge, const std::function<bool(const Merge&)>& may_begin);
  void cancel_merge(const Merge& merge) { merge.partition->merging = false; }
  // Picks the partition of the hashes [first, last] for a bulk load. False: it has rows, or does not cover all hashes.
  bool begin_load(uint64_t first, uint64_t last, Merge* merge);
  // Replaces the partition by pieces that cover it in order.
  void finish_merge(const Merge& merge, std::vector<Partition> pieces);

  // Copies of the log rows of a set-aside partition: begin_copy() freezes its tables, the caller puts the newest
  // version of each row of copy->view to the log again, finish_copy() drops the frozen tables and the extents that no
  // partition needs any more. False: no set-aside partition has a log that can be copied.
  bool begin_copy(Merge* copy, uint64_t before_seq);
  void finish_copy(const Merge& copy);
  uint64_t copies() const { return copies_; }  // finished; a row may be on a newer page after each
  // The log that only set-aside partitions need, and their base files.
  struct SetAside {
    uint64_t partitions = 0, extents = 0, log_bytes = 0, base_bytes = 0;
  };
  SetAside set_aside() const;
  uint64_t last_seq() const { return last_seq_; }

  // Filters: bytes in memory; drop_filters() frees them and those of all later base files.
  uint64_t filter_bytes() const;
  bool keeps_filters() const { return keeps_filters_; }
  void drop_filters();

  uint64_t mergeable() const;                    // unmerged rows of partitions that are not set aside
  uint64_t pending() const { return pending_; }  // unmerged rows
  uint64_t base_rows() const { return base_rows_; }
  uint64_t base_bytes() const;
  uint64_t log_bytes() const;
  uint64_t log_rows() const;
  size_t extents() const { return extents_.size(); }
  uint64_t memory() const;
  std::string damage() const;  // error of the first damaged partition; empty: none
  void throw_damage() const;   // throws it; returns if there is none
  const std::deque<std::shared_ptr<Extent>>& live_extents() const { return extents_; }

  // Keeps the extents from `seq` on, above 0, also after they are merged, for changes since then; replaces an earlier
  // call. They are given up when they exceed `limit` bytes and the base files: to compare all rows reads less then.
  void keep_log(uint64_t seq, uint64_t limit);
  bool keeps_log() const { return kept_from_ != 0; }
  void forget_log();
  // Extents from `seq` on, those that are kept first. Some may be missing.
  std::vector<std::shared_ptr<const Extent>> extents_from(uint64_t seq) const;

 private:
  void insert(Partition& p, uint64_t hash, uint32_t vpage, size_t expected);
  // Adds the rows of an extent to the tables of their partitions; returns the number of those that are not merged.
  uint64_t insert_rows(const Extent& extent, const HashAndPage* row, const HashAndPage* end);
  void append(std::shared_ptr<Extent> extent);
  void require_newer(const Extent& extent) const;
  void describe(size_t i, Merge* merge) const;
  void freeze(Merge* merge);
  void drop_merged_extents();

  const Geometry g_;
  const double log_ratio_;
  std::vector<std::shared_ptr<Partition>> partitions_;
  std::deque<std::shared_ptr<Extent>> extents_;         // by seq
  std::deque<std::shared_ptr<Extent>> kept_;            // by seq, merged: see keep_log()
  uint64_t kept_from_ = 0;                              // 0: none are kept
  uint64_t kept_bytes_ = 0, kept_limit_ = 0;            // of kept_
  std::deque<std::shared_ptr<Extent>> segment_starts_;  // first live extent of each segment, oldest first
  uint64_t last_seq_ = 0;
  uint64_t pending_ = 0, base_rows_ = 0;
  bool keeps_filters_ = true;
  uint64_t copies_ = 0;
};

}  // namespace thermocline::ssd
