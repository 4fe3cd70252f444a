// Rows by key: read, push, erase; and copies of pinned rows: copy_out, write.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "dram/copy_rows.h"
#include "dram/kernels.h"
#include "dram/tier.h"

namespace thermocline {
namespace {

constexpr size_t kPrefetchAhead = 16;      // lookups whose memory is prefetched before use
constexpr size_t kLookupAhead = 32;        // the same for lookups without mutexes, which take less time
constexpr size_t kPrefetchRowBytes = 512;  // at most, of a row that is read
constexpr size_t kUnlockedKeys = 1024;     // of one task without mutexes: small, so that threads end together
constexpr size_t kEraseKeys = 16384;       // of one task of an erase
constexpr size_t kTaskKeys = 4096;         // of one lookup task: few enough for the TLB to cover their rows in a buffer

void prefetch_row(const uint8_t* row, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

// Loads the address translation of a row that streaming stores will write. Reads another line of its page: a streaming
// store to a line that is in a cache is slow.
void prefetch_page(const uint8_t* row) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(row) ^ 2048));
}

}  // namespace

// ---- lookups without pins

// Calls visit(shard, i, slot) for the keys i of [begin, end), at most kTaskKeys, under the shard's mutex; slot is
// kNoSlot for a key that is not resident. Calls prefetch(slot) some lookups earlier, with a slot that is only likely.
// One task handles its keys shard by shard, so that a batch is one parallel section, and the rows of a task are close
// together in the caller's buffer.
template <typename Prefetch, typename Visit>
void DramTier::for_each_lookup(const uint64_t* keys, size_t begin, size_t end, const Prefetch& prefetch,
                               const Visit& visit) {
  Probe probes[kTaskKeys];
  uint32_t starts[kMaxShards + 1], likely[2 * kPrefetchAhead];  // likely: ring buffer over the probes
  sort_by_shard(keys + begin, end - begin, probes, starts);
  for (uint32_t k = 0; k < plan_.shards; ++k) {
    // Tasks start at different shards, to avoid contention.
    const uint32_t h = (k + static_cast<uint32_t>(begin / kTaskKeys) * 7) % plan_.shards;
    const size_t shard_end = starts[h + 1];
    if (starts[h] == shard_end) continue;
    Shard& shard = shards_[h];
    const uint32_t g = h + 1 == plan_.shards ? 0 : h + 1;
    for (size_t j = starts[g]; j < std::min<size_t>(starts[g] + kPrefetchAhead, starts[g + 1]); ++j) {
      shards_[g].prefetch(probes[j].tag);
    }
    std::lock_guard lock(shard.mutex);
    const auto finish = [&](size_t first, size_t last) {
      for (size_t j = first; j < last; ++j) {
        const size_t i = begin + probes[j].index;
        visit(shard, i, shard.verified(likely[j % (2 * kPrefetchAhead)], probes[j].tag, keys[i]));
      }
    };
    // A block at a time: its rows are prefetched while the next block is looked up.
    size_t finished = starts[h];
    for (size_t first = finished; first < shard_end; first += kPrefetchAhead) {
      const size_t last = std::min(first + kPrefetchAhead, shard_end);
      for (size_t j = last; j < std::min(last + kPrefetchAhead, shard_end); ++j) shard.prefetch(probes[j].tag);
      for (size_t j = first; j < last; ++j) {
        const uint32_t slot = likely[j % (2 * kPrefetchAhead)] = shard.likely(probes[j].tag);
        if (slot != kNoSlot) prefetch(slot);
      }
      finish(finished, first);
      finished = first;
    }
    finish(finished, shard_end);
  }
}

