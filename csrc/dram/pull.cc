// How rows come in and are given back: pull, unpin, read, push.
#include <algorithm>
#include <bit>
#include <cstring>

#include "dram/copy_rows.h"
#include "dram/tier.h"
#include "util/error.h"

namespace thermocline {
namespace {

constexpr size_t kTaskRows = 4096;
constexpr size_t kCachedKeys = 65536;
constexpr size_t kAhead = 16;       // rows whose memory is asked for before it is used
constexpr size_t kReadAhead = 512;  // bytes of a row that is read
constexpr size_t kTaskKeys = 4096;  // of each_found(): their rows in a buffer are few enough for the TLB

void prefetch_row(const uint8_t* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

enum Found : uint8_t { kMissing = 0, kCopied = 1, kLoading = 2 };  // Scratch::found, while rows are read

}  // namespace

template <typename F>
void DramTier::for_rows(size_t n, const F& f) {
  const size_t tasks = n / kTaskRows + 1;
  pool_.parallel(tasks, [&](size_t t) { f(n * t / tasks, n * (t + 1) / tasks); });
}

// Shards visit the keys of a batch in their own order: parts that stay in the L2 cache meanwhile are faster.
size_t DramTier::cached_keys(const Scratch& s) const { return std::min(s.keys_max, kCachedKeys * pool_.size()); }

// ---- pull

void DramTier::pull(const uint64_t* keys, size_t n, uint32_t* slots) {
  ScratchPool::Lease s(scratch_);
  acquire(*s, keys, n, slots, nullptr);
}

void DramTier::acquire(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, const uint8_t* given) {
  const auto for_parts = [&](size_t part, const auto& f) {
    for (size_t b = 0; b < n; b += part) f(b, std::min(part, n - b));
  };
  std::fill_n(slots, n, kNoSlot);
  try {
    size_t hits = 0;
    bool waits = false;
    // All that is here is pinned before anything is evicted: a batch never evicts its own rows.
    for_parts(cached_keys(s), [&](size_t b, size_t m) { waits |= find_present(s, keys + b, m, slots + b, &hits); });
    if (hits < n) {
      require_room(n, n - hits);
      for (size_t next = 0; next < n;) next = load_missing(s, keys, n, slots, given, next, &waits);
    }
    if (waits) wait_ready(slots, n);
    hits_ += hits;
    misses_ += n - hits;
  } catch (...) {
    for_parts(s.keys_max, [&](size_t b, size_t m) { roll_back(s, slots + b, m); });
    throw;
  }
}

bool DramTier::find_present(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, size_t* hits) {
  std::atomic<size_t> found{0};
  std::atomic<bool> waits{false};
  by_shard(s, keys, nullptr, n, [&](Shard& shard, const Probe* probes, size_t m) {
    bool wait = false;
    found += shard.find_and_pin(probes, m, keys, slots, &wait);
    if (wait) waits = true;
  });
  *hits += found;
  return waits;
}

// As many as the scratch holds, whatever lies between them: the store shall get large requests.
size_t DramTier::load_missing(Scratch& s, const uint64_t* keys, size_t n, uint32_t* slots, const uint8_t* given,
                              size_t next, bool* waits) {
  size_t missing = 0;
  for (; next < n && missing < s.keys_max; ++next) {
    if (slots[next] == kNoSlot) s.picks[missing++] = static_cast<uint32_t>(next);
  }
  if (missing == 0) return next;
  take_slots(s, s.fresh, missing, n);

  std::atomic<bool> wait{false}, full{false};
  by_shard(s, keys, s.picks, missing, [&](Shard& shard, const Probe* probes, size_t m) {
    for (size_t j = 0; j < m; ++j) {
      const uint32_t k = probes[j].index, i = s.picks[k];
      // It may be here by now: loaded by another thread, or twice in this batch.
      const uint32_t slot = shard.find(probes[j].tag, keys[i]);
      if (slot != kNoSlot) {
        shard.pin(slot);
        if (meta()[slot].load_state() != SlotState::kReady) wait = true;
        slots[i] = slot;
      } else if (shard.full()) {
        full = true;
      } else {
        shard.insert(probes[j].tag, keys[i], s.fresh[k]);
        slots[i] = s.fresh[k];
      }
    }
  });

  // Ours to load are those that took the slot meant for them.
  size_t ours = 0, unused = 0;
  for (size_t k = 0; k < missing; ++k) {
    const uint32_t i = s.picks[k], slot = s.fresh[k];
    if (slots[i] != slot) {
      s.fresh[unused++] = slot;
      continue;
    }
    s.keys[ours] = keys[i];
    s.slots[ours] = slot;
    s.picks[ours++] = i;
  }
  give_free(s.fresh, unused);
  try {
    if (full) {
      throw BudgetError("memory tier: too many of the keys share " + std::to_string(std::countr_zero(plan_.shards)) +
                        " bits of their hash for the index of a budget of " + std::to_string(options_.budget) +
                        " bytes; such keys do not occur by chance. Use a larger budget");
    }
    fill(s, ours, given);
  } catch (...) {
    fail_loading(s.slots, ours);
    throw;
  }
  for (size_t j = 0; j < ours; ++j) meta()[s.slots[j]].store_state(SlotState::kReady);
  wake_waiting();
  if (wait) *waits = true;
  return next;
}

void DramTier::fill(Scratch& s, size_t n, const uint8_t* given) {
  if (given) {
    for_rows(n, [&](size_t begin, size_t end) {
      for (size_t j = begin; j < end; ++j) std::memcpy(row(s.slots[j]), given + s.picks[j] * row_bytes_, row_bytes_);
    });
    pushed_ += n;
    return;
  }
  std::memset(s.found, 0, n);
  if (store_) store_->get(s.keys, n, s.found, RowsOut{slab_.as<uint8_t>(), row_bytes_, s.slots});
  std::atomic<size_t> initialised{0};
  for_rows(n, [&](size_t begin, size_t end) {
    size_t count = 0;
    for (size_t j = begin; j < end; ++j) {
      if (s.found[j]) continue;
      initial_.store(s.keys[j], row(s.slots[j]));
      ++count;
    }
    initialised += count;
  });
  initialised_ += initialised;
  from_store_ += n - initialised;
}

// The slots keep their pins: whoever drops the last one frees the slot.
void DramTier::fail_loading(const uint32_t* slots, size_t n) {
  for (size_t j = 0; j < n; ++j) {
    SlotMeta& m = meta()[slots[j]];
    const Hash h = hash(m.key);
    std::lock_guard lock(shards_[h.shard].mutex);
    shards_[h.shard].erase(h.tag, slots[j]);
    m.store_state(SlotState::kFailed);
  }
  wake_waiting();
}

void DramTier::wait_ready(const uint32_t* slots, size_t n) {
  const auto state = [&](size_t i) { return meta()[slots[i]].load_state(); };
  for (size_t i = 0; i < n; ++i) {
    if (state(i) != SlotState::kReady) {
      std::unique_lock lock(wait_mutex_);
      ready_.wait(lock, [&] { return state(i) == SlotState::kReady || state(i) == SlotState::kFailed; });
    }
    if (state(i) == SlotState::kFailed) {
      throw Error("memory tier: key " + std::to_string(meta()[slots[i]].key) +
                  " was being read from the store by another thread, which failed; its own error says why");
    }
  }
}

void DramTier::wake_waiting() {
  {
    std::lock_guard lock(wait_mutex_);
  }  // nobody is between looking at the state and falling asleep
  ready_.notify_all();
}

void DramTier::roll_back(Scratch& s, const uint32_t* slots, size_t n) {
  size_t m = 0;
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] != kNoSlot) s.slots[m++] = slots[i];
  }
  release(s, s.slots, nullptr, m, false);
}

