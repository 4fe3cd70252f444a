// Iterates over the live rows of one partition in hash order: merges base and newer extents; the newest version wins.
// Used by merges, scans, counts and checks. Memory: the given buffer size, but at least one page per extent; the merger
// bounds the number of extents (BufferSizes::max_extents). With a pool, the next part of every source is read while the
// rows of the current one are consumed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ssd/files.h"
#include "util/pread_queue.h"

namespace thermocline::ssd {

// Two reads of a page of a partition failed. (An I/O error of the device, not a checksum mismatch.)
struct UnreadableError : IoError {
  using IoError::IoError;
};

// A snapshot of one partition. It stays readable after merges, commits and close().
struct PartitionView {
  uint64_t lo = 0, hi = 0;                             // hashes, both inclusive
  std::shared_ptr<const BaseFile> base;                // may be null
  std::vector<std::shared_ptr<const Extent>> extents;  // newer than the base
};

// Not thread-safe.
class PartitionCursor {
 public:
  // `with_deleted`: also stops at keys whose newest version is a deletion.
  PartitionCursor(Context& ctx, PartitionView view, size_t buffer_bytes, bool with_deleted = false,
                  PreadPool* read_ahead = nullptr);
  ~PartitionCursor();
  // Upper bound of the buffers of a cursor over the view.
  static uint64_t memory(const Geometry& g, const PartitionView& view, size_t buffer_bytes);

  // Moves to the next live row; false: no more rows. key() and row() are valid until the next call.
  bool next();
  uint64_t key() const { return key_; }
  const uint8_t* row() const { return row_; }  // null: the key is deleted
  uint64_t seq() const { return seq_; }        // of the row's extent; 0: the base
  uint64_t bytes_read() const;

 private:
  class Run;
  bool later(const Run* a, const Run* b) const;

  PartitionView view_;
  const bool with_deleted_;
  std::vector<std::unique_ptr<Run>> runs_;
  std::vector<Run*> heap_;  // runs of extents: smallest hash first, among equal hashes the newest first
  Run* base_ = nullptr;
  std::vector<Run*> to_advance_;  // runs positioned at the current key: the next call advances them
  uint64_t key_ = 0;
  const uint8_t* row_ = nullptr;
  uint64_t seq_ = 0;
};

}  // namespace thermocline::ssd