// for_each_lookup for a tier that evicts nothing, in the order of the keys: takes a mutex only for a key whose row is
// not found without one. At most kUnlockedKeys keys. The caller excludes erase().
template <typename Prefetch, typename Visit>
void DramTier::for_each_unlocked(const uint64_t* keys, size_t begin, size_t end, const Prefetch& prefetch,
                                 const Visit& visit) {
  uint64_t hashes[kUnlockedKeys];
  uint32_t slots[kUnlockedKeys];
  const size_t n = end - begin, mask = plan_.shards - 1;
  kernels().mem_hash_keys(keys + begin, n, hashes);
  const auto shard_of = [&](size_t j) -> Shard& { return shards_[hashes[j] >> 56 & mask]; };
  const auto tag_of = [&](size_t j) { return static_cast<uint32_t>(hashes[j]); };
  // All lookups before the first copy: that is faster than one after another, and than lookups between copies.
  for (size_t k = 0; k < n + 2 * kLookupAhead; ++k) {
    if (k < n) shard_of(k).prefetch(tag_of(k));
    if (k < kLookupAhead) continue;
    if (const size_t j = k - kLookupAhead; j < n) slots[j] = shard_of(j).peek(tag_of(j));
    if (k < 2 * kLookupAhead) continue;
    const size_t j = k - 2 * kLookupAhead;
    if (slots[j] != kNoSlot && !meta()[slots[j]].holds(keys[begin + j])) slots[j] = kNoSlot;
  }
  for (size_t k = 0; k < n + kPrefetchAhead; ++k) {
    if (k < n && slots[k] != kNoSlot) prefetch(slots[k]);
    if (k < kPrefetchAhead) continue;
    const size_t j = k - kPrefetchAhead;
    if (slots[j] != kNoSlot) {
      visit(shard_of(j), begin + j, slots[j]);
    } else {
      std::lock_guard lock(shard_of(j).mutex);
      visit(shard_of(j), begin + j, shard_of(j).find(tag_of(j), keys[begin + j]));
    }
  }
}

template <typename F>
void DramTier::for_lookup_tasks(size_t n, const F& f) {
  const size_t task = store_ ? kTaskKeys : kUnlockedKeys;
  pool_.parallel((n + task - 1) / task, [&](size_t t) { f(t * task, std::min((t + 1) * task, n)); });
}

// ---- read

DramTier::Sources DramTier::read(const uint64_t* keys, size_t n, uint8_t* rows, uint32_t* slots) {
  ScratchPool::Lease s(scratch_);
  Sources sources;
  for (size_t b = 0; b < n; b += s->keys_max()) {
    const size_t part = std::min(s->keys_max(), n - b);
    const Sources from = read_part(*s, keys + b, part, rows + b * row_bytes_, slots ? slots + b : nullptr);
    sources.resident += from.resident;
    sources.store += from.store;
  }
  reads_ += n;
  read_hits_ += sources.resident;
  read_from_store_ += sources.store;
  return sources;
}

// First pass: copies the resident rows and notes the state of every key. Second pass: waits for rows that other threads
// load, and reads the remaining keys from the store.
DramTier::Sources DramTier::read_part(Scratch& s, const uint64_t* keys, size_t n, uint8_t* rows, uint32_t* slots) {
  using ReadState = Scratch::ReadState;
  const Scratch::ReadStatus lookups = s.read_status();
  if (copy_resident(lookups, keys, n, rows, slots) == n) return {n, 0};
  const Scratch::StoreReads reads = s.store_reads();
  size_t missing = 0;
  for (size_t i = 0; i < n; ++i) {
    if (lookups.status[i] == ReadState::kCopied) continue;
    if (lookups.status[i] == ReadState::kLoading &&
        copy_when_loaded(s, lookups.loading_slots[i], rows + i * row_bytes_)) {
      continue;
    }
    reads.keys[missing] = keys[i];
    reads.positions[missing++] = static_cast<uint32_t>(i);
  }
  return {n - missing, read_from_store(reads, missing, rows)};
}

