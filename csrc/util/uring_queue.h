// A ReadQueue on io_uring. Submissions are collected until no completion is available, so that one system call submits
// and waits for many reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "util/posix_file.h"
#include "util/uring.h"

namespace thermocline {

// Thread safety: as ReadQueue.
// Invariant: a slot of reads_ is in free_ or has a read that is prepared or in flight in the ring.
class UringQueue : public ReadQueue {
 public:
  UringQueue(const PosixCalls& calls, std::unique_ptr<Uring> ring, size_t depth);
  // Waits for all reads: until its completion the kernel may write into a read's buffer.
  ~UringQueue() override;

  void submit(const ReadOp& op, uint64_t tag) override;
  uint64_t wait() override;
  size_t depth() const override { return reads_.size(); }
  void flush() override {
    if (ring_->prepared() > 0) ring_->enter(false);
  }
  void use_buffer(uint8_t* memory, size_t bytes) override { ring_->register_buffer(memory, bytes); }

 private:
  struct Read {
    PosixFile* file;
    uint64_t offset;
    uint32_t bytes, done;
    uint8_t* buf;
    uint64_t tag;
  };

  void prepare(uint32_t slot);
  uint64_t finish_slowly(uint32_t slot);

  const PosixCalls calls_;
  std::unique_ptr<Uring> ring_;
  std::vector<Read> reads_;
  std::vector<uint32_t> free_;  // slots of reads_
};

}  // namespace thermocline
