// Pinning: pull() and unpin(). A pull pins resident rows first, then loads the missing ones in parts.
#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "dram/tier.h"
#include "util/error.h"

namespace thermocline {
namespace {

constexpr size_t kCachedKeys = 65536;
constexpr size_t kPrefetchAhead = 16;

}  // namespace

// Shards visit the keys of a batch in different orders. Parts that fit the L2 cache are faster.
size_t DramTier::cached_keys(const Scratch& s) const { return std::min(s.keys_max(), kCachedKeys * pool_.size()); }

// ---- pull

void DramTier::pull(const uint64_t* keys, size_t n, uint32_t* slots, Purpose purpose) {
  ScratchPool::Lease s(scratch_);
  acquire(*s, keys, n, slots, nullptr, purpose);
}

void DramTier::acquire(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, const uint8_t* given,
                       Purpose purpose) {
  while (!try_acquire(s, keys, n, slots, given, purpose)) {
  }
}

bool DramTier::try_acquire(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, const uint8_t* given,
                           Purpose purpose) {
  const auto for_parts = [&](size_t part, const auto& f) {
    for (size_t b = 0; b < n; b += part) f(b, std::min(part, n - b));
  };
  std::fill_n(slots, n, kNoSlot);
  try {
    Progress progress;
    // All resident rows are pinned before anything is evicted, so a batch never evicts its own rows.
    for_parts(cached_keys(s), [&](size_t b, size_t m) { pin_resident(s, keys + b, m, slots + b, &progress); });
    if (progress.hits < n) {
      require_capacity(n, n - progress.hits);
      for (size_t next = 0; next < n;) next = load_missing(s, keys, n, slots, given, next, purpose, &progress);
    }
    if (progress.must_wait && !wait_ready(slots, n)) {
      for_parts(s.keys_max(), [&](size_t b, size_t m) { roll_back(s, slots + b, m); });
      return false;
    }
    count(progress, n, purpose);
  } catch (...) {
    for_parts(s.keys_max(), [&](size_t b, size_t m) { roll_back(s, slots + b, m); });
    throw;
  }
  return true;
}

void DramTier::count(const Progress& progress, size_t n, Purpose purpose) {
  const size_t misses = n - progress.hits;
  if (purpose == Purpose::kAheadOfRead) {
    read_ahead_ += progress.from_store;
    return;
  }
  if (purpose == Purpose::kAheadOfPull) {
    loaded_ahead_ += misses;
  } else {
    hits_ += progress.hits;
  }
  misses_ += misses;
  from_store_ += progress.from_store;
  initialised_ += progress.initialised;
  pushed_ += progress.pushed;
}

void DramTier::pin_resident(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, Progress* progress) {
  std::atomic<size_t> hits{0};
  std::atomic<bool> must_wait{false};
  for_key_groups(s, keys, nullptr, n, [&](Shard& shard, const Probe* probes, size_t m) {
    bool wait = false;
    hits += shard.find_and_pin(probes, m, keys, slots, &wait);
    if (wait) must_wait = true;
  });
  progress->hits += hits;
  progress->must_wait |= must_wait;
}

// Loads missing rows from position `next` on, as many as the scratch holds, so that the store gets large requests.
// Returns the position after the last one examined.
size_t DramTier::load_missing(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, const uint8_t* given,
                              size_t next, Purpose purpose, Progress* progress) {
  const Scratch::MissingRows missing_rows = s.missing_rows();
  size_t missing = 0;
  for (; next < n && missing < s.keys_max(); ++next) {
    if (slots[next] == kNoSlot) missing_rows.positions[missing++] = static_cast<uint32_t>(next);
  }
  if (missing == 0) return next;
  reserve_slots(s, missing_rows.free_slots, missing, n);
  const Inserted inserted = insert_missing(s, keys, missing, slots, progress);
  size_t loading = select_own_loads(s, keys, missing, slots);
  const Scratch::RowLoads loads = s.row_loads();
  try {
    if (inserted == Inserted::kNoMemory) throw std::bad_alloc();
    if (inserted == Inserted::kIndexFull) {
      throw BudgetError("DRAM tier: too many keys share " + std::to_string(std::countr_zero(plan_.shards)) +
                        " bits of their hash for the index of a budget of " + std::to_string(options_.budget) +
                        " bytes; such keys do not occur by chance. Raise the budget (tiers.mem)");
    }
    fill_rows(loads, loading, given, progress);
  } catch (...) {
    fail_loading(loads.slots, loading);
    throw;
  }
  if (purpose == Purpose::kAheadOfRead) loading = drop_unknown(s, loading, slots);
  for (size_t j = 0; j < loading; ++j) {
    SlotMeta& m = meta()[loads.slots[j]];
    if (m.end_loading(SlotState::kReady)) continue;
    initial_.store(m.key, row(loads.slots[j]));  // erased: the store may have returned the old row
    m.store_state(SlotState::kReady);
  }
  notify_waiters();
  return next;
}

// Inserts the missing keys into the index, each with its reserved slot. A key that became resident since (loaded by
// another thread, or repeated in this batch) is pinned instead; its reserved slot stays unused.
DramTier::Inserted DramTier::insert_missing(Scratch& s, const uint64_t* keys, size_t missing, uint32_t* slots,
                                            Progress* progress) {
  const Scratch::MissingRows rows = s.missing_rows();
  std::atomic<bool> must_wait{false}, full{false}, no_memory{false};
  for_key_groups(s, keys, rows.positions, missing, [&](Shard& shard, const Probe* probes, size_t m) {
    if (!shard.reserve(m)) {
      no_memory = true;
      return;
    }
    for (size_t j = 0; j < m; ++j) {
      const uint32_t k = probes[j].index, i = rows.positions[k];
      const uint32_t slot = shard.find(probes[j].tag, keys[i]);
      if (slot != kNoSlot) {
        shard.pin(slot);
        if (!is_loaded(meta()[slot].load_state())) must_wait = true;
        slots[i] = slot;
      } else if (shard.full()) {
        full = true;
      } else {
        shard.insert(probes[j].tag, keys[i], rows.free_slots[k]);
        slots[i] = rows.free_slots[k];
      }
    }
  });
  progress->must_wait |= must_wait;
  return no_memory ? Inserted::kNoMemory : full ? Inserted::kIndexFull : Inserted::kAll;
}

// Fills row_loads() with the keys that took their reserved slot: this call loads them. Returns their number and frees
// the other reserved slots.
size_t DramTier::select_own_loads(Scratch& s, const uint64_t* keys, size_t missing, const uint32_t* slots) {
  const Scratch::MissingRows rows = s.missing_rows();
  const Scratch::RowLoads loads = s.row_loads();
  size_t loading = 0, unused = 0;
  for (size_t k = 0; k < missing; ++k) {
    const uint32_t i = rows.positions[k], slot = rows.free_slots[k];
    if (slots[i] != slot) {
      rows.free_slots[unused++] = slot;
      continue;
    }
    loads.keys[loading] = keys[i];
    loads.slots[loading] = slot;
    loads.positions[loading++] = i;
  }
  push_free(rows.free_slots, unused);
  return loading;
}

// Evaluation inserts no row: removes the keys that the store does not have. Returns the number of the others.
size_t DramTier::drop_unknown(Scratch& s, size_t loading, uint32_t* slots) {
  const Scratch::RowLoads loads = s.row_loads();
  uint32_t* const unknown = s.missing_rows().free_slots;
  size_t known = 0, dropped = 0;
  for (size_t j = 0; j < loading; ++j) {
    if (loads.in_store[j]) {
      loads.slots[known++] = loads.slots[j];
    } else {
      unknown[dropped++] = loads.slots[j];
      slots[loads.positions[j]] = kNoSlot;
    }
  }
  fail_loading(unknown, dropped);
  release(s, unknown, nullptr, dropped, false);
  return known;
}

void DramTier::fill_rows(const Scratch::RowLoads& loads, size_t n, const uint8_t* given, Progress* progress) {
  if (given) {
    for_rows(n, [&](size_t begin, size_t end) {
      for (size_t j = begin; j < end; ++j) {
        std::memcpy(row(loads.slots[j]), given + loads.positions[j] * row_bytes_, row_bytes_);
      }
    });
    progress->pushed += n;
    return;
  }
  std::memset(loads.in_store, 0, n);
  if (store_) store_->get(loads.keys, n, loads.in_store, RowsOut{slab_.as<uint8_t>(), stride_, loads.slots});
  std::atomic<size_t> initialised{0};
  for_rows(n, [&](size_t begin, size_t end) {
    size_t count = 0;
    for (size_t j = begin; j < end; ++j) {
      if (loads.in_store[j]) continue;
      initial_.store(loads.keys[j], row(loads.slots[j]));
      ++count;
    }
    initialised += count;
  });
  progress->initialised += initialised;
  progress->from_store += n - initialised;
}

// Removes the keys from the index. The slots keep their pins; the release of the last pin frees the slot.
void DramTier::fail_loading(const uint32_t* slots, size_t n) {
  for (size_t j = 0; j < n; ++j) {
    SlotMeta& m = meta()[slots[j]];
    const Hash h = hash(m.key);
    std::lock_guard lock(shards_[h.shard].mutex);
    shards_[h.shard].erase(h.tag, slots[j]);
    m.store_state(SlotState::kFailed);
  }
  notify_waiters();
}

bool DramTier::wait_ready(const uint32_t* slots, size_t n) {
  const auto state = [&](size_t i) { return meta()[slots[i]].load_state(); };
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] == kNoSlot) continue;  // dropped: the store does not have the row
    if (!is_loaded(state(i))) {
      std::unique_lock lock(wait_mutex_);
      ready_.wait(lock, [&] { return is_loaded(state(i)) || state(i) == SlotState::kFailed; });
    }
    if (state(i) == SlotState::kFailed) return false;
  }
  return true;
}

