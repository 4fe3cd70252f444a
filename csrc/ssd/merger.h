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
// damaged page is marked and skipped; other partitions are still merged.
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
  // merge, or BudgetError; the rows are not added then.
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

  // Allowed rows in the log. Throws BudgetError if the index alone exceeds the budget, after `more_rows` rows that add
  // `more_bytes` to it.
  uint64_t limit(uint64_t more_rows = 0, uint64_t more_bytes = 0) const;
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
  enum class Caller { kBackground, kForeground };  // the background thread may pause inside a merge

  Debt debt() const;
  bool merge_one(Caller caller);  // false: nothing to merge
  bool merge_next(Caller caller);
  std::vector<Partition> write_pieces(const Index::Merge& job, uint64_t rows_per_piece, Caller caller);
  void mark_damaged(const Index::Merge& job, const char* cause);
  void run_background();

  // Constant after construction.
  Context& ctx_;
  const StoreOptions options_;
  Index& index_;
  FairMutex& index_mutex_;
  Catalog& catalog_;

  MergeCounters counters_;
  std::atomic<double> stall_seconds_{0};
  std::mutex merge_mutex_;
  MergeScheduler scheduler_;
  std::thread thread_;  // last: it uses all members above
};

}  // namespace thermocline::ssd
