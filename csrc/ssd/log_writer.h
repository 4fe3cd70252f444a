// Appends extents to the log. A segment is begun anew after every open and after every failure, so that no page of the
// log is ever written twice.
// Thread safety: one caller at a time (the store's write lock).
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
  // `new_file` creates a registered file of the store.
  LogWriter(Context& ctx, ThreadPool& pool, size_t segment_bytes,
            std::function<std::shared_ptr<DataFile>(FileKind)> new_file);

  // Opening: the number of log pages the loaded extents span, and the next extent's seq.
  void start_at(uint32_t vpage, uint64_t seq) {
    vbase_ = vpage;
    next_seq_ = seq;
  }
  // `items` in hash order, each hash once. `rows` null: deletions. Fills `entries` for Index::add_extent. Segments grow
  // with the store (`base_bytes`), so that their number does not.
  std::shared_ptr<Extent> write(const std::vector<Item>& items, const uint64_t* keys, const RowsIn* rows,
                                uint64_t base_bytes, std::vector<HashAndPage>& entries);

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
  std::shared_ptr<DataFile> segment_;  // being appended to; null: begin another
  uint32_t vbase_ = 0;                 // of segment_, or of the next one
  uint64_t next_seq_ = 1;
  std::vector<AlignedBuffer> buffers_;
  std::atomic<uint64_t> buffer_bytes_{0};
};

}  // namespace thermocline::ssd
