// Messages for the user about conditions that do not fail a call: a degraded engine, a damaged file that is not needed.
// Python reads them with SsdStore::take_warnings() and passes them to the module `warnings` (tiers/ssd.py).
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace thermocline {

// Thread safety: all calls may run concurrently.
class Warnings {
 public:
  // One line. A text that was added before is not added again.
  void add(const std::string& text) {
    std::lock_guard lock(mutex_);
    if (added_.insert(text).second) pending_.push_back(text);
  }
  // Returns the warnings since the last call, oldest first.
  std::vector<std::string> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(pending_, {});
  }

 private:
  std::mutex mutex_;  // protects all members below
  std::set<std::string> added_;
  std::vector<std::string> pending_;
};

}  // namespace thermocline
