// Read queues with their memory, shared by the lookups of a store.
#pragma once

#include <bit>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ssd/files.h"
#include "util/aligned.h"
#include "util/fs.h"

namespace thermocline::ssd {

// A read queue and memory of equal slots. A read takes one or more consecutive slots. Not thread-safe: leased to one
// worker at a time.
class ReadChannel {
 public:
  ReadChannel(FileSystem& fs, const BufferSizes& sizes, uint32_t page_bytes)
      : queue_(fs.read_queue(static_cast<size_t>(sizes.read_slots))),
        engine_(fs.name()),
        slot_bytes_(size_t{sizes.slot_pages} * page_bytes),
        memory_(static_cast<size_t>(sizes.read_slots) * slot_bytes_),
        free_(all(sizes.read_slots)) {
    queue_->use_buffer(memory_.data(), memory_.size());
  }
  // Destroys the queue first: that waits for the reads in flight into `memory_`.
  ~ReadChannel() { queue_.reset(); }

  ReadQueue& queue() { return *queue_; }
  const std::string& engine() const { return engine_; }  // of the queue
  uint64_t bytes() const { return memory_.size(); }

  // Takes consecutive slots for `bytes`. Returns the first, or -1: wait for a read.
  int take(size_t bytes) {
    const size_t count = slots_for(bytes);
    uint64_t first = free_;  // slots that start a free run of `count`
    for (size_t i = 1; i < count; ++i) first &= free_ >> i;
    if (first == 0) return -1;
    const int slot = std::countr_zero(first);
    free_ &= ~(mask(count) << slot);
    return slot;
  }
  void give(int slot, size_t bytes) { free_ |= mask(slots_for(bytes)) << slot; }
  uint8_t* at(int slot) const { return memory_.data() + static_cast<size_t>(slot) * slot_bytes_; }

 private:
  static uint64_t mask(size_t count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }
  static uint64_t all(int slots) { return mask(static_cast<size_t>(slots)); }
  size_t slots_for(size_t bytes) const { return (bytes + slot_bytes_ - 1) / slot_bytes_; }

  std::unique_ptr<ReadQueue> queue_;
  const std::string engine_;
  const size_t slot_bytes_;
  AlignedBuffer memory_;
  uint64_t free_;  // bit i: slot i
};

// Thread safety: all methods may run concurrently.
// Invariants: 1. At most sizes.read_channels channels exist, so the memory of read buffers is bounded. 2. A channel
// with reads in flight is never idle: it is destroyed, which waits for them.
class ReadChannels {
 public:
  explicit ReadChannels(Context& ctx) : ctx_(ctx) {}

  // Blocks until a channel may be used. The channel is destroyed with the lease unless keep() was called.
  class Lease {
   public:
    explicit Lease(ReadChannels& channels);
    ~Lease();
    Lease(const Lease&) = delete;
    ReadChannel& channel() { return *channel_; }
    void keep() { keep_ = true; }  // no read is in flight: the channel can be used again

   private:
    ReadChannels& channels_;
    std::unique_ptr<ReadChannel> channel_;
    bool keep_ = false;
  };
  uint64_t memory() const;

 private:
  Context& ctx_;
  mutable std::mutex mutex_;  // protects all members below
  std::condition_variable returned_;
  std::vector<std::unique_ptr<ReadChannel>> idle_;
  int leased_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace thermocline::ssd