// ---- unpin and the rest

void DramTier::unpin(const uint32_t* slots, size_t n, bool dirty, const uint64_t* keys) {
  ScratchPool::Lease s(small_scratch_);
  const size_t part = cached_keys(*s);
  for (size_t b = 0; b < n; b += part) {
    release(*s, slots + b, keys ? keys + b : nullptr, std::min(part, n - b), dirty);
  }
}

void DramTier::release(Scratch& s, const uint32_t* slots, const uint64_t* keys, size_t n, bool dirty) {
  std::atomic<bool> misuse{false};
  slots_by_shard(s, slots, keys, n, [&](Shard& shard, const Probe* probes, size_t m) {
    for (size_t j = 0; j < m; ++j) {
      __builtin_prefetch(&meta()[slots[probes[std::min(j + 16, m - 1)].index]], 1);
      const uint32_t i = probes[j].index, slot = slots[i];
      if (meta()[slot].pins == 0 || (keys && meta()[slot].key != keys[i])) {
        misuse = true;
        continue;
      }
      if (dirty) set_dirty(slot);
      if (shard.unpin(slot)) {
        meta()[slot].store_state(SlotState::kFree);
        give_free(&slot, 1);
      }
    }
  });
  if (misuse) throw Error("memory tier: unpin of a slot that is not pinned: unpin what pull gave, once");
}

