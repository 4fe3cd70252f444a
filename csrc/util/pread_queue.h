// A ReadQueue whose reads run on a shared pool of pread threads: takes over from io_uring with the same depth.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "util/fs.h"

namespace thermocline {

// Thread safety: all calls may run concurrently.
class PreadPool {
 public:
  explicit PreadPool(int threads);  // fewer, perhaps none, if the system refuses more
  ~PreadPool();                     // finishes the queued jobs
  PreadPool(const PreadPool&) = delete;
  PreadPool& operator=(const PreadPool&) = delete;

  size_t size() const { return threads_.size(); }
  void run(std::function<void()> job);  // jobs must not throw

 private:
  void work();

  std::mutex mutex_;  // protects jobs_ and stop_
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

// Thread safety: as ReadQueue.
class PreadQueue : public ReadQueue {
 public:
  PreadQueue(std::shared_ptr<PreadPool> pool, size_t depth) : pool_(std::move(pool)), depth_(depth) {}
  ~PreadQueue() override;

  void submit(const ReadOp& op, uint64_t tag) override;
  uint64_t wait() override;
  size_t depth() const override { return depth_; }

 private:
  struct Done {
    uint64_t tag;
    std::exception_ptr error;
  };

  const std::shared_ptr<PreadPool> pool_;
  const size_t depth_;
  size_t in_flight_ = 0;  // submitted and not yet returned by wait()
  std::mutex mutex_;      // protects done_
  std::condition_variable finished_;
  std::deque<Done> done_;
};

}  // namespace thermocline
