// A fixed set of threads that run numbered tasks. The caller also runs tasks, and gets the first exception.
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
#include <system_error>
#include <thread>
#include <vector>

namespace thermocline {

// Thread safety: parallel() may be called from several threads at once, but not from inside a task.
// A batch is a short sequence of short jobs. On machines with many cores, idle threads spin for kSpinTime before they
// block, because waking a thread takes longer than its part of a job.
// In a forked child the threads do not exist: parallel() runs all tasks inline there, and no thread is joined.
class ThreadPool {
 public:
  // `threads` includes the caller: ThreadPool(1) starts no thread and runs all tasks inline. The pool has fewer threads
  // if the system refuses more.
  explicit ThreadPool(int threads) : owner_(getpid()), state_(new State) {
    try {
      for (; size_ < threads; ++size_) state_->workers.emplace_back([state = state_] { work(*state); });
    } catch (const std::system_error&) {
    }
  }
  ~ThreadPool() {
    if (getpid() != owner_) return;  // forked child: a thread of the parent may hold the mutex
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

  // Runs fn(0) .. fn(tasks - 1), each once, in any order. Returns when all are done. Rethrows the first exception;
  // tasks that have not started by then are skipped.
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
    if (!spin_until(finished)) {
      std::unique_lock lock(job->mutex);
      job->done.wait(lock, finished);
    }
    std::lock_guard lock(job->mutex);  // the last thread may still hold it
    if (job->error) std::rethrow_exception(job->error);
  }

 private:
  struct Job {
    size_t tasks = 0;
    const std::function<void(size_t)>* fn = nullptr;  // valid until every task has finished
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    std::atomic<size_t> finished{0};
    std::mutex mutex;  // protects error
    std::condition_variable done;
    std::exception_ptr error;
  };
  struct State {
    std::mutex mutex;  // protects queue and stop
    std::condition_variable wake;
    std::deque<std::shared_ptr<Job>> queue;
    std::atomic<size_t> queued{0};  // length of the queue, for spinning threads
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
        std::lock_guard lock(job.mutex);  // the caller is not between its check and its sleep
        job.done.notify_all();
      }
    }
  }

  // Spins until ready() is true; false after kSpinTime. On few cores it does not spin, because that would take a core
  // from the threads it waits for.
  template <typename Ready>
  static bool spin_until(const Ready& ready) {
    static const bool many_cores = std::thread::hardware_concurrency() > 4;
    if (ready()) return true;
    if (!many_cores) return false;
    const auto until = std::chrono::steady_clock::now() + kSpinTime;
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
        spin_until([&] { return state.queued.load(std::memory_order_acquire) > 0; });
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

  static constexpr std::chrono::microseconds kSpinTime{40};

  int size_ = 1;  // constant after construction
  const pid_t owner_;
  State* const state_;  // a raw pointer: the pool of a forked child must not delete it
};

}  // namespace thermocline