// Shard by shard within a task, so that all of a batch is one parallel section. Where rows lie in the caller's buffer,
// a task's are close together.
template <typename Ahead, typename Each>
void DramTier::each_found(const uint64_t* keys, size_t begin, size_t end, const Ahead& ahead, const Each& each) {
  Probe probes[kTaskKeys];
  uint32_t starts[kMaxShards + 1], likely[2 * kAhead];
  group_one(keys + begin, end - begin, probes, starts);
  for (uint32_t step = 0; step < plan_.shards; ++step) {
    const uint32_t h = (step + static_cast<uint32_t>(begin / kTaskKeys) * 7) % plan_.shards;  // not all at the same one
    const size_t last_of_shard = starts[h + 1];
    if (starts[h] == last_of_shard) continue;
    Shard& shard = shards_[h];
    const uint32_t g = h + 1 == plan_.shards ? 0 : h + 1;
    for (size_t j = starts[g]; j < std::min<size_t>(starts[g] + kAhead, starts[g + 1]); ++j) {
      shards_[g].prefetch(probes[j].tag);
    }
    std::lock_guard lock(shard.mutex);
    const auto finish = [&](size_t first, size_t last) {
      for (size_t j = first; j < last; ++j) {
        const size_t i = begin + probes[j].index;
        each(shard, i, shard.verified(likely[j % (2 * kAhead)], probes[j].tag, keys[i]));
      }
    };
    // A few at a time: their rows are on their way while the next ones are looked for.
    size_t finished = starts[h];
    for (size_t first = finished; first < last_of_shard; first += kAhead) {
      const size_t last = std::min(first + kAhead, last_of_shard);
      for (size_t j = last; j < std::min(last + kAhead, last_of_shard); ++j) shard.prefetch(probes[j].tag);
      for (size_t j = first; j < last; ++j) {
        const uint32_t slot = likely[j % (2 * kAhead)] = shard.likely(probes[j].tag);
        if (slot != kNoSlot) ahead(begin + probes[j].index, slot);
      }
      finish(finished, first);
      finished = first;
    }
    finish(finished, last_of_shard);
  }
}

template <typename F>
void DramTier::for_tasks(size_t n, const F& f) {
  pool_.parallel((n + kTaskKeys - 1) / kTaskKeys,
                 [&](size_t t) { f(t * kTaskKeys, std::min((t + 1) * kTaskKeys, n)); });
}

DramTier::Sources DramTier::read(const uint64_t* keys, size_t n, uint8_t* rows) {
  ScratchPool::Lease s(scratch_);
  Sources sources;
  for (size_t b = 0; b < n; b += s->keys_max, rows += s->keys_max * row_bytes_, keys += s->keys_max) {
    const size_t part = std::min(s->keys_max, n - b);
    const RowCopy copy(rows, row_bytes_);
    std::atomic<size_t> all_copied{0};
    for_tasks(part, [&](size_t begin, size_t end) {
      size_t copied = 0;
      const auto ahead = [&](size_t, uint32_t slot) { prefetch_row(row(slot), std::min(row_bytes_, kReadAhead)); };
      each_found(keys, begin, end, ahead, [&](Shard& shard, size_t i, uint32_t slot) {
        s->found[i] = slot == kNoSlot ? kMissing : kCopied;
        if (slot == kNoSlot) return;
        if (meta()[slot].load_state() == SlotState::kLoading) {
          shard.pin(slot);
          s->found[i] = kLoading;
          s->pinned[i] = slot;
        } else {
          copy(rows + i * row_bytes_, row(slot));
          ++copied;
        }
      });
      copy.settle();
      all_copied += copied;
    });
    if (all_copied == part) {
      sources.here += part;
      continue;
    }
    size_t missing = 0;
    for (size_t i = 0; i < part; ++i) {
      if (s->found[i] == kLoading) {
        const uint32_t slot = s->pinned[i];
        std::unique_lock lock(wait_mutex_);
        ready_.wait(lock, [&] { return meta()[slot].load_state() != SlotState::kLoading; });
        lock.unlock();
        if (meta()[slot].load_state() != SlotState::kFailed) {
          std::memcpy(rows + i * row_bytes_, row(slot), row_bytes_);
          s->found[i] = kCopied;
        }
        release(*s, &slot, nullptr, 1, false);
      }
      if (s->found[i] == kCopied) continue;
      s->keys[missing] = keys[i];
      s->picks[missing++] = static_cast<uint32_t>(i);
    }
    sources.here += part - missing;
    std::memset(s->found, 0, missing);
    if (store_ && missing) store_->get(s->keys, missing, s->found, RowsOut{rows, row_bytes_, s->picks});
    sources.store += static_cast<size_t>(std::count(s->found, s->found + missing, 1));
    for_rows(missing, [&](size_t begin, size_t end) {
      for (size_t j = begin; j < end; ++j) {
        if (s->found[j]) continue;
        initial_.store(s->keys[j], rows + s->picks[j] * row_bytes_);
      }
    });
  }
  reads_ += n;
  read_hits_ += sources.here;
  return sources;
}

