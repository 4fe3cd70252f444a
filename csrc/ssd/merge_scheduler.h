// Decides when the background thread merges, and how fast. Merger (merger.h) does the merging.
//
// Every flush of the log grants credit: bytes that the background thread may write. With demand kPaced it merges only
// while it has credit, so merging is spread evenly over the batches. With demand kUrgent, or while a foreground caller
// waits for the merge mutex, it merges without credit.
//
// States of the background thread. It holds Merger's merge mutex in MERGING and PAUSED.
//
//   WAITING   wait_for_work() blocks
//   MERGING   between wait_for_work() and finish_round()
//   PAUSED    inside spend(), in the middle of a merge
//   FAILED    as WAITING, with error_ set
//   STOPPED   wait_for_work() returned nullopt
//
// Transitions and the thread that triggers them (W: a writer, that is the holder of the store's write lock;
// B: the background thread; F: any other caller):
//
//   WAITING -> MERGING   B  foreground_ == 0 and (demand_ == kUrgent, or demand_ == kPaced and credit_ > 0). The
//                           condition becomes true by on_flush() or request_round() (W), or when a Foreground ends (F).
//   MERGING -> PAUSED    B  spend(): demand_ != kUrgent, foreground_ == 0 and credit_ <= 0
//   PAUSED  -> MERGING   W  on_flush() grants credit; on_flush() or request_round() sets kUrgent
//                        F  a Foreground begins: its owner needs the merge mutex
//   MERGING -> WAITING   B  finish_round() without an error
//   MERGING -> FAILED    B  finish_round() with an error
//   FAILED  -> WAITING   W  on_flush(): the next flush retries
//   any     -> STOPPED   F  stop(); a merge in progress is abandoned at its next spend()
//
// Invariants:
//  1. The demand that a round computed replaces demand_ only if no writer set it during the round. A round that found
//     nothing to merge, failed or was stopped resets demand_; the next flush sets it again.
//  2. rounds_ increases by one per finish_round(); request_round() returns after an increase, or after stop().
//  3. Writes under demand kUrgent or for a foreground caller leave no negative credit.
//
// Thread safety: all methods may run concurrently; wait_for_work() and finish_round() belong to the background thread.
// mutex_ protects all state and is held only inside these methods, never during I/O or with another lock of the store
// taken inside it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>

namespace thermocline::ssd {

class MergeScheduler {
 public:
  enum class Demand {
    kNone,    // the log is short: no merging
    kPaced,   // merge as fast as credit allows
    kUrgent,  // the log is near its limit: merge without credit
  };

  // Background thread: blocks until a merge should run. Returns the ticket for finish_round(); nullopt after stop().
  std::optional<uint64_t> wait_for_work();
  // Background thread: ends a round. `next`: the demand after it; nullopt: there was nothing to merge.
  void finish_round(uint64_t ticket, std::optional<Demand> next, std::exception_ptr error);
  // Charges `bytes` written by a merge. With `may_pause`, blocks in state PAUSED. Returns false after stop().
  bool spend(uint64_t bytes, bool may_pause);

  // Writer: grants credit for a flush, sets the demand and clears a background error.
  void on_flush(int64_t credit, Demand demand);
  uint64_t rounds() const;
  // Writer: sets kUrgent and blocks until the number of rounds differs from `seen`. Rethrows a background error.
  // Returns false if the scheduler was stopped before the call.
  bool request_round(uint64_t seen);

  void stop();

  // While it exists, the background thread starts no merge, and finishes a running one without pause.
  class Foreground {
   public:
    explicit Foreground(MergeScheduler& scheduler) : scheduler_(scheduler) { scheduler_.add_foreground(1); }
    ~Foreground() { scheduler_.add_foreground(-1); }
    Foreground(const Foreground&) = delete;
    Foreground& operator=(const Foreground&) = delete;

   private:
    MergeScheduler& scheduler_;
  };

 private:
  void add_foreground(int change);

  mutable std::mutex mutex_;  // protects all members below
  std::condition_variable wake_, progress_;
  Demand demand_ = Demand::kNone;
  int64_t credit_ = 0;
  int foreground_ = 0;           // Foreground objects
  uint64_t demand_updates_ = 0;  // by writers; tickets compare it
  uint64_t rounds_ = 0;          // finished by the background thread
  std::exception_ptr error_;     // of the last round
  bool stopped_ = false;
};

}  // namespace thermocline::ssd
