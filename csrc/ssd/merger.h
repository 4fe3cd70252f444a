// Merges the log into the base files, one partition at a time, the partition that is furthest behind first.
//
// The length of the log is bounded by a share of the base and by the memory budget (limit()). A background thread
// merges at the pace of MergeScheduler, whose header states the thread's states and transitions. Without a background
// thread, flushed() merges inline. put() blocks only when the log is far above its limit.
//
// Phases of one merge (merge_next):
//   1. Under the index lock: Index::begin_merge() picks the partition and freezes its tables.
//   2. Without a lock of the store: PartitionCursor reads base and extents; PieceWriter writes new base files.
//   3. Under the index lock: Index::finish_merge() replaces the partition by the pieces.
// An exception before phase 3 leaves the index unchanged; the files written so far are deleted.
//
// Thread safety: all methods may run concurrently. admit() and flushed() are called by the holder of the store's write
// lock. Lock order: merge_mutex_, then the index lock. merge_mutex_ is held for one merge, by the background thread or
// by a caller of flushed(), settle() or merge_all().
// Invariants: 1. At most one merge runs. 2. No merge runs while a result of pause() exists. 3. A partition with a
// damaged page is set aside; other partitions are still merged. The log that only set-aside partitions need is at most
// set_aside_bound().
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "ssd/catalog.h"
#include "ssd/index.h"
#include "ssd/merge_scheduler.h"
#include "ssd/store.h"
#include "util/fair_mutex.h"

namespace thermocline::ssd {

struct MergeCounters {
  std::atomic<uint64_t> merges{0}, bytes_read{0}, bytes_written{0};
};

class Merger {
 public:
  Merger(Context& ctx, const StoreOptions& options, Index& index, FairMutex& index_mutex, Catalog& catalog);
  ~Merger();  // stops the thread; a merge in progress is abandoned

  // Call before rows are added: blocks while the log is far above its limit. Throws the error of a failed background
  // merge, BudgetError, or the class of the first damage (CorruptionError, IoError) if the log of set-aside
  // partitions is above its bound; the rows are not added then.
  void admit();
  // Call after a flush of `bytes`, with no lock of the index held. Never blocks on the background thread. Without one
  // it merges inline and throws the errors of that merge; the rows are in the log then.
  void flushed(uint64_t bytes);
  // Opening: merges until the log is below its limit.
  void settle();
  void merge_all();
  // Blocks until no merge runs; none starts while the result exists.
  std::unique_lock<std::mutex> pause();
  void stop();

  // Allowed rows in the log. If memory is short, gives up the filters first. Throws BudgetError if the index alone
  // exceeds the budget, after `more_rows` rows that add `more_bytes` to it. The caller holds no index lock.
  uint64_t limit(uint64_t more_rows = 0, uint64_t more_bytes = 0);
  // Throws BudgetError if the budget cannot hold the index of this number of rows, without a filter.
  void require_expected_rows(uint64_t rows) const;

  // Set-aside partitions.
  bool has_damage() const { return has_damage_; }
  // The log that only set-aside partitions need may have this size: min_log_bytes + 4 times their base files.
  uint64_t set_aside_bound(const Index::SetAside& aside) const;
  // Whether that log has grown enough since the last copy that the writer should copy its newest rows forward.
  bool set_aside_log_is_due() const;
  void set_aside_log_copied(uint64_t bytes, uint64_t extents);

  static constexpr uint64_t kLogRowBytes = 9;  // DRAM per log row: slots of 6 bytes in tables at most 7/8 full
  static constexpr uint64_t kLeastLogRows = 1024;
  static constexpr uint64_t kShortOf = 8;  // memory is short if the log could have less than 1/8 of its wanted rows
  const MergeCounters& counters() const { return counters_; }
  double stall_seconds() const { return stall_seconds_; }
  uint64_t memory() const;  // of a merge of all current extents. The caller holds the index lock

 private:
  // Rows to merge, in relation to the limit.
  struct Debt {
    uint64_t pending, limit;
    bool over_limit() const { return pending > limit; }
    bool urgent() const { return pending > limit + limit / 4; }
    bool must_block() const { return pending > limit + limit / 2; }
    MergeScheduler::Demand demand() const {
      if (urgent()) return MergeScheduler::Demand::kUrgent;
      return pending > limit / 4 ? MergeScheduler::Demand::kPaced : MergeScheduler::Demand::kNone;
    }
  };
  // Memory for the log.
  struct Room {
    uint64_t rows, filter_bytes;  // of the base files
    uint64_t wanted, affordable;  // rows in the log: by max_log_ratio, by mem_budget
    uint64_t need;                // bytes of everything else
    bool is_short() const { return affordable < kLeastLogRows || affordable * 2 / 3 < wanted / kShortOf; }
  };
  enum class Caller { kBackground, kForeground };  // the background thread may pause inside a merge

  Debt debt();
  uint64_t wanted_log_rows(uint64_t base_rows) const;
  Room room(uint64_t more_bytes) const;
  void give_up_filter(const Room& room);
  void require_bounded_set_aside_log() const;
  bool merge_one(Caller caller);  // false: nothing to merge
  bool merge_next(Caller caller);
  std::vector<Partition> write_pieces(const Index::Merge& job, uint64_t rows_per_piece, Caller caller);
  void set_aside(const Index::Merge& job, const char* cause);
  void run_background();

  // Constant after construction.
  Context& ctx_;
  const StoreOptions options_;
  Index& index_;
  FairMutex& index_mutex_;
  Catalog& catalog_;

  MergeCounters counters_;
  std::atomic<bool> has_damage_{false};
  uint64_t copied_bytes_ = 0, copied_extents_ = 0;  // by the last copy; the store's write lock protects them
  std::atomic<double> stall_seconds_{0};
  std::mutex merge_mutex_;
  MergeScheduler scheduler_;
  std::thread thread_;  // last: it uses all members above
};

// Warns that filters of `filter_bytes` are not in memory, because the index would need `need` bytes with them.
void warn_filter_given_up(Context& ctx, uint64_t mem_budget, uint64_t rows, uint64_t filter_bytes, uint64_t need);

}  // namespace thermocline::ssd
