// Runs a function on a thread of its own whenever it is requested.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace thermocline {

// Requests during a run lead to one more run. After an exception the function runs again only after it was taken.
// The thread starts with the first request. In a forked child it does not exist: requests have no effect there.
// Thread safety: all calls may run concurrently.
class BackgroundTask {
 public:
  explicit BackgroundTask(std::function<void()> run) : run_(std::move(run)), owner_(getpid()) {}
  ~BackgroundTask() {
    if (getpid() == owner_) stop();
    else thread_.release();  // leaked: the thread exists only in the parent process
  }
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

  void request() {
    if (getpid() != owner_) return;
    {
      std::lock_guard lock(mutex_);
      if (stop_) return;
      requested_ = true;
      if (!thread_) {
        try {
          thread_ = std::make_unique<std::thread>([this] { loop(); });
        } catch (const std::system_error&) {
          return;  // the system refuses a thread: the callers do the work
        }
      }
    }
    wake_.notify_all();
  }
  // Waits for a run in progress. Later requests have no effect.
  void stop() {
    if (getpid() != owner_) return;
    std::unique_ptr<std::thread> thread;
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      thread = std::move(thread_);
    }
    wake_.notify_all();
    if (thread) thread->join();
  }
  // Returns the exception of the last run, once; null: none.
  std::exception_ptr take_error() {
    std::exception_ptr error;
    {
      std::lock_guard lock(mutex_);
      error = std::exchange(error_, nullptr);
    }
    if (error) wake_.notify_all();
    return error;
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || (requested_ && !error_); });
      if (stop_) return;
      requested_ = false;
      lock.unlock();
      std::exception_ptr error;
      try {
        run_();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      error_ = error;
    }
  }

  const std::function<void()> run_;
  const pid_t owner_;
  std::mutex mutex_;  // protects the members below
  std::condition_variable wake_;
  bool requested_ = false, stop_ = false;
  std::exception_ptr error_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace thermocline
