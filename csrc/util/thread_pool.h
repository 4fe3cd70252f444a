// A fixed set of threads that run numbered tasks; the caller works along and gets the first exception.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
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
// In a forked child the threads do not exist: parallel() runs everything inline there, and nothing is joined.
class ThreadPool {
 public:
  // `threads` counts the caller: ThreadPool(1) starts no thread and runs everything inline.
  explicit ThreadPool(int threads) : size_(threads < 1 ? 1 : threads), owner_(getpid()), state_(new State) {
    for (int i = 1; i < size_; ++i) state_->workers.emplace_back([state = state_] { work(*state); });
  }
  ~ThreadPool() {
    if (getpid() != owner_) return;  // a child's copy: its mutex may be held by a thread that is not there
    {
      std::lock_guard lock(state_->mutex);
      state_->stop = true;
    }
    state_->wake.notify_all();
    for (auto& w : state_->workers) w.join();
    delete state_;
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Runs fn(0) .. fn(tasks - 1), each once, in any order. Returns when all are done; rethrows the first exception,
  // after which tasks not yet begun are skipped.
  void parallel(size_t tasks, const std::function<void(size_t)>& fn) {
    if (tasks == 0) return;
    if (size_ == 1 || tasks == 1 || getpid() != owner_) {
      for (size_t i = 0; i < tasks; ++i) fn(i);
      return;
    }
    auto job = std::make_shared<Job>();
    job->tasks = tasks;
    job->fn = &fn;
    size_t helpers = std::min<size_t>(tasks, size_) - 1;
    {
      std::lock_guard lock(state_->mutex);
      for (size_t i = 0; i < helpers; ++i) state_->queue.push_back(job);
    }
    if (helpers == 1) {
      state_->wake.notify_one();
    } else {
      state_->wake.notify_all();
    }
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
  struct State {
    std::mutex mutex;  // protects queue and stop
    std::condition_variable wake;
    std::deque<std::shared_ptr<Job>> queue;
    bool stop = false;
    std::vector<std::thread> workers;
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

  static void work(State& state) {
    std::unique_lock lock(state.mutex);
    for (;;) {
      state.wake.wait(lock, [&] { return state.stop || !state.queue.empty(); });
      if (state.stop) return;
      auto job = std::move(state.queue.front());
      state.queue.pop_front();
      lock.unlock();
      run(*job);
      job.reset();
      lock.lock();
    }
  }

  const int size_;
  const pid_t owner_;
  State* const state_;  // outlives a forked child's copy of the pool on purpose
};

}  // namespace thermocline
