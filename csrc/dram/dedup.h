// Deduplication: the unique keys of a batch of ids, and the positions of each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "util/huge_buffer.h"
#include "util/recycled.h"
#include "util/thread_pool.h"

namespace thermocline {

// All arrays depend on the ids only, not on the number of threads.
struct WorkingSet {
  size_t ids = 0;
  size_t unique = 0;
  Recycled<uint64_t> keys;     // [unique] in order of first occurrence
  Recycled<uint32_t> inverse;  // [ids] keys[inverse[i]] == ids[i]
  Recycled<uint32_t> starts;   // [unique + 1] key u occurs at order[starts[u]] .. order[starts[u + 1] - 1]
  Recycled<uint32_t> order;    // [ids] positions grouped by key, ascending within a key
};

// A working set in memory of others.
struct WorkingSetView {
  size_t ids, unique;
  const uint64_t* keys;
  const uint32_t* inverse;
  const uint32_t* starts;
  const uint32_t* order;
};

// Keeps its working memory (25 bytes per id of the largest batch so far) and its threads between calls.
// Thread safety: all calls may run concurrently; they are executed one at a time.
class Dedup {
 public:
  explicit Dedup(int threads) : pool_(threads) {}
  WorkingSet run(const uint64_t* ids, size_t n);

 private:
  ThreadPool pool_;
  std::mutex mutex_;  // protects memory_
  HugeBuffer memory_;
};

}  // namespace thermocline
