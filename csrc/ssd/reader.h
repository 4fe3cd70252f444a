// Batched lookups: plan under the index lock, then read, verify and copy without it.
//
// A plan turns keys in hash order into page reads: pages are read once however many keys want them, and neighbours are
// read together when the pages between them cost less than another request would (ReadCost, measured on the device).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "ssd/index.h"
#include "ssd/sorted_batch.h"
#include "util/row_store.h"
#include "util/thread_pool.h"

namespace thermocline::ssd {

struct ReadCost {
  double read_us = 0, page_us = 0;  // 0: not measured yet
  uint32_t gap() const;             // unwanted pages worth reading to save a request
};

struct ReadCounters {
  std::atomic<uint64_t> keys{0}, pages{0}, reads{0}, bytes{0}, false_pages{0};
};

// One key wanted from one page. Sorted by place.
struct Want {
  uint64_t place;  // file of the plan << 40 | page
  uint32_t item;
  uint32_t vpage;  // of the log
  bool in_log;     // a page of the log may turn out not to have the key; then an older one has it, or the base
};

struct Plan {
  std::vector<Item> items;                       // in hash order
  std::vector<uint32_t> older;                   // per item, if any: only pages of the log before this one
  std::vector<std::shared_ptr<DataFile>> files;  // kept open until the plan is done
  std::vector<Want> wants;

  uint32_t add_file(const std::shared_ptr<DataFile>& file);
};

// Plans all items of `plan`. The caller holds the index lock, shared.
void plan_reads(const Index& index, Plan& plan);

// Thread safety: all methods may run concurrently; they share a fixed number of read buffers.
class Reader {
 public:
  Reader(Context& ctx, ThreadPool& pool);
  ~Reader();

  // Returns a plan of what is still to be looked for, on older pages: usually nothing. To plan it anew, under the index
  // lock, is sound: what was moved or put meanwhile is not older than what this call may return.
  Plan run(const Plan& plan, const uint64_t* keys, uint8_t* found, RowsOut rows);
  // Only the reads of the first round, with no look at what they bring: the floor that benchmarks compare with.
  double run_raw(Plan& plan);

  // Measures the device, on a file large enough, at the first large batch and now and then after it; keeps the best
  // figures seen, so that a busy moment does not stay for the store's life.
  void measure(const Plan& plan);
  ReadCost cost() const;
  const ReadCounters& counters() const { return counters_; }
  uint64_t memory() const;

 private:
  struct Read {
    uint64_t place;
    uint32_t pages;
    uint32_t first_want, end_want;
  };
  class Channel;  // a read queue with its buffers
  class Lease;

  std::vector<Read> group(const std::vector<Want>& wants) const;
  // Runs the reads on all channels, calling fn(read, bytes, channel number) as each arrives.
  using Arrived = std::function<void(const Read&, const uint8_t*, size_t)>;
  void execute(const Plan& plan, const std::vector<Read>& reads, const Arrived& fn);
  void drive(const Plan& plan, const std::vector<Read>& reads, std::atomic<size_t>& next, size_t worker,
             const Arrived& fn);
  // One read whose bytes did not come: the pages somebody wants, one by one.
  void read_singly(const Plan& plan, const Read& read, uint8_t* bytes);

  Context& ctx_;
  ThreadPool& pool_;
  ReadCounters counters_;
  mutable std::mutex mutex_;  // protects what follows
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Channel>> idle_;
  int lent_ = 0;
  uint64_t channel_bytes_ = 0;
  ReadCost cost_;
  uint64_t large_batches_ = 0;
};

}  // namespace thermocline::ssd
