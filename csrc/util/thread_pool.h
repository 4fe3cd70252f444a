// A fixed set of threads that run numbered tasks; the caller works along and gets the first exception.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace thermocline {

// Thread safety: parallel() may be called from several threads at once. It must not be called from inside a task.
class ThreadPool {
 public:
  // `threads` counts the caller: ThreadPool(1) starts no thread and runs everything inline.
  explicit ThreadPool(int threads) : size_(threads < 1 ? 1 : threads) {
    for (int i = 1; i < size_; ++i) workers_.emplace_back([this] { work(); });
  }
  ~ThreadPool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Runs fn(0) .. fn(tasks - 1), each once, in any order. Returns when all are done; rethrows the first exception,
  // after which tasks not yet begun are skipped.
  void parallel(size_t tasks, const std::function<void(size_t)>& fn) {
    if (tasks == 0) return;
    if (size_ == 1 || tasks == 1) {
      for (size_t i = 0; i < tasks; ++i) fn(i);
      return;
    }
    auto job = std::make_shared<Job>();
    job->tasks = tasks;
    job->fn = &fn;
    size_t helpers = std::min<size_t>(tasks, size_) - 1;
    {
      std::lock_guard lock(mutex_);
      for (size_t i = 0; i < helpers; ++i) queue_.push_back(job);
    }
    if (helpers == 1) wake_.notify_one();
    else wake_.notify_all();
    run(*job);
    std::unique_lock lock(job->mutex);
    job->done.wait(lock, [&] { return job->finished == tasks; });
    if (job->error) std::rethrow_exception(job->error);
  }

 private:
  struct Job {
    size_t tasks = 0;
    const std::function<void(size_t)>* fn = nullptr;  // valid until every task has finished
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;  // protects what follows
    std::condition_variable done;
    size_t finished = 0;
    std::exception_ptr error;
  };

  static void run(Job& job) {
    for (;;) {
      size_t i = job.next.fetch_add(1);
      if (i >= job.tasks) return;
      std::exception_ptr error;
      if (!job.failed.load(std::memory_order_relaxed)) {
        try {
          (*job.fn)(i);
        } catch (...) {
          error = std::current_exception();
          job.failed = true;
        }
      }
      std::lock_guard lock(job.mutex);
      if (error && !job.error) job.error = error;
      if (++job.finished == job.tasks) job.done.notify_all();
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      auto job = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      run(*job);
      job.reset();
      lock.lock();
    }
  }

  const int size_;
  std::mutex mutex_;  // protects queue_ and stop_
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> queue_;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace thermocline
