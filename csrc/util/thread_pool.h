// A fixed set of threads that run numbered tasks; the caller works along and gets the first exception.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
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
// A batch is a few short jobs in a row: where cores are many, threads that have nothing to do look out for the next one
// for a moment before they fall asleep, because waking them takes longer than their work.
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
      state_->queued.store(state_->queue.size(), std::memory_order_release);
    }
    if (helpers == 1) {
      state_->wake.notify_one();
    } else {
      state_->wake.notify_all();
    }
    run(*job);
    const auto finished = [&] { return job->finished.load(std::memory_order_acquire) == tasks; };
    if (!look_out(finished)) {
      std::unique_lock lock(job->mutex);
      job->done.wait(lock, finished);
    }
    std::lock_guard lock(job->mutex);  // the last one may still be in it
    if (job->error) std::rethrow_exception(job->error);
  }

 private:
  struct Job {
    size_t tasks = 0;
    const std::function<void(size_t)>* fn = nullptr;  // valid until every task has finished
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    std::atomic<size_t> finished{0};
    std::mutex mutex;  // protects what follows
    std::condition_variable done;
    std::exception_ptr error;
  };
  struct State {
    std::mutex mutex;  // protects queue and stop
    std::condition_variable wake;
    std::deque<std::shared_ptr<Job>> queue;
    std::atomic<size_t> queued{0};  // the queue's length, for those who look out
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
      if (error) {
        std::lock_guard lock(job.mutex);
        if (!job.error) job.error = error;
      }
      if (job.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == job.tasks) {
        std::lock_guard lock(job.mutex);  // the caller is not between looking and falling asleep
        job.done.notify_all();
      }
    }
  }

  // Whether `ready` comes true within a moment. On few cores it would take them from those it waits for.
  template <typename Ready>
  static bool look_out(const Ready& ready) {
    static const bool many_cores = std::thread::hardware_concurrency() > 4;
    if (ready()) return true;
    if (!many_cores) return false;
    const auto until = std::chrono::steady_clock::now() + kLookOut;
    do {
      for (int i = 0; i < 16; ++i) {
        if (ready()) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
    } while (std::chrono::steady_clock::now() < until);
    return false;
  }

  static void work(State& state) {
    std::unique_lock lock(state.mutex);
    for (;;) {
      if (state.queue.empty() && !state.stop) {
        lock.unlock();
        look_out([&] { return state.queued.load(std::memory_order_acquire) > 0; });
        lock.lock();
      }
      state.wake.wait(lock, [&] { return state.stop || !state.queue.empty(); });
      if (state.stop) return;
      auto job = std::move(state.queue.front());
      state.queue.pop_front();
      state.queued.store(state.queue.size(), std::memory_order_release);
      lock.unlock();
      run(*job);
      job.reset();
      lock.lock();
    }
  }

  static constexpr std::chrono::microseconds kLookOut{40};

  const int size_;
  const pid_t owner_;
  State* const state_;  // outlives a forked child's copy of the pool on purpose
};

}  // namespace thermocline
