// The pinned rows of one pull, with a reference count.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "dram/dedup.h"
#include "dram/horizon.h"
#include "dram/tier.h"

namespace thermocline {

// Unpins the rows when the count reaches zero or the object is deleted. A Python signal handler may interrupt between
// any two bytecodes: therefore pull and ownership are one call, and so is release. Thread safety: all calls may run
// concurrently. Tier and batches must outlive the object.
class Pins {
 public:
  Pins(DramTier& tier, const uint64_t* keys, size_t n) : tier_(tier), pulled_(n) {
    tier_.pull(keys, n, pulled_.data());
    slots_ = pulled_;
  }

  // Rows of batches of a horizon of this tier, batch by batch. The horizon holds the pins of the rows that it has
  // loaded, until the batches are released here; the others are pulled now.
  Pins(DramTier& tier, std::vector<HorizonBatch*> batches) : tier_(tier), batches_(std::move(batches)) {
    size_t total = 0, late = 0;
    for (const HorizonBatch* batch : batches_) total += batch->unique();
    slots_.resize(total);
    try {
      size_t first = 0;
      for (HorizonBatch* batch : batches_) {
        late += batch->take(slots_.data() + first);
        first += batch->unique();
      }
      if (late > 0) pull_late(late);
      tier_.count_hits(total - pulled_.size());
    } catch (...) {
      for (HorizonBatch* batch : batches_) batch->untake();
      throw;
    }
  }

  Pins(const Pins&) = delete;
  ~Pins() {
    if (references_ > 0) unpin();
  }

  // Adds a reference. Returns false if the rows are already unpinned.
  bool acquire() {
    std::lock_guard lock(mutex_);
    if (references_ > 0) ++references_;
    return references_ > 0;
  }

  // Drops a reference; no effect if the rows are already unpinned.
  void release() {
    std::lock_guard lock(mutex_);
    if (references_ > 0 && --references_ == 0) unpin();
  }

  const std::vector<uint32_t>& slots() const { return slots_; }

 private:
  void pull_late(size_t late) {
    std::vector<uint64_t> keys;
    keys.reserve(late);
    size_t at = 0;
    for (const HorizonBatch* batch : batches_) {
      for (size_t u = 0; u < batch->unique(); ++u, ++at) {
        if (slots_[at] == kNoSlot) keys.push_back(batch->key(u));
      }
    }
    if (batches_.size() == 1) {
      pull_unique(keys.data(), late, nullptr);
    } else {  // a key may be late in several batches, and needs one slot
      const WorkingSet unique = Dedup(1).run(keys.data(), late);
      pull_unique(unique.keys.get(), unique.unique, unique.inverse.get());
    }
  }

  // Pulls keys. The i-th late row gets the slot of keys[inverse[i]], or of keys[i].
  void pull_unique(const uint64_t* keys, size_t n, const uint32_t* inverse) {
    pulled_.resize(n);
    tier_.pull(keys, n, pulled_.data());
    size_t i = 0;
    for (uint32_t& slot : slots_) {
      if (slot != kNoSlot) continue;
      slot = pulled_[inverse ? inverse[i] : i];
      ++i;
    }
  }

  void unpin() {
    tier_.unpin(pulled_.data(), pulled_.size(), false);
    for (HorizonBatch* batch : batches_) batch->release();
  }

  DramTier& tier_;
  // Constant after construction.
  std::vector<HorizonBatch*> batches_;
  std::vector<uint32_t> slots_, pulled_;
  std::mutex mutex_;  // protects references_
  size_t references_ = 1;
};

}  // namespace thermocline
