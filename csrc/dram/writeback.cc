// How slots become free and rows reach the store; and the tier's books.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "dram/tier.h"
#include "util/error.h"

namespace thermocline {
namespace {

constexpr size_t kEvictBytes = 1 << 20;  // of rows at least, in one go: puts shall be large
constexpr size_t kBlockSlots = 256;

}  // namespace

// ---- free slots

size_t DramTier::take_free(uint32_t* slots, size_t n) {
  std::lock_guard lock(free_mutex_);
  size_t got = 0;
  for (; got < n && free_listed_ > 0; ++got, --free_listed_) {
    slots[got] = free_head_;
    free_head_ = meta()[free_head_].next;
  }
  for (; got < n && never_used_ < plan_.capacity; ++got) slots[got] = never_used_++;
  return got;
}

void DramTier::give_free(const uint32_t* slots, size_t n) {
  std::lock_guard lock(free_mutex_);
  for (size_t i = n; i-- > 0;) meta()[slots[i]].next = std::exchange(free_head_, slots[i]);
  free_listed_ += static_cast<uint32_t>(n);
}

void DramTier::take_slots(Scratch& s, uint32_t* slots, size_t n, size_t needed) {
  const size_t batch = std::min(kEvictBytes / row_bytes_ + 1, size_t{plan_.capacity} / 32);
  size_t have = take_free(slots, n);
  try {
    while (have < n) {
      const size_t chosen = evict(s, std::max(n - have, batch));
      const size_t got = take_free(slots + have, n - have);
      have += got;
      if (chosen == 0 && got == 0) throw_no_room(needed, n - have, 0);
    }
  } catch (...) {
    give_free(slots, have);
    throw;
  }
}

void DramTier::make_room(size_t rows) {
  ScratchPool::Lease s(scratch_);
  const auto free_now = [&] {
    std::lock_guard lock(free_mutex_);
    return size_t{free_listed_} + plan_.capacity - never_used_;
  };
  rows = std::min<size_t>(rows, plan_.capacity);
  for (size_t free = free_now(); free < rows; free = free_now()) {
    if (evict(*s, rows - free) == 0) return;
  }
}

// ---- eviction

size_t DramTier::evict(Scratch& s, size_t n) {
  if (!store_) return 0;
  std::lock_guard lock(writeback_mutex_);
  size_t dirty = 0;
  const size_t chosen = choose_victims(s, std::min(n, s.keys_max), &dirty);
  if (dirty > 0) {
    try {
      store_->put(s.keys, dirty, RowsIn{slab_.as<uint8_t>(), row_bytes_, s.slots});
    } catch (...) {
      settle_leaving(s, dirty, false);
      throw;
    }
    flushed_ += dirty;
    ++puts_;
    settle_leaving(s, dirty, true);
  }
  return chosen;
}

// An equal share from every shard; what some lack, the others give.
size_t DramTier::choose_victims(Scratch& s, size_t n, size_t* dirty) {
  const size_t shards = plan_.shards;
  std::vector<size_t> chosen(shards), leaving(shards), place(shards + 1, 0);
  for (size_t h = 0; h < shards; ++h) {
    const bool odd = (h + shards - next_shard_) % shards < n % shards;
    place[h + 1] = place[h] + n / shards + odd;
  }
  next_shard_ = static_cast<uint32_t>((next_shard_ + n) % shards);
  pool_.parallel(shards, [&](size_t h) {
    chosen[h] = choose_from(shards_[h], place[h + 1] - place[h], s.keys + place[h], s.slots + place[h], &leaving[h]);
  });
  size_t total = 0;
  for (size_t h = 0; h < shards; ++h) {
    std::copy_n(s.keys + place[h], leaving[h], s.keys + *dirty);
    std::copy_n(s.slots + place[h], leaving[h], s.slots + *dirty);
    *dirty += leaving[h];
    total += chosen[h];
  }
  for (size_t h = 0; h < shards && total < n; ++h) {
    size_t more = 0;
    total += choose_from(shards_[h], n - total, s.keys + *dirty, s.slots + *dirty, &more);
    *dirty += more;
  }
  return total;
}

// Clean rows are gone at once, dirty ones begin to leave. Returns how many were chosen of both.
size_t DramTier::choose_from(Shard& shard, size_t n, uint64_t* keys, uint32_t* slots, size_t* dirty) {
  uint32_t clean[kBlockSlots];
  size_t cleaned = 0, chosen = 0, evicted = 0;
  std::lock_guard lock(shard.mutex);
  for (; chosen < n; ++chosen) {
    const uint32_t slot = shard.victim();
    if (slot == kNoSlot) break;
    SlotMeta& m = meta()[slot];
    if (clear_dirty(slot)) {
      m.store_state(SlotState::kLeaving);
      keys[*dirty] = m.key;
      slots[(*dirty)++] = slot;
      continue;
    }
    shard.erase(hash(m.key).tag, slot);
    m.store_state(SlotState::kFree);
    clean[cleaned++] = slot;
    ++evicted;
    if (cleaned == kBlockSlots) give_free(clean, std::exchange(cleaned, 0));
  }
  give_free(clean, cleaned);
  evictions_ += evicted;
  return chosen;
}

void DramTier::settle_leaving(Scratch& s, size_t dirty, bool written) {
  size_t freed = 0;
  std::unique_lock<std::mutex> lock;
  for (size_t j = 0; j < dirty; ++j) {
    const uint32_t slot = s.slots[j];
    const Hash h = hash(s.keys[j]);
    Shard& shard = shards_[h.shard];
    if (lock.mutex() != &shard.mutex) {  // they come grouped by shard
      lock = {};                         // before the next: never two shards at once
      lock = std::unique_lock(shard.mutex);
    }
    SlotMeta& m = meta()[slot];
    if (!written) set_dirty(slot);
    if (written && m.pins == 0) {
      shard.erase(h.tag, slot);
      m.store_state(SlotState::kFree);
      s.slots[freed++] = slot;
    } else {
      m.store_state(SlotState::kReady);
      if (m.pins == 0) shard.link(slot);
    }
  }
  lock = {};
  give_free(s.slots, freed);
  evictions_ += freed;
  wake_waiting();
}

// ---- dirty rows

void DramTier::set_dirty(uint32_t slot) {
  std::atomic<uint64_t>& word = dirty_words()[slot / 64];
  const uint64_t bit = uint64_t{1} << (slot % 64);
  if (!(word.load(std::memory_order_relaxed) & bit)) word.fetch_or(bit, std::memory_order_release);
}

void DramTier::mark_dirty(const uint32_t* slots, size_t n) {
  for (size_t i = 0; i < n; ++i) set_dirty(slots[i]);
}

bool DramTier::clear_dirty(uint32_t slot) {
  std::atomic<uint64_t>& word = dirty_words()[slot / 64];
  const uint64_t bit = uint64_t{1} << (slot % 64);
  if (!(word.load(std::memory_order_relaxed) & bit)) return false;
  word.fetch_and(~bit, std::memory_order_acq_rel);
  return true;
}

void DramTier::flush(RowStore* to) {
  RowStore* const store = to ? check_row_bytes(to) : store_;
  if (!store) throw Error("memory tier: flush without a store: make the tier with one, or name one to flush to");
  ScratchPool::Lease s(scratch_);
  const size_t words = (size_t{plan_.capacity} + 63) / 64;
  for (size_t w = 0; w < words;) {
    // Evictions may take turns with our parts; a dirty row can only be evicted under this lock, so its key stays.
    std::lock_guard lock(writeback_mutex_);
    size_t n = 0;
    for (; w < words && n + 64 <= s->keys_max; ++w) {
      if (dirty_words()[w].load(std::memory_order_relaxed) == 0) continue;
      for (uint64_t bits = dirty_words()[w].exchange(0, std::memory_order_acq_rel); bits != 0; bits &= bits - 1) {
        s->slots[n] = static_cast<uint32_t>(w * 64 + std::countr_zero(bits));
        s->keys[n] = meta()[s->slots[n]].key;
        ++n;
      }
    }
    if (n == 0) continue;
    try {
      store->put(s->keys, n, RowsIn{slab_.as<uint8_t>(), row_bytes_, s->slots});
    } catch (...) {
      for (size_t j = 0; j < n; ++j) set_dirty(s->slots[j]);
      throw;
    }
    flushed_ += n;
    ++puts_;
  }
}

size_t DramTier::dirty_rows(uint32_t* next, size_t max, uint64_t* keys, uint8_t* rows) const {
  size_t n = 0;
  for (; *next < plan_.capacity && n < max; ++*next) {
    const uint64_t bits = dirty_words()[*next / 64].load(std::memory_order_acquire) >> (*next % 64);
    if (bits == 0) {
      *next |= 63;  // the loop steps to the next word
      continue;
    }
    if (!(bits & 1)) continue;
    keys[n] = meta()[*next].key;
    std::memcpy(rows + n++ * row_bytes_, row(*next), row_bytes_);
  }
  return n;
}

// ---- books

void DramTier::check(bool idle) {
  const auto fail = [](const std::string& what) { throw Error("memory tier: " + what); };
  std::lock_guard writeback(writeback_mutex_);
  uint32_t resident = 0, pinned = 0;
  for (uint32_t h = 0; h < plan_.shards; ++h) {
    std::lock_guard lock(shards_[h].mutex);
    shards_[h].check(std::to_string(h), plan_.capacity);
    pinned += shards_[h].pinned();
    resident += shards_[h].resident();
  }
  std::lock_guard lock(free_mutex_);
  uint32_t listed = 0;
  for (uint32_t slot = free_head_; listed < free_listed_; slot = meta()[slot].next, ++listed) {
    if (slot >= never_used_) fail("the list of free slots ends after " + std::to_string(listed));
    if (meta()[slot].load_state() != SlotState::kFree) fail("slot " + std::to_string(slot) + " is free and in use");
  }
  if (!idle) return;  // what follows changes while calls are in progress
  const uint32_t free = free_listed_ + plan_.capacity - never_used_;
  if (free + resident != plan_.capacity) {
    fail("free " + std::to_string(free) + " + resident " + std::to_string(resident) + " != capacity " +
         std::to_string(plan_.capacity));
  }
  if (pinned != 0) fail(std::to_string(pinned) + " rows are still pinned: a batch was not unpinned");
  for (uint32_t slot = 0; slot < plan_.capacity; ++slot) {
    const bool dirty = dirty_words()[slot / 64].load() >> (slot % 64) & 1;
    if (dirty && meta()[slot].load_state() != SlotState::kReady) {
      fail("slot " + std::to_string(slot) + " is dirty, but has no row");
    }
  }
}

TierStats DramTier::stats() const {
  TierStats t;
  t.capacity = plan_.capacity;
  t.shards = plan_.shards;
  for (uint32_t h = 0; h < plan_.shards; ++h) {
    std::lock_guard lock(shards_[h].mutex);
    t.resident += shards_[h].resident();
    t.pinned += shards_[h].pinned();
  }
  {
    std::lock_guard lock(free_mutex_);
    t.free = free_listed_ + plan_.capacity - never_used_;
  }
  for (size_t w = 0; w < (size_t{plan_.capacity} + 63) / 64; ++w) t.dirty += std::popcount(dirty_words()[w].load());
  t.hits = hits_;
  t.misses = misses_;
  t.from_store = from_store_;
  t.initialised = initialised_;
  t.pushed = pushed_;
  t.reads = reads_;
  t.read_hits = read_hits_;
  t.evictions = evictions_;
  t.flushed = flushed_;
  t.puts = puts_;
  t.bytes_rows = plan_.rows;
  t.bytes_metadata = plan_.metadata;
  t.bytes_index = plan_.index;
  t.bytes_buffers = plan_.buffers;
  t.bytes_total = plan_.total();
  t.budget = options_.budget;
  t.kernels = thermocline::kernels().name;
  return t;
}

}  // namespace thermocline
