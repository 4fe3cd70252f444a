#include "ssd/merge_scheduler.h"

#include <algorithm>

namespace thermocline::ssd {

std::optional<uint64_t> MergeScheduler::wait_for_work() {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [&] {
    const bool paced = demand_ == Demand::kPaced && credit_ > 0 && running_ < (threads_ + 1) / 2;
    return stopped_ || ((demand_ == Demand::kUrgent || paced) && !error_ && !saturated_ && foreground_ == 0);
  });
  if (stopped_) return std::nullopt;
  ++running_;
  return demand_updates_;
}

void MergeScheduler::finish_round(uint64_t ticket, std::optional<Demand> next, std::exception_ptr error) {
  {
    std::lock_guard lock(mutex_);
    if (error && (!error_ || ticket >= error_ticket_)) {
      error_ = std::move(error);
      error_ticket_ = ticket;
    }
    if (!next || demand_updates_ == ticket) demand_ = next.value_or(Demand::kNone);
    ++rounds_;
    --running_;
    saturated_ = false;
  }
  progress_.notify_all();
  wake_.notify_all();
}

void MergeScheduler::stand_by() {
  {
    std::lock_guard lock(mutex_);
    // The running merges may all have ended since this thread found that it has to wait for them.
    saturated_ = --running_ > 0;
  }
  wake_.notify_all();
}

bool MergeScheduler::spend(uint64_t bytes, bool may_pause) {
  std::unique_lock lock(mutex_);
  credit_ -= static_cast<int64_t>(bytes);
  // Negative credit would delay the paced merging that follows.
  if (demand_ == Demand::kUrgent || foreground_ > 0 || !may_pause) credit_ = std::max<int64_t>(credit_, 0);
  if (!may_pause) return true;
  wake_.wait(lock, [&] { return stopped_ || demand_ == Demand::kUrgent || foreground_ > 0 || credit_ > 0; });
  return !stopped_;
}

void MergeScheduler::on_flush(int64_t credit, Demand demand) {
  std::lock_guard lock(mutex_);
  // At most two grants are saved up, so that a pause in flushes is not followed by a burst of merging.
  credit_ = std::min(credit_ + credit, std::max(credit_, 2 * credit));
  demand_ = demand;
  error_ = nullptr;
  saturated_ = false;
  ++demand_updates_;
  wake_.notify_all();
}

uint64_t MergeScheduler::rounds() const {
  std::lock_guard lock(mutex_);
  return rounds_;
}

bool MergeScheduler::request_round(uint64_t seen) {
  std::unique_lock lock(mutex_);
  if (stopped_) return false;
  error_ = nullptr;  // space may have been freed since
  demand_ = Demand::kUrgent;
  const uint64_t request = ++demand_updates_;
  wake_.notify_all();
  progress_.wait(lock, [&] { return rounds_ != seen || stopped_; });
  if (error_ && error_ticket_ >= request) std::rethrow_exception(error_);
  return true;
}

void MergeScheduler::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  progress_.notify_all();
}

void MergeScheduler::add_foreground(int change) {
  {
    std::lock_guard lock(mutex_);
    foreground_ += change;
  }
  wake_.notify_all();
}

}  // namespace thermocline::ssd