// Returns the number of rows copied. Rows that are being loaded are pinned instead.
size_t DramTier::copy_resident(const Scratch::ReadStatus& lookups, const uint64_t* keys, size_t n, uint8_t* rows,
                               uint32_t* slots) {
  using ReadState = Scratch::ReadState;
  const RowCopy copy(rows, row_bytes_);
  std::atomic<size_t> all_copied{0};
  std::shared_lock no_erase(erase_mutex_);
  for_lookup_tasks(n, [&](size_t begin, size_t end) {
    size_t copied = 0;
    const auto prefetch = [&](uint32_t slot) { prefetch_row(row(slot), std::min(row_bytes_, kPrefetchRowBytes)); };
    const auto visit = [&](Shard& shard, size_t i, uint32_t slot) {
      lookups.status[i] = slot == kNoSlot ? ReadState::kMissing : ReadState::kCopied;
      if (slots) slots[i] = kNoSlot;
      if (slot == kNoSlot) return;
      if (is_loading(meta()[slot].load_state())) {
        shard.pin(slot);
        lookups.status[i] = ReadState::kLoading;
        lookups.loading_slots[i] = slot;
      } else {
        copy(rows + i * row_bytes_, row(slot));
        if (slots && keeps_slots()) slots[i] = slot;
        ++copied;
      }
    };
    if (store_) for_each_lookup(keys, begin, end, prefetch, visit);
    else for_each_unlocked(keys, begin, end, prefetch, visit);
    copy.fence();
    all_copied += copied;
  });
  return all_copied;
}

// Waits until another thread has loaded the pinned slot, copies the row and releases the pin. False: loading failed.
bool DramTier::copy_when_loaded(Scratch& s, uint32_t slot, uint8_t* to) {
  {
    std::unique_lock lock(wait_mutex_);
    ready_.wait(lock, [&] { return !is_loading(meta()[slot].load_state()); });
  }
  const bool loaded = meta()[slot].load_state() != SlotState::kFailed;
  if (loaded) {
    std::shared_lock no_erase(erase_mutex_);
    std::memcpy(to, row(slot), row_bytes_);
  }
  release(s, &slot, nullptr, 1, false);
  return loaded;
}

// Keys that the store does not have get initial rows. Returns the number of rows that the store had.
size_t DramTier::read_from_store(const Scratch::StoreReads& reads, size_t n, uint8_t* rows) {
  std::memset(reads.in_store, 0, n);
  if (store_ && n) store_->get(reads.keys, n, reads.in_store, RowsOut{rows, row_bytes_, reads.positions});
  for_rows(n, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) {
      if (reads.in_store[j]) continue;
      initial_.store(reads.keys[j], rows + reads.positions[j] * row_bytes_);
    }
  });
  return static_cast<size_t>(std::count(reads.in_store, reads.in_store + n, 1));
}

// ---- push

void DramTier::push(const uint64_t* keys, size_t n, const uint8_t* rows, bool dirty, bool unique, KnownSlots known) {
  ScratchPool::Lease s(scratch_);
  uint32_t* const slots = s->pushed_slots();
  for (size_t b = 0; b < n; b += s->keys_max()) {
    const size_t part = std::min(s->keys_max(), n - b);
    const uint8_t* from = rows + b * row_bytes_;
    if (unique && !store_) {
      const bool replaced = known.slots ? replace_known(keys + b, part, from, dirty, {known.slots + b, known.version})
                                        : replace_resident(keys + b, part, from, dirty);
      if (replaced) continue;
    }
    acquire(*s, keys + b, part, slots, from);
    if (unique) {
      const RowCopy copy(slab_.as<uint8_t>(), row_bytes_);
      for_rows(part, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) copy(row(slots[i]), from + i * row_bytes_);
        copy.fence();
      });
    } else {
      // Groups keep the batch order within a shard: the last row of a repeated key wins.
      for_key_groups(*s, keys + b, nullptr, part, [&](Shard&, const Probe* probes, size_t m) {
        for (size_t j = 0; j < m; ++j) {
          std::memcpy(row(slots[probes[j].index]), from + probes[j].index * row_bytes_, row_bytes_);
        }
      });
    }
    // By visits: most come from the tier above, which keeps rows that are needed soon. An LRU would protect each of
    // them from eviction, also those that are seldom needed.
    release(*s, slots, keys + b, part, dirty, nullptr, true);
  }
}

