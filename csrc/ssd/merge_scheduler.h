// Decides when the background threads merge, and how fast. Merger (merger.h) does the merging.
//
// Every flush of the log grants credit: bytes that the threads may write together. With demand kPaced they merge only
// while there is credit, so merging is spread evenly over the batches, and at most half of them run at once. With
// demand kUrgent, or while a foreground caller waits for the running merges, they merge without credit.
//
// States of one background thread. It holds Merger's merge lock, shared, in MERGING and PAUSED.
//
//   WAITING   wait_for_work() blocks
//   MERGING   between wait_for_work() and finish_round() or stand_by()
//   PAUSED    inside spend(), in the middle of a merge
//   STOPPED   wait_for_work() returned nullopt
//
// Transitions and the thread that triggers them (W: a writer, that is the holder of the store's write lock;
// B: a background thread; F: any other caller):
//
//   WAITING -> MERGING   B  foreground_ == 0, no error_, not saturated_, and (demand_ == kUrgent, or demand_ == kPaced,
//                           credit_ > 0 and less than half of the threads are merging). The condition becomes true by
//                           on_flush() or request_round() (W), by finish_round() of another thread (B), or when a
//                           Foreground ends (F).
//   MERGING -> PAUSED    B  spend(): demand_ != kUrgent, foreground_ == 0 and credit_ <= 0
//   PAUSED  -> MERGING   W  on_flush() grants credit; on_flush() or request_round() sets kUrgent
//                        F  a Foreground begins: its owner waits for the running merges
//   MERGING -> WAITING   B  finish_round(); or stand_by(): no merge can start beside the running ones. That sets
//                           saturated_ until a running one ends, or until the next flush.
//   any     -> STOPPED   F  stop(); merges in progress are abandoned at their next spend()
//
// Invariants:
//  1. The demand that a round computed replaces demand_ only if no writer set it during the round. A round that found
//     nothing to merge, failed or was stopped resets demand_; the next flush sets it again.
//  2. rounds_ increases by one per finish_round(); request_round() returns after an increase, or after stop().
//     stand_by() does not increase it: a writer that waits for progress is not woken without any.
//  3. Writes under demand kUrgent or for a foreground caller leave no negative credit.
//  4. After a failed round no merge starts until a writer clears error_, by on_flush() or request_round(); those that
//     run go on. request_round() throws only the error of a round that began after the request: an earlier round may
//     have failed for a cause that is removed since, such as a full disk. The writer then asks for another round.
//
// Thread safety: all methods may run concurrently; wait_for_work(), finish_round() and stand_by() belong to background
// threads. mutex_ protects all state and is held only inside these methods, never during I/O or with another lock of
// the store taken inside it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>

namespace thermocline::ssd {

class MergeScheduler {
 public:
  explicit MergeScheduler(int threads) : threads_(threads) {}

  enum class Demand {
    kNone,    // the log is short: no merging
    kPaced,   // merge as fast as credit allows
    kUrgent,  // the log is near its limit: merge without credit
  };

  // Background thread: blocks until a merge should run. Returns the ticket for finish_round(); nullopt after stop().
  std::optional<uint64_t> wait_for_work();
  // Background thread: ends a round. `next`: the demand after it; nullopt: there was nothing to merge.
  void finish_round(uint64_t ticket, std::optional<Demand> next, std::exception_ptr error);
  // Background thread: ends a round in which no merge could start beside those of other threads.
  void stand_by();
  // Charges `bytes` written by a merge. With `may_pause`, blocks in state PAUSED. Returns false after stop().
  bool spend(uint64_t bytes, bool may_pause);

  // Writer: grants credit for a flush, sets the demand and clears a background error.
  void on_flush(int64_t credit, Demand demand);
  uint64_t rounds() const;
  // Writer: clears an earlier error, sets kUrgent and blocks until the number of rounds differs from `seen`. Throws the
  // error of a round that began and failed meanwhile. Returns false if the scheduler was stopped before the call.
  bool request_round(uint64_t seen);

  void stop();

  // While it exists, the background threads start no merge, and finish running ones without pause.
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

  const int threads_;
  mutable std::mutex mutex_;  // protects all members below
  std::condition_variable wake_, progress_;
  Demand demand_ = Demand::kNone;
  int64_t credit_ = 0;
  int running_ = 0;              // threads in MERGING or PAUSED
  bool saturated_ = false;       // no merge can start beside the running ones
  int foreground_ = 0;           // Foreground objects
  uint64_t demand_updates_ = 0;  // by writers; tickets compare it
  uint64_t rounds_ = 0;          // finished by background threads
  std::exception_ptr error_;     // of the failed round that began last
  uint64_t error_ticket_ = 0;    // its ticket
  bool stopped_ = false;
};

}  // namespace thermocline::ssd
