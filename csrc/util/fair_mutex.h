// A shared mutex without writer starvation: glibc's prefers readers.
#pragma once

#include <mutex>
#include <shared_mutex>

namespace thermocline {

// For std::unique_lock and std::shared_lock. Not recursive, not even for shared locks.
class FairMutex {
 public:
  void lock() {
    std::lock_guard turn(turn_);  // later readers wait until the writer has the lock
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }
  void lock_shared() {
    std::lock_guard turn(turn_);
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  std::mutex turn_;
  std::shared_mutex mutex_;
};

}  // namespace thermocline