// Overwrites rows without pins: a tier without a store evicts nothing. Returns false if a key is not resident; other
// rows may have been written then.
bool DramTier::replace_resident(const uint64_t* keys, size_t n, const uint8_t* rows, bool dirty) {
  const RowCopy copy(slab_.as<uint8_t>(), row_bytes_);
  std::atomic<bool> all_resident{true};
  std::shared_lock no_erase(erase_mutex_);
  for_lookup_tasks(n, [&](size_t begin, size_t end) {
    if (!all_resident.load(std::memory_order_relaxed)) return;  // all rows are pushed by other means
    uint32_t changed[kUnlockedKeys];
    size_t count = 0;
    const auto prefetch = [&](uint32_t slot) { prefetch_page(row(slot)); };
    for_each_unlocked(keys, begin, end, prefetch, [&](Shard&, size_t i, uint32_t slot) {
      if (slot == kNoSlot || meta()[slot].load_state() != SlotState::kReady) {
        all_resident = false;
        return;
      }
      copy(row(slot), rows + i * row_bytes_);
      changed[count++] = slot;
    });
    copy.fence();
    if (dirty) set_dirty_rows(changed, count);
  });
  if (all_resident) hits_ += n;
  return all_resident;
}

// Not in a loop of copies: an atomic read-modify-write waits until all earlier streaming stores have completed.
void DramTier::set_dirty_rows(const uint32_t* slots, size_t n) {
  for (size_t j = 0; j < n; ++j) {
    __builtin_prefetch(&dirty_words()[slots[std::min(j + kPrefetchAhead, n - 1)] / 64], 1);
    set_dirty(slots[j]);
  }
}

// replace_resident with slots that read() has returned: looks a key up only if its slot is unknown or may have another.
bool DramTier::replace_known(const uint64_t* keys, size_t n, const uint8_t* rows, bool dirty, KnownSlots known) {
  const RowCopy copy(slab_.as<uint8_t>(), row_bytes_);
  std::atomic<bool> all_resident{true};
  std::shared_lock no_erase(erase_mutex_);
  const bool valid = known.version == slots_version_;
  for_lookup_tasks(n, [&](size_t begin, size_t end) {
    if (!all_resident.load(std::memory_order_relaxed)) return;
    uint32_t slots[kUnlockedKeys];
    for (size_t i = begin; i < end; ++i) {
      const uint32_t ahead = known.slots[std::min(i + kLookupAhead, end - 1)];
      if (!valid && ahead < plan_.capacity) __builtin_prefetch(&meta()[ahead]);
      slots[i - begin] = known_slot(keys[i], known.slots[i], valid);
      if (slots[i - begin] == kNoSlot) {
        all_resident = false;
        return;
      }
    }
    for (size_t i = begin; i < end; ++i) {
      prefetch_page(row(slots[std::min(i + kPrefetchAhead, end - 1) - begin]));
      copy(row(slots[i - begin]), rows + i * row_bytes_);
    }
    copy.fence();
    if (dirty) set_dirty_rows(slots, end - begin);
  });
  if (all_resident) hits_ += n;
  return all_resident;
}

// The slot of a key that is kReady, or kNoSlot. `slot`: where it was; `valid`: where it is, unless kNoSlot.
uint32_t DramTier::known_slot(uint64_t key, uint32_t slot, bool valid) {
  if (slot < plan_.capacity && (valid || meta()[slot].holds(key))) return slot;
  const Hash h = hash(key);
  std::lock_guard lock(shards_[h.shard].mutex);
  const uint32_t found = shards_[h.shard].find(h.tag, key);
  return found != kNoSlot && meta()[found].load_state() == SlotState::kReady ? found : kNoSlot;
}

