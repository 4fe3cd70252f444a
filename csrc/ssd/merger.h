// Merges the log into the base files, one partition per merge, the partition that is furthest behind first.
//
// The length of the log is bounded by a share of the base and by the memory budget (limit()). Background threads merge
// at the pace of MergeScheduler, whose header states their states and transitions. Several partitions are merged at
// once, as many as there are threads, as memory that the log does not want allows (Room), and as long as they rewrite
// at most 1/32 of the base (or min_log_bytes), because old and new files exist together. Each merge reads ahead and
// writes behind on the threads of io_. Without background threads, flushed() merges inline: `merge_threads` partitions
// in turn on the caller's thread, step by step, which is deterministic. put() blocks only when the log is far above its
// limit.
//
// Phases of one merge:
//   1. begin(), under the index lock: Index::begin_merge() picks the partition and freezes its tables.
//   2. Without a lock of the store: MergeJob reads base and extents and writes new base files.
//   3. install(), under the index lock: Index::finish_merge() replaces the partition by the pieces.
// An exception before phase 3 leaves the index unchanged; the files written so far are deleted.
//
// Thread safety: all methods may run concurrently. admit() and flushed() are called by the holder of the store's write
// lock. Lock order: merge_lock_, then the index lock. Every merge holds merge_lock_ shared from begin to end.
// Invariants: 1. No partition is in two merges. 2. No merge runs while a result of pause() exists. 3. A partition with
// a damaged page is set aside; other partitions are still merged. The log that only set-aside partitions need is at
// most set_aside_bound() whenever the writer has copied it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "ssd/catalog.h"
#include "ssd/index.h"
#include "ssd/merge_job.h"
#include "ssd/merge_scheduler.h"
#include "ssd/store.h"
#include "util/fair_mutex.h"
#include "util/pread_queue.h"

namespace thermocline::ssd {

class Merger {
 public:
  Merger(Context& ctx, const StoreOptions& options, Index& index, FairMutex& index_mutex, Catalog& catalog);
  ~Merger();  // stops the threads; merges in progress are abandoned

  // StoreOptions::merge_threads, or its default.
  static int threads_of(const StoreOptions& options);

  // Call before rows are added: blocks while the log is far above its limit. Throws the error of a failed background
  // merge, BudgetError, or the class of the first damage (CorruptionError, IoError) if the log of set-aside
  // partitions is above its bound; the rows are not added then.
  void admit();
  // Call after a flush of `bytes`, with no lock of the index held. Never blocks on background threads. Without them it
  // merges inline and throws the errors of these merges; the rows are in the log then.
  void flushed(uint64_t bytes);
  // Opening: merges until the log is below its limit.
  void settle();
  void merge_all();
  // Blocks until no merge runs; none starts while the result exists.
  std::unique_lock<FairMutex> pause();
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
  // Whether that log has grown enough since the last copy that the writer should copy its newest rows forward. If the
  // last copy left more than the bound, admit() throws instead.
  bool set_aside_log_is_due() const;
  // The caller holds the result of pause(): a partition that is set aside after the copy would count as copied.
  void set_aside_log_copied(uint64_t bytes, uint64_t extents);

  static constexpr uint64_t kLogRowBytes = 9;  // DRAM per log row: slots of 6 bytes in tables at most 7/8 full
  static constexpr uint64_t kLeastLogRows = 1024;
  static constexpr uint64_t kShortOf = 8;  // memory is short if the log could have less than 1/8 of its wanted rows
  static constexpr uint64_t kRewrittenShare = 32;  // merges that run at once rewrite at most 1/32 of the base
  const MergeCounters& counters() const { return counters_; }
  int threads() const { return threads_; }
  uint64_t running() const { return running_; }
  double stall_seconds() const { return stall_seconds_; }
  // Returns the memory of the running merges, or of one merge of all current extents if that is more. The caller holds
  // the index lock.
  uint64_t memory() const;
  // Bytes of the budget that neither the log nor merges need. The caller holds the index lock.
  uint64_t spare() const { return room().spare; }

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
    uint64_t more_merges;         // of it: for merges beside the first one
    uint64_t spare;               // bytes that neither the wanted log nor merges need
    bool is_short() const { return affordable < kLeastLogRows || affordable * 2 / 3 < wanted / kShortOf; }
  };
  enum class Caller { kBackground, kForeground };  // a background thread may pause inside a merge
  enum class Outcome {
    kMerged,       // or set aside
    kNothingLeft,  // nothing to merge, and no merge runs
    kOthersFirst,  // nothing can start beside the running merges
  };
  // A merge between begin() and install() or cancel().
  struct Running {
    Index::Merge merge;
    uint64_t memory = 0, bytes = 0;  // bytes: of the result, an upper bound
    std::unique_ptr<MergeJob> job;   // created by the first step
    uint64_t target = 0;
  };

  Debt debt();
  uint64_t wanted_log_rows(uint64_t base_rows) const;
  Room room(uint64_t more_bytes = 0) const;
  void give_up_filter(const Room& room);
  void require_bounded_set_aside_log() const;
  Outcome begin(Running* running);
  bool step(Running& running, uint64_t bytes, PreadPool* io);  // false: the merge has ended; installed or set aside
  void install(Running& running, std::vector<Partition> pieces);
  void cancel(Running& running);  // after an exception
  void end(Running& running);     // the caller holds the index lock
  Outcome merge_one(Caller caller);
  void in_parallel(const std::function<bool()>& more);
  bool merge_in_turn();  // a group of partitions; false: nothing to merge
  void merge_until_done();
  void set_aside(Running& running, const char* cause);
  void run_background();

  // Constant after construction.
  Context& ctx_;
  const StoreOptions options_;
  const int threads_;
  Index& index_;
  FairMutex& index_mutex_;
  Catalog& catalog_;

  MergeCounters counters_;
  std::atomic<bool> has_damage_{false};
  uint64_t copied_bytes_ = 0, copied_extents_ = 0;  // by the last copy; the store's write lock protects them
  std::atomic<double> stall_seconds_{0};
  FairMutex merge_lock_;
  // Changed with the index lock.
  std::atomic<uint64_t> running_{0};                 // merges
  uint64_t running_memory_ = 0, running_bytes_ = 0;  // their sums
  MergeScheduler scheduler_;
  std::unique_ptr<PreadPool> io_;        // null: no background threads
  std::vector<std::thread> background_;  // last: they use all members above
};

// Warns that filters of `filter_bytes` are not in memory, because the index would need `need` bytes with them.
void warn_filter_given_up(Context& ctx, uint64_t mem_budget, uint64_t rows, uint64_t filter_bytes, uint64_t need);

}  // namespace thermocline::ssd
