// All live rows of one partition in hash order: the base and the extents above it, merged, newest version wins.
// Used by merging, scanning, counting and checking. Memory: the buffers asked for, but at least a page per extent; the
// merger keeps the extents few enough (BufferSizes::max_extents).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ssd/files.h"

namespace thermocline::ssd {

// A page of a partition cannot be read, twice in a row. (A read that fails is the device's word, not damaged bytes.)
struct UnreadableError : IoError {
  using IoError::IoError;
};

// A snapshot of one partition: stays readable whatever happens to the store meanwhile.
struct PartitionView {
  uint64_t lo = 0, hi = 0;                             // hashes, both inclusive
  std::shared_ptr<const BaseFile> base;                // may be null
  std::vector<std::shared_ptr<const Extent>> extents;  // newer than the base
};

class PartitionCursor {
 public:
  PartitionCursor(Context& ctx, PartitionView view, size_t buffer_bytes);
  ~PartitionCursor();

  // Moves to the next live row. False at the end. key() and row() are valid until the next call.
  bool next();
  uint64_t key() const { return key_; }
  const uint8_t* row() const { return row_; }
  uint64_t bytes_read() const;

 private:
  class Run;
  bool later(const Run* a, const Run* b) const;

  Context& ctx_;
  PartitionView view_;
  std::vector<std::unique_ptr<Run>> runs_;
  std::vector<Run*> heap_;  // extents' runs, the smallest hash first, the newest first among equals
  Run* base_ = nullptr;
  std::vector<Run*> behind_;  // runs that stood on the row given out last: they move on in the next call
  uint64_t key_ = 0;
  const uint8_t* row_ = nullptr;
};

}  // namespace thermocline::ssd