uint64_t DramTier::next_slots_version() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// ---- erase

void DramTier::for_free_shards_first(const uint64_t* keys, size_t n, const ShardTask& f) {
  std::vector<Probe> probes(n);
  uint32_t starts[kMaxShards + 1];
  sort_by_shard(keys, n, probes.data(), starts);
  const auto call = [&](uint32_t h) { f(shards_[h], probes.data() + starts[h], starts[h + 1] - starts[h]); };
  std::vector<uint32_t> held;
  for (uint32_t h = 0; h < plan_.shards; ++h) {
    if (starts[h] == starts[h + 1]) continue;
    std::unique_lock lock(shards_[h].mutex, std::try_to_lock);
    if (lock) call(h);
    else held.push_back(h);
  }
  for (uint32_t h : held) {
    std::lock_guard lock(shards_[h].mutex);
    call(h);
  }
}

// Calls f(shard, tag, key, slot) for each key that is resident, under the mutex of its shard. Needs no Scratch: pulls
// keep theirs while they wait for the store.
template <typename F>
void DramTier::for_resident(const uint64_t* keys, size_t n, const F& f) {
  const size_t tasks = n / kEraseKeys + 1;
  pool_.parallel(tasks, [&](size_t t) {
    const uint64_t* const part = keys + n * t / tasks;
    for_free_shards_first(part, n * (t + 1) / tasks - n * t / tasks, [&](Shard& shard, const Probe* probes, size_t m) {
      for (size_t j = 0; j < m; ++j) {
        shard.prefetch(probes[std::min(j + kPrefetchAhead, m - 1)].tag);
        const uint64_t key = part[probes[j].index];
        const uint32_t slot = shard.find(probes[j].tag, key);
        if (slot != kNoSlot) f(shard, probes[j].tag, key, slot);
      }
    });
  });
}

void DramTier::end_writes(const uint64_t* keys, size_t n) {
  // A flush() writes rows that stay kReady: only their bits show it.
  const auto writing = [&](uint32_t slot) {
    return is_written(meta()[slot].load_state()) ||
           (written_words()[slot / 64].load(std::memory_order_acquire) >> (slot % 64) & 1);
  };
  for (std::vector<uint32_t> written;; written.clear()) {
    std::mutex mutex;
    for_resident(keys, n, [&](Shard&, uint32_t, uint64_t, uint32_t slot) {
      clear_dirty(slot);
      if (!writing(slot)) return;
      std::lock_guard lock(mutex);
      written.push_back(slot);
    });
    if (written.empty()) return;
    // Then once more: rows of a write that failed are dirty again.
    for (uint32_t slot : written) {
      std::unique_lock lock(wait_mutex_);
      ready_.wait(lock, [&] { return !writing(slot); });
    }
  }
}

// A pull inserts a key into the index before it reads the store. So a pull that may have read the row before the caller
// removed it from the store is over, or its slot is kLoading here: it becomes kErased, and no call waits for a load.
size_t DramTier::erase(const uint64_t* keys, size_t n) {
  std::lock_guard no_copies(erase_mutex_);
  slots_version_ = next_slots_version();
  std::atomic<size_t> erased{0};
  for_resident(keys, n, [&](Shard& shard, uint32_t tag, uint64_t key, uint32_t slot) {
    ++erased;
    clear_dirty(slot);
    SlotMeta& m = meta()[slot];
    if (m.end_loading(SlotState::kErased) || is_loading(m.load_state())) return;
    if (m.pins > 0) {
      initial_.store(key, row(slot));
      return;
    }
    if (store_) shard.unlink(slot);  // without a store rows are in no list
    shard.erase(tag, slot);
    m.store_state(SlotState::kFree);
    push_free(&slot, 1);
  });
  return erased;
}

// ---- pinned rows

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
