// One merge of one partition: reads base and extents, writes the base files that replace the partition. Several jobs
// run at once, on threads of their own or in turn on one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "ssd/catalog.h"
#include "ssd/cursor.h"
#include "ssd/index.h"
#include "util/pread_queue.h"

namespace thermocline::ssd {

struct MergeCounters {
  std::atomic<uint64_t> merges{0}, bytes_read{0}, bytes_written{0};
  std::atomic<double> seconds{0};  // of all threads that merge, without pauses
};

// Writes rows in hash order to base files of at most `rows_per_piece` rows: the pieces that replace a partition.
// Not thread-safe.
class PieceWriter {
 public:
  PieceWriter(Context& ctx, Catalog& catalog, MergeCounters& counters, uint32_t filter_bits, uint64_t rows_per_piece,
              PreadPool* io)
      : ctx_(ctx),
        catalog_(catalog),
        counters_(counters),
        filter_bits_(filter_bits),
        rows_per_piece_(rows_per_piece),
        io_(io) {}

  void add(uint64_t key, const uint8_t* row);
  // Returns the pieces; together they cover [lo, hi]. There is one piece without a base if no row was added.
  std::vector<Partition> finish(uint64_t lo, uint64_t hi);

 private:
  void close();

  Context& ctx_;
  Catalog& catalog_;
  MergeCounters& counters_;
  const uint32_t filter_bits_;
  const uint64_t rows_per_piece_;
  PreadPool* const io_;
  std::vector<Partition> pieces_;
  std::unique_ptr<BaseWriter> file_;  // of pieces_.back(); null: closed
};

// Not thread-safe.
class MergeJob {
 public:
  // `target`: a base file above this size is split. `io`: reads ahead and writes behind; null: synchronous.
  MergeJob(Context& ctx, Catalog& catalog, MergeCounters& counters, uint32_t filter_bits, const Index::Merge& merge,
           uint64_t target, PreadPool* io);

  // Merges the next rows, about `bytes` of them. False: all rows are merged.
  bool step(uint64_t bytes);
  // After the last step: the pieces that replace the partition.
  std::vector<Partition> finish();

  // Upper bound of the memory of a job: buffers, and fences and filter of a piece.
  static uint64_t memory(const Context& ctx, const Index::Merge& merge, uint64_t target, uint32_t filter_bits);

 private:
  static uint64_t rows_per_piece(const Context& ctx, const Index::Merge& merge, uint64_t target);

  Context& ctx_;
  MergeCounters& counters_;
  const uint64_t lo_, hi_;
  PartitionCursor rows_;
  PieceWriter writer_;
};

}  // namespace thermocline::ssd
