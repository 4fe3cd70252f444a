#include "util/pread_queue.h"

#include <system_error>

#include "util/error.h"

namespace thermocline {

PreadPool::PreadPool(int threads) {
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
  }
}

PreadPool::~PreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void PreadPool::run(std::function<void()> job) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
}

void PreadPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

PreadQueue::~PreadQueue() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return done_.size() == in_flight_; });
}

void PreadQueue::submit(const ReadOp& op, uint64_t tag) {
  if (in_flight_ >= depth_) throw Error("read queue is full: call wait() first");
  ++in_flight_;
  pool_->run([this, op, tag] {
    std::exception_ptr error;
    try {
      op.file->pread(op.buf, op.bytes, op.offset);
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard lock(mutex_);  // also during the notification: the queue may be destroyed right after it
    done_.push_back({tag, std::move(error)});
    finished_.notify_one();
  });
}

uint64_t PreadQueue::wait() {
  if (in_flight_ == 0) throw Error("read queue is empty: nothing to wait for");
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return !done_.empty(); });
  const Done done = std::move(done_.front());
  done_.pop_front();
  --in_flight_;
  if (done.error) std::rethrow_exception(done.error);
  return done.tag;
}

}  // namespace thermocline
