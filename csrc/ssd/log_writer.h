// Appends extents to the log. Every open and every failure starts a new segment, so that no page of the log is written
// twice.
// Thread safety: one caller at a time (the holder of the store's write lock); memory() may run concurrently.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "ssd/files.h"
#include "ssd/index.h"
#include "ssd/sorted_batch.h"
#include "util/row_store.h"
#include "util/thread_pool.h"

namespace thermocline::ssd {

class LogWriter {
 public:
  // `new_file` creates a file and registers it in the catalog.
  LogWriter(Context& ctx, ThreadPool& pool, size_t segment_bytes,
            std::function<std::shared_ptr<DataFile>(FileKind)> new_file);

  // Opening: the number of log pages of the loaded extents, and the number of the next extent.
  void start_at(uint32_t vpage, uint64_t seq) {
    vbase_ = vpage;
    next_seq_ = seq;
  }
  // Writes one extent. `items` are in hash order without duplicates. `rows` null: deletions. Fills `entries` for
  // Index::add_extent. The segment size grows with the store (`base_bytes`), so that their number stays bounded.
  std::shared_ptr<Extent> write(const std::vector<Item>& items, const uint64_t* keys, const RowsIn* rows,
                                uint64_t base_bytes, std::vector<HashAndPage>& entries);

  // Leaves a number out of the sequence of extents, for rows that are not in the log. Returns the number of the next
  // extent.
  uint64_t skip_extent() { return ++next_seq_; }

  void close() { segment_.reset(); }

  uint64_t max_rows() const;  // of one extent
  uint64_t memory() const { return buffer_bytes_; }

 private:
  void fill(uint8_t* page, uint64_t i, const Extent& extent, const std::vector<Item>& items, const uint64_t* keys,
            const RowsIn* rows) const;

  Context& ctx_;
  ThreadPool& pool_;
  const size_t segment_bytes_;
  const std::function<std::shared_ptr<DataFile>(FileKind)> new_file_;
  std::shared_ptr<DataFile> segment_;  // current segment; null: the next write starts one
  uint32_t vbase_ = 0;                 // of segment_ or of the next segment
  uint64_t next_seq_ = 1;
  std::vector<AlignedBuffer> buffers_;
  std::atomic<uint64_t> buffer_bytes_{0};
};

}  // namespace thermocline::ssd
