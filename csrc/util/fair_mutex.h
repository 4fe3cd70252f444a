// A shared mutex whose writers are not starved by readers that keep coming, as they are with glibc's.
#pragma once

#include <mutex>
#include <shared_mutex>

namespace thermocline {

// For std::unique_lock and std::shared_lock. Not recursive: not even shared within shared.
class FairMutex {
 public:
  void lock() {
    std::lock_guard turn(turn_);  // readers that come later wait behind us
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
