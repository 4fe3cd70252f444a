// Executes read plans: reads pages, verifies them and copies rows, without any lock of the store.
//
// Several workers share the requests of a plan. Each worker leases a Channel (a read queue and its buffers), claims
// blocks of requests and keeps the queue full (Reader::Worker in reader.cc). Neighbouring pages are read together if
// the pages between them cost less than another request (ReadCost, measured on the device).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "ssd/read_plan.h"
#include "util/row_store.h"
#include "util/thread_pool.h"

namespace thermocline::ssd {

struct ReadCost {
  double read_us = 0, page_us = 0;  // per request, per page; 0: not measured yet
  uint32_t gap() const;             // unused pages that are cheaper to read than another request
};

struct ReadCounters {
  std::atomic<uint64_t> keys{0}, pages{0}, reads{0}, bytes{0}, false_pages{0};
};

// Thread safety: all methods may run concurrently; they share a fixed number of channels.
// Invariants: 1. At most sizes.read_workers channels exist, so the memory of read buffers is bounded. 2. A channel with
// reads in flight is never returned to idle_: it is destroyed, which waits for them.
class Reader {
 public:
  Reader(Context& ctx, ThreadPool& pool);
  ~Reader();

  // Copies the rows found and sets their `found` flags. Returns a plan of the items still to look up on older pages,
  // usually none. The caller plans them again under the index lock; rows moved or put meanwhile are not older than the
  // rows this call may return.
  ReadPlan run(const ReadPlan& plan, const uint64_t* keys, uint8_t* found, RowsOut rows);
  // Returns the seconds of the page reads alone, without verifying pages: the lower bound that benchmarks compare with.
  double time_reads(const ReadPlan& plan);

  // Measures the device at the first large batch and periodically after it, on a file of the plan that is large enough.
  // Keeps the lowest costs measured, so that a temporary load has no lasting effect.
  void measure(const ReadPlan& plan);
  ReadCost cost() const;
  const ReadCounters& counters() const { return counters_; }
  uint64_t memory() const;

 private:
  class Channel;
  class Lease;
  class Worker;

  std::vector<ReadRequest> requests_for(const ReadPlan& plan) const;
  // Called when the pages of a request have been read, on the thread of worker number `worker`.
  using Arrived = std::function<void(const ReadRequest&, const uint8_t* bytes, size_t worker)>;
  void execute(const ReadPlan& plan, const std::vector<ReadRequest>& requests, const Arrived& arrived);
  double measure_requests(const ReadPlan& plan, uint32_t file, uint32_t pages_per_read, uint64_t salt);

  Context& ctx_;
  ThreadPool& pool_;
  ReadCounters counters_;
  mutable std::mutex mutex_;  // protects all members below
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Channel>> idle_;
  int leased_ = 0;
  uint64_t channel_bytes_ = 0;
  ReadCost cost_;
  uint64_t large_batches_ = 0;
};

}  // namespace thermocline::ssd
