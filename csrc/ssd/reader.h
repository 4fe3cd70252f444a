// Executes read plans: reads pages, verifies them and copies rows, without any lock of the store.
//
// The keys of a lookup are divided into parts (PlanSource). Each worker takes one part after the other, plans it, reads
// its pages through a channel of its own, verifies them and copies the rows (Reader::Worker in reader.cc). Unless parts
// are large (PlanSource::ahead), it plans the next one while pages of the last one are being read, so planning,
// reading, verifying and copying overlap on every thread, and no part is handed from thread to thread. Neighbouring
// pages are read together if the pages between them cost less than another request (ReadCost).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ssd/read_channel.h"
#include "ssd/read_cost.h"
#include "ssd/read_plan.h"
#include "util/row_store.h"
#include "util/thread_pool.h"

namespace thermocline::ssd {

struct ReadCounters {
  std::atomic<uint64_t> keys{0}, pages{0}, reads{0}, bytes{0}, false_pages{0};
  std::atomic<uint64_t> scratch_peak{0};  // working memory of one lookup, the largest so far
};

// Supplies the plans of one lookup. Thread safety: all workers call it at once.
class PlanSource {
 public:
  virtual ~PlanSource() = default;
  // Fills an empty plan with the next part. False: none is left.
  virtual bool next(ReadPlan& plan, PlanScratch& scratch) = 0;
  virtual bool left() const = 0;               // whether next() would return a part
  virtual bool ahead() const { return true; }  // whether a worker may take a part while it reads another one
  // Plans items that were not on their page again: plan.items, before_page and copies are set.
  virtual void plan_again(ReadPlan& plan, PlanScratch& scratch) = 0;
  virtual uint64_t memory() const { return 0; }
};

// Where the rows of a lookup go.
struct RowsWanted {
  const uint64_t* keys;
  uint8_t* found;
  RowsOut rows;
};

// Thread safety: all methods may run concurrently.
class Reader {
 public:
  explicit Reader(Context& ctx) : ctx_(ctx), pool_(ctx.sizes.read_workers), channels_(ctx) {}

  // Threads of a lookup of `keys` keys. Few keys are looked up by the caller alone.
  size_t workers_for(size_t keys) const;
  size_t least_piece() const;  // keys of the smallest piece that one thread takes
  ThreadPool& pool() { return pool_; }

  // Reads all parts on `workers` threads. Copies the rows found and sets their flags. Rows moved or put meanwhile are
  // not older than the rows this call returns. If a worker throws, the others stop.
  void read(PlanSource& source, size_t workers, const RowsWanted& wanted) { read(source, workers, &wanted); }
  // Returns the seconds of the page reads alone, without verifying pages: the lower bound that benchmarks compare with.
  double time_reads(std::vector<ReadPlan> plans, size_t workers);

  // Sets how the lookups of a plan share requests.
  void combine(ReadPlan& plan) const;
  // Call before and after a large lookup: probes the device if due, on one of the files that is large enough.
  void measure(const std::function<std::vector<std::shared_ptr<DataFile>>()>& files);
  void add_lookup(double seconds) { costs_.add_lookup(seconds); }

  ReadCost cost() const { return costs_.get(); }
  uint64_t probes() const { return costs_.probes(); }
  ReadCounters& counters() { return counters_; }
  const ReadCounters& counters() const { return counters_; }
  uint64_t memory() const { return channels_.memory(); }

 private:
  class Worker;

  size_t max_in_flight(size_t workers) const;  // reads of each worker

  // `wanted` null: pages are not verified.
  void read(PlanSource& source, size_t workers, const RowsWanted* wanted);
  ReadCost probe(const std::shared_ptr<DataFile>& file);

  Context& ctx_;
  ThreadPool pool_;
  ReadChannels channels_;
  ReadCounters counters_;
  ReadCosts costs_;
};

}  // namespace thermocline::ssd