void DramTier::notify_waiters() {
  {
    std::lock_guard lock(wait_mutex_);
  }  // no waiter is between its check of the state and its sleep
  ready_.notify_all();
}

void DramTier::roll_back(Scratch& s, const uint32_t* slots, size_t n) {
  uint32_t* const pinned = s.rollback_slots();
  size_t m = 0;
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] != kNoSlot) pinned[m++] = slots[i];
  }
  release(s, pinned, nullptr, m, false);
}

// ---- unpin

void DramTier::unpin(const uint32_t* slots, size_t n, bool dirty, const uint64_t* keys, const uint8_t* batches) {
  ScratchPool::Lease s(small_scratch_);
  const size_t part = cached_keys(*s);
  for (size_t b = 0; b < n; b += part) {
    release(*s, slots + b, keys ? keys + b : nullptr, std::min(part, n - b), dirty, batches ? batches + b : nullptr);
  }
  continue_reserve();
}

void DramTier::release(Scratch& s, const uint32_t* slots, const uint64_t* keys, size_t n, bool dirty,
                       const uint8_t* batches, bool by_visits) {
  std::atomic<bool> misuse{false};
  for_slot_groups(s, slots, keys, n, [&](Shard& shard, const Probe* probes, size_t m) {
    for (size_t j = 0; j < m; ++j) {
      __builtin_prefetch(&meta()[slots[probes[std::min(j + kPrefetchAhead, m - 1)].index]], 1);
      const uint32_t i = probes[j].index, slot = slots[i];
      if (meta()[slot].pins == 0 || (keys && meta()[slot].key != keys[i])) {
        misuse = true;
        continue;
      }
      if (dirty) set_dirty(slot);
      if (shard.unpin(slot, batches ? batches[i] : by_visits)) {
        meta()[slot].store_state(SlotState::kFree);
        push_free(&slot, 1);
      }
    }
  });
  if (misuse) throw Error("DRAM tier: unpin of a slot that is not pinned; unpin each slot of a pull once");
}

}  // namespace thermocline
