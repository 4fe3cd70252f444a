#include "util/uring_queue.h"

#include <cerrno>
#include <exception>

#include "util/error.h"

namespace thermocline {

UringQueue::UringQueue(const PosixCalls& calls, std::unique_ptr<Uring> ring, size_t depth)
    : calls_(calls), ring_(std::move(ring)), reads_(depth) {
  for (size_t i = depth; i-- > 0;) free_.push_back(uint32_t(i));
}

UringQueue::~UringQueue() {
  while (free_.size() < reads_.size()) {
    const size_t before = free_.size();
    try {
      wait();
    } catch (const IoError&) {
      // A failed read is no longer in flight. If the number of reads did not change, the ring itself is broken;
      // returning would let the kernel write into freed memory.
      if (free_.size() == before) std::terminate();
    }
  }
}

void UringQueue::submit(const ReadOp& op, uint64_t tag) {
  if (free_.empty()) throw Error("read queue is full: call wait() first");
  auto* file = dynamic_cast<PosixFile*>(op.file);
  if (!file) throw Error("read queue: " + op.file->path() + " was opened by another file system");
  file->check_aligned("read", op.buf, op.bytes, op.offset);
  const uint32_t slot = free_.back();
  free_.pop_back();
  reads_[slot] = {file, op.offset, op.bytes, 0, op.buf, tag};
  prepare(slot);
}

uint64_t UringQueue::wait() {
  if (free_.size() == reads_.size()) throw Error("read queue is empty: nothing to wait for");
  for (;;) {
    Uring::Completion c;
    if (!ring_->pop(&c)) {
      ring_->enter(true);
      continue;
    }
    if (ring_->prepared() * 4 >= reads_.size()) ring_->enter(false);  // keeps the device busy
    const auto slot = uint32_t(c.user_data);
    Read& r = reads_[slot];
    const int32_t result = calls_.uring_result ? calls_.uring_result(c.result) : c.result;
    if (result > 0) {
      r.done += uint32_t(result);
      if (r.done < r.bytes) {
        if (r.done % kSector == 0) {
          prepare(slot);
          continue;
        }
        return finish_slowly(slot);
      }
      free_.push_back(slot);
      return r.tag;
    }
    if (result == -EAGAIN || result == -EINTR) {
      prepare(slot);
      continue;
    }
    return finish_slowly(slot);
  }
}

void UringQueue::prepare(uint32_t slot) {
  const Read& r = reads_[slot];
  ring_->prepare_read(r.file->fd(), r.buf + r.done, r.bytes - r.done, r.offset + r.done, slot);
}

// End of file, errors and unaligned lengths are rare: pread() repeats the rest and creates the error message.
uint64_t UringQueue::finish_slowly(uint32_t slot) {
  const Read r = reads_[slot];
  free_.push_back(slot);
  r.file->read_rest(r.buf, r.bytes, r.offset, r.done);
  return r.tag;
}

}  // namespace thermocline
