// Memory for calls in progress: a fixed number of equal pieces, so that it is bounded and counted. A call that finds
// none waits; a batch larger than a piece is worked on in parts.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "dram/shard.h"
#include "util/huge_buffer.h"

namespace thermocline {

struct Scratch {
  static constexpr size_t kSmallBytes = sizeof(Probe) + 1;
  static constexpr size_t kBytes = kSmallBytes + sizeof(uint64_t) + 4 * sizeof(uint32_t) + 1;

  size_t keys_max = 0;      // elements of each array
  Probe* probes = nullptr;  // grouped by shard
  uint8_t* shard = nullptr;
  uint64_t* keys = nullptr;    // of rows to read or write
  uint32_t* slots = nullptr;   // their slots
  uint32_t* picks = nullptr;   // their places in the batch
  uint32_t* fresh = nullptr;   // free slots for them
  uint32_t* pinned = nullptr;  // push(): the slots of the keys
  uint8_t* found = nullptr;
  HugeBuffer memory;
};

// Thread safety: all calls may run concurrently.
class ScratchPool {
 public:
  ScratchPool(size_t pieces, size_t keys_max, bool small) {
    keys_max = (keys_max + 63) / 64 * 64;
    all_.resize(pieces);
    for (Scratch& s : all_) {
      s.keys_max = keys_max;
      s.memory = HugeBuffer(keys_max * (small ? Scratch::kSmallBytes : Scratch::kBytes));
      auto* p = s.memory.as<uint8_t>();
      const auto take = [&](size_t width) { return std::exchange(p, p + keys_max * width); };
      s.probes = reinterpret_cast<Probe*>(take(sizeof(Probe)));
      if (!small) {
        s.keys = reinterpret_cast<uint64_t*>(take(8));
        s.slots = reinterpret_cast<uint32_t*>(take(4));
        s.picks = reinterpret_cast<uint32_t*>(take(4));
        s.fresh = reinterpret_cast<uint32_t*>(take(4));
        s.pinned = reinterpret_cast<uint32_t*>(take(4));
        s.found = take(1);
      }
      s.shard = take(1);
      idle_.push_back(&s);
    }
  }

  class Lease {
   public:
    explicit Lease(ScratchPool& pool) : pool_(pool) {
      std::unique_lock lock(pool_.mutex_);
      pool_.returned_.wait(lock, [&] { return !pool_.idle_.empty(); });
      scratch_ = pool_.idle_.back();
      pool_.idle_.pop_back();
    }
    ~Lease() {
      {
        std::lock_guard lock(pool_.mutex_);
        pool_.idle_.push_back(scratch_);
      }
      pool_.returned_.notify_one();
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Scratch& operator*() const { return *scratch_; }
    Scratch* operator->() const { return scratch_; }

   private:
    ScratchPool& pool_;
    Scratch* scratch_;
  };

 private:
  std::vector<Scratch> all_;
  std::mutex mutex_;  // protects idle_
  std::condition_variable returned_;
  std::vector<Scratch*> idle_;
};

}  // namespace thermocline
