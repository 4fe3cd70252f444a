// Messages for the user about conditions that do not fail a call: a degraded engine, a damaged file that is not needed.
// Python reads them with SsdStore::take_warnings() and passes them to the module `warnings` (tiers/ssd.py).
#pragma once

#include <cstdint>
#include <map>
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
  // One of many warnings of a kind: after the first three, take() returns one line, "<more> (<number> in all)", and
  // another one when their number has doubled.
  void add_one_of_many(const std::string& text, const std::string& more) {
    {
      std::lock_guard lock(mutex_);
      if (added_.count(text) || kinds_[more].count++ >= kShown) {
        added_.insert(text);
        return;
      }
    }
    add(text);
  }
  // Returns the warnings since the last call, oldest first.
  std::vector<std::string> take() {
    std::lock_guard lock(mutex_);
    for (auto& [more, kind] : kinds_) {
      if (kind.count <= kShown || kind.count < 2 * kind.reported) continue;
      kind.reported = kind.count;
      pending_.push_back(more + " (" + std::to_string(kind.count) + " in all)");
    }
    return std::exchange(pending_, {});
  }

 private:
  static constexpr uint64_t kShown = 3;
  struct Kind {
    uint64_t count = 0, reported = 0;
  };
  std::mutex mutex_;  // protects all members below
  std::map<std::string, Kind> kinds_;
  std::set<std::string> added_;
  std::vector<std::string> pending_;
};

}  // namespace thermocline
