// Merges the log into the bases, one partition at a time, the one furthest behind first.
//
// How much log there may be follows from the base and from the memory budget (limit()). In the background, each flush
// of the log grants credit for as many merged bytes as bring every partition's turn round in time, from the first flush
// on: so merging is spread evenly over the batches, and over the partitions. Only far above the limit does put() wait.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "ssd/catalog.h"
#include "ssd/index.h"
#include "ssd/store.h"
#include "util/fair_mutex.h"

namespace thermocline::ssd {

struct MergeCounters {
  std::atomic<uint64_t> merges{0}, bytes_read{0}, bytes_written{0};
};

class Merger {
 public:
  Merger(Context& ctx, const StoreOptions& options, Index& index, FairMutex& index_mutex, Catalog& catalog);
  ~Merger();  // stops; a merge under way is dropped

  // Before rows are taken: waits while the log is far above its limit. Throws what keeps merging from going on, or
  // BudgetError; the rows are not in then.
  void admit();
  // After a flush of `bytes`, with no lock held: grants credit and never waits. Without a background thread it merges,
  // and throws what that throws; the rows are in then.
  void flushed(uint64_t bytes);
  // Opening: merges what the budget has no room for.
  void settle();
  void merge_all();
  // No merge runs while the result lives.
  std::unique_lock<std::mutex> pause();
  void stop();

  // Rows of log; throws BudgetError if the index alone is over the budget, with rows and their bytes of it still to
  // come.
  uint64_t limit(uint64_t more_rows = 0, uint64_t more_bytes = 0) const;
  const MergeCounters& counters() const { return counters_; }
  double stall_seconds() const { return stall_seconds_; }
  uint64_t memory() const;  // of a merge, as many extents as there are now. The caller holds the index lock

 private:
  struct Debt {
    uint64_t pending, limit;
    bool some() const { return pending > limit / 4; }  // enough to keep merging in step with the log
    bool due() const { return pending > limit; }
    bool urgent() const { return pending > limit + limit / 4; }
    bool hard() const { return pending > limit + limit / 2; }
  };
  Debt debt() const;
  class Rush;             // while it lives, background merges wait for no credit
  bool merge_one();       // false: nothing to merge
  bool merge_furthest();  // the merge itself
  void set_aside(const Index::Merge& job, const char* why);
  void pace(uint64_t bytes);
  void loop();

  Context& ctx_;
  const StoreOptions options_;
  Index& index_;
  FairMutex& index_mutex_;
  Catalog& catalog_;
  MergeCounters counters_;
  std::atomic<double> stall_seconds_{0};

  std::mutex merge_mutex_;  // held for one merge
  std::mutex mutex_;        // protects what follows
  std::condition_variable wake_, progress_;
  int64_t credit_ = 0;
  int rushed_ = 0;  // callers that want the merge lock
  bool stop_ = false, hurry_ = false, work_ = false;
  uint64_t requests_ = 0, rounds_ = 0;  // flushes; merges tried in the background
  std::exception_ptr error_;            // of the last background merge; cleared by the next flush
  std::thread thread_;
};

}  // namespace thermocline::ssd