void DramTier::push(const uint64_t* keys, size_t n, const uint8_t* rows, bool dirty, bool unique) {
  ScratchPool::Lease s(scratch_);
  for (size_t b = 0; b < n; b += s->keys_max) {
    const size_t part = std::min(s->keys_max, n - b);
    const uint8_t* from = rows + b * row_bytes_;
    if (unique && !store_ && replace_all(keys + b, part, from, dirty)) continue;
    acquire(*s, keys + b, part, s->pinned, from);
    if (unique) {
      const RowCopy copy(slab_.as<uint8_t>(), row_bytes_);
      for_rows(part, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) copy(row(s->pinned[i]), from + i * row_bytes_);
        copy.settle();
      });
    } else {
      // In the order of the batch within a shard: of a repeated key the last row wins.
      by_shard(*s, keys + b, nullptr, part, [&](Shard&, const Probe* probes, size_t m) {
        for (size_t j = 0; j < m; ++j) {
          std::memcpy(row(s->pinned[probes[j].index]), from + probes[j].index * row_bytes_, row_bytes_);
        }
      });
    }
    release(*s, s->pinned, keys + b, part, dirty);
  }
}

// Nothing ever leaves a tier without a store: rows need no pins to be written. False if one of them is not here; then
// others may have been written.
bool DramTier::replace_all(const uint64_t* keys, size_t n, const uint8_t* rows, bool dirty) {
  const RowCopy copy(slab_.as<uint8_t>(), row_bytes_);
  std::atomic<bool> all{true};
  for_tasks(n, [&](size_t begin, size_t end) {
    uint32_t changed[kTaskKeys];
    size_t count = 0;
    const auto ahead = [&](size_t i, uint32_t) { prefetch_row(rows + i * row_bytes_, row_bytes_); };
    each_found(keys, begin, end, ahead, [&](Shard&, size_t i, uint32_t slot) {
      if (slot == kNoSlot || meta()[slot].load_state() != SlotState::kReady) {
        all = false;
        return;
      }
      copy(row(slot), rows + i * row_bytes_);
      changed[count++] = slot;
    });
    copy.settle();
    // Not while rows are copied: a locked instruction waits until every row before it has reached memory.
    for (size_t j = 0; dirty && j < count; ++j) {
      __builtin_prefetch(&dirty_words()[changed[std::min(j + kAhead, count - 1)] / 64], 1);
      set_dirty(changed[j]);
    }
  });
  if (all) hits_ += n;
  return all;
}

void DramTier::copy_out(const uint32_t* slots, size_t n, uint8_t* rows) {
  for_rows(n, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) std::memcpy(rows + i * row_bytes_, row(slots[i]), row_bytes_);
  });
}

void DramTier::write(const uint32_t* slots, size_t n, const uint8_t* rows) {
  for_rows(n, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      std::memcpy(row(slots[i]), rows + i * row_bytes_, row_bytes_);
      set_dirty(slots[i]);
    }
  });
}

}  // namespace thermocline
