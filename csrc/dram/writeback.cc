// Free slots, eviction, flush of dirty rows, and the check of the tier's invariants.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

#include "dram/tier.h"
#include "util/error.h"
#include "util/hash.h"

namespace thermocline {
namespace {

constexpr size_t kEvictBytes = 1 << 20;  // rows evicted at once, so that puts are large
constexpr size_t kFreeBlock = 256;       // slots freed under one lock of the free list
constexpr size_t kTaskWords = 1024;      // of 64 dirty bits, per task

}  // namespace

// ---- free slots

size_t DramTier::pop_free(uint32_t* slots, size_t n) {
  std::lock_guard lock(free_mutex_);
  size_t got = 0;
  for (; got < n && free_listed_ > 0; ++got, --free_listed_) {
    slots[got] = free_head_;
    free_head_ = meta()[free_head_].next;
  }
  for (; got < n && never_used_ < plan_.capacity; ++got) slots[got] = never_used_++;
  return got;
}

void DramTier::push_free(const uint32_t* slots, size_t n) {
  std::lock_guard lock(free_mutex_);
  for (size_t i = n; i-- > 0;) meta()[slots[i]].next = std::exchange(free_head_, slots[i]);
  free_listed_ += static_cast<uint32_t>(n);
}

void DramTier::reserve_slots(Scratch& s, uint32_t* slots, size_t n, size_t needed) {
  if (std::exception_ptr error = background_.take_error()) std::rethrow_exception(error);
  const size_t batch = std::min(kEvictBytes / row_bytes_ + 1, size_t{plan_.capacity} / 32);
  size_t have = pop_free(slots, n);
  try {
    while (have < n) {
      const size_t chosen = evict(s, std::max(n - have, batch));
      const size_t got = pop_free(slots + have, n - have);
      have += got;
      if (chosen == 0 && got == 0) throw_over_budget(needed, n - have, 0);
    }
  } catch (...) {
    push_free(slots, have);
    throw;
  }
  keep_reserve(n);
}

// ---- eviction

size_t DramTier::evict(Scratch& s, size_t n) {
  if (!store_) return 0;
  std::lock_guard lock(writeback_mutex_);
  const Scratch::Writeback w = s.writeback();
  size_t dirty = 0;
  const size_t chosen = choose_victims(w, std::min(n, s.keys_max()), &dirty);
  if (dirty > 0) {
    try {
      store_->put(w.keys, dirty, RowsIn{slab_.as<uint8_t>(), stride_, w.slots});
    } catch (...) {
      finish_eviction(w, dirty, false);
      throw;
    }
    flushed_ += dirty;
    ++puts_;
    ++puts_in_pulls_;
    finish_eviction(w, dirty, true);
  }
  return chosen;
}

// Chooses an equal share from every shard; if some shards have too few rows, the other shards give more. Fills `w` with
// the *dirty dirty ones, grouped by shard.
size_t DramTier::choose_victims(const Scratch::Writeback& w, size_t n, size_t* dirty) {
  const size_t shards = plan_.shards;
  std::vector<size_t> chosen(shards), chosen_dirty(shards), begin(shards + 1, 0);
  for (size_t h = 0; h < shards; ++h) {
    const bool extra = (h + shards - next_shard_) % shards < n % shards;
    begin[h + 1] = begin[h] + n / shards + extra;
  }
  next_shard_ = static_cast<uint32_t>((next_shard_ + n) % shards);
  std::vector<uint32_t> written(shards, kNoSlot);
  pool_.parallel(shards, [&](size_t h) {
    chosen[h] = choose_victims_of(shards_[h], begin[h + 1] - begin[h], {w.keys + begin[h], w.slots + begin[h]},
                                  &chosen_dirty[h], &written[h]);
  });
  // Waits outside of the pool, whose threads have other work.
  const auto choose_rest = [&](size_t h, size_t share, const Scratch::Writeback& to, size_t* dirty, uint32_t wait_for) {
    size_t more = 0;
    while (wait_for != kNoSlot) {
      wait_until_written(std::exchange(wait_for, kNoSlot));
      more += choose_victims_of(shards_[h], share - more, to, dirty, &wait_for);
    }
    return more;
  };
  size_t total = 0;
  for (size_t h = 0; h < shards; ++h) {
    chosen[h] += choose_rest(h, begin[h + 1] - begin[h] - chosen[h], {w.keys + begin[h], w.slots + begin[h]},
                             &chosen_dirty[h], written[h]);
    std::copy_n(w.keys + begin[h], chosen_dirty[h], w.keys + *dirty);
    std::copy_n(w.slots + begin[h], chosen_dirty[h], w.slots + *dirty);
    *dirty += chosen_dirty[h];
    total += chosen[h];
  }
  for (size_t h = 0; h < shards && total < n; ++h) {
    const Scratch::Writeback to{w.keys + *dirty, w.slots + *dirty};
    size_t more_dirty = 0;
    uint32_t wait_for = kNoSlot;
    total += choose_victims_of(shards_[h], n - total, to, &more_dirty, &wait_for);
    total += choose_rest(h, n - total, to, &more_dirty, wait_for);
    *dirty += more_dirty;
  }
  return total;
}

// Frees clean rows at once. Appends dirty rows to `w` and marks them kEvicting. Returns the number of both. Stops at a
// row that is being written ahead, and returns its slot in *wait_for.
size_t DramTier::choose_victims_of(Shard& shard, size_t n, const Scratch::Writeback& w, size_t* dirty,
                                   uint32_t* wait_for) {
  uint32_t freed[kFreeBlock];
  size_t freed_count = 0, chosen = 0, evicted = 0;
  std::lock_guard lock(shard.mutex);
  for (; chosen < n; ++chosen) {
    const uint32_t slot = shard.next_victim();
    if (slot == kNoSlot) break;
    SlotMeta& m = meta()[slot];
    if (m.load_state() == SlotState::kWriting) {
      *wait_for = slot;
      break;
    }
    shard.unlink(slot);
    if (is_dirty(slot)) {
      set_written(slot);
      clear_dirty(slot);
      m.store_state(SlotState::kEvicting);
      w.keys[*dirty] = m.key;
      w.slots[(*dirty)++] = slot;
      continue;
    }
    shard.erase(hash(m.key).tag, slot);
    m.store_state(SlotState::kFree);
    freed[freed_count++] = slot;
    ++evicted;
    if (freed_count == kFreeBlock) push_free(freed, std::exchange(freed_count, 0));
  }
  push_free(freed, freed_count);
  evictions_ += evicted;
  return chosen;
}

// Frees the slots of rows that were written and not pinned meanwhile. The other rows stay resident; if the write failed
// they are dirty again. Freed slots are compacted to the front of w.slots.
void DramTier::finish_eviction(const Scratch::Writeback& w, size_t dirty, bool written) {
  size_t freed = 0;
  std::unique_lock<std::mutex> lock;
  for (size_t j = 0; j < dirty; ++j) {
    const uint32_t slot = w.slots[j];
    const Hash h = hash(w.keys[j]);
    Shard& shard = shards_[h.shard];
    if (lock.mutex() != &shard.mutex) {  // rows are grouped by shard
      lock = {};                         // unlock first: two shard mutexes are never held at once
      lock = std::unique_lock(shard.mutex);
    }
    SlotMeta& m = meta()[slot];
    if (!written) set_dirty(slot);
    clear_written(slot);
    if (written && m.pins == 0) {
      shard.erase(h.tag, slot);
      m.store_state(SlotState::kFree);
      w.slots[freed++] = slot;
    } else {
      m.store_state(SlotState::kReady);
      if (m.pins == 0) shard.link(slot);
    }
  }
  lock = {};
  push_free(w.slots, freed);
  evictions_ += freed;
  notify_waiters();
}

// ---- dirty rows

void DramTier::set_written(uint32_t slot) {
  written_words()[slot / 64].fetch_or(uint64_t{1} << (slot % 64), std::memory_order_acq_rel);
}

void DramTier::clear_written(uint32_t slot) {
  written_words()[slot / 64].fetch_and(~(uint64_t{1} << (slot % 64)), std::memory_order_acq_rel);
}

void DramTier::set_dirty(uint32_t slot) {
  std::atomic<uint64_t>& word = dirty_words()[slot / 64];
  const uint64_t bit = uint64_t{1} << (slot % 64);
  if (!(word.load(std::memory_order_relaxed) & bit)) word.fetch_or(bit, std::memory_order_release);
}

void DramTier::mark_dirty(const uint32_t* slots, size_t n) {
  for (size_t i = 0; i < n; ++i) set_dirty(slots[i]);
}

bool DramTier::is_dirty(uint32_t slot) const {
  return dirty_words()[slot / 64].load(std::memory_order_relaxed) >> (slot % 64) & 1;
}

bool DramTier::clear_dirty(uint32_t slot) {
  std::atomic<uint64_t>& word = dirty_words()[slot / 64];
  const uint64_t bit = uint64_t{1} << (slot % 64);
  // Acquire: who finds the bit clear, finds the one in written_words() that was set before it was cleared.
  if (!(word.load(std::memory_order_acquire) & bit)) return false;
  word.fetch_and(~bit, std::memory_order_acq_rel);
  return true;
}

namespace {

constexpr uint64_t kEveryByte = 0x0101010101010101ULL;

bool has_zero_byte(uint64_t bytes) { return ((bytes - kEveryByte) & ~bytes & 0x80 * kEveryByte) != 0; }

// One bit per byte of `bytes`: whether it is 0.
uint64_t zero_bytes(uint64_t bytes) {
  constexpr uint64_t kLow = 0x7f * kEveryByte;
  const uint64_t zero = ~(((bytes & kLow) + kLow) | bytes | kLow);  // the top bit of each byte that is 0
  return (zero >> 7) * 0x0102040810204080ULL >> 56;
}

// Bits of those among 64 prefixes that are `first` or `last`. Other slots may get new prefixes meanwhile.
uint64_t slots_with(uint8_t* prefixes, uint8_t first, uint8_t last) {
  uint64_t found = 0;
  for (int i = 0; i < 8; ++i) {
    auto* const eight = reinterpret_cast<uint64_t*>(prefixes) + i;
    const uint64_t bytes = std::atomic_ref(*eight).load(std::memory_order_relaxed);
    const uint64_t a = bytes ^ first * kEveryByte, b = bytes ^ last * kEveryByte;
    if (!has_zero_byte(a) && !has_zero_byte(b)) continue;  // 30 of 31
    found |= (zero_bytes(a) | zero_bytes(b)) << (8 * i);
  }
  return found;
}

}  // namespace

std::vector<uint64_t> DramTier::dirty_words_of(KeyRange range, bool with_written) {
  // A part of an expiry has one or two prefixes: most keys are excluded by their byte, 24 times less memory.
  const uint8_t first = hash_prefix(range.lo), last = hash_prefix(range.hi);
  const bool narrow = last - first <= 1;
  std::vector<uint64_t> words((size_t{plan_.capacity} + 63) / 64);
  const size_t tasks = words.size() / kTaskWords + 1;
  pool_.parallel(tasks, [&](size_t t) {
    for (size_t word = words.size() * t / tasks; word < words.size() * (t + 1) / tasks; ++word) {
      uint64_t dirty = dirty_words()[word].load(std::memory_order_acquire);
      // After the dirty bits: a bit is set here before it is cleared there. After a failed write it is set there again
      // before it is cleared here: hence the second look.
      if (with_written) dirty |= written_words()[word].load(std::memory_order_acquire);
      if (with_written) dirty |= dirty_words()[word].load(std::memory_order_acquire);
      uint64_t kept = dirty;
      if (narrow && dirty != 0) kept &= slots_with(prefixes_.as<uint8_t>() + word * 64, first, last);
      for (uint64_t bits = range.all() ? 0 : kept; bits != 0; bits &= bits - 1) {
        const int bit = std::countr_zero(bits);
        if (!range.contains(meta()[word * 64 + static_cast<size_t>(bit)].load_key())) kept &= ~(uint64_t{1} << bit);
      }
      words[word] = kept;
    }
  });
  return words;
}

void DramTier::flush(RowStore* to, KeyRange range) {
  RowStore* const store = to ? check_row_bytes(to) : store_;
  if (!store) throw Error("DRAM tier: flush needs a store: create the tier with a store, or pass one to flush()");
  ScratchPool::Lease s(scratch_);
  // Rows that are being written ahead are clean already: waits until the store has them, or they are dirty again.
  std::lock_guard ahead(write_ahead_mutex_);
  const Scratch::Writeback w = s->writeback();
  const size_t words = (size_t{plan_.capacity} + 63) / 64;
  std::vector<uint64_t> wanted;  // empty: all bits
  struct Notify {
    DramTier& tier;
    ~Notify() { tier.notify_waiters(); }
  };
  if (!range.all()) {
    std::lock_guard lock(writeback_mutex_);  // after an eviction in progress: if it fails, its rows are dirty again
    wanted = dirty_words_of(range);
  }
  for (size_t word = 0; word < words;) {
    // Taken per part, so that evictions can run in between. A dirty row is evicted only under this mutex, so the keys
    // of its slots do not change here.
    std::lock_guard lock(writeback_mutex_);
    const Notify after{*this};  // end_writes() waits for the written bits of these slots
    size_t n = 0;
    for (; word < words && n + 64 <= s->keys_max(); ++word) {
      uint64_t bits =
          dirty_words()[word].load(std::memory_order_relaxed) & (wanted.empty() ? ~uint64_t{0} : wanted[word]);
      if (bits == 0) continue;
      written_words()[word].fetch_or(bits, std::memory_order_acq_rel);
      const uint64_t wanted_bits = bits;
      bits &= dirty_words()[word].fetch_and(~bits, std::memory_order_acq_rel);
      written_words()[word].fetch_and(~(wanted_bits & ~bits), std::memory_order_acq_rel);  // rows that were erased
      for (; bits != 0; bits &= bits - 1) {
        w.slots[n] = static_cast<uint32_t>(word * 64 + std::countr_zero(bits));
        w.keys[n] = meta()[w.slots[n]].key;
        ++n;
      }
    }
    if (n == 0) continue;
    try {
      store->put(w.keys, n, RowsIn{slab_.as<uint8_t>(), stride_, w.slots});
    } catch (...) {
      for (size_t j = 0; j < n; ++j) {
        set_dirty(w.slots[j]);
        clear_written(w.slots[j]);
      }
      throw;
    }
    for (size_t j = 0; j < n; ++j) clear_written(w.slots[j]);
    flushed_ += n;
    ++puts_;
  }
  if (store == store_) background_.take_error();  // the rows of a failed pass were dirty, and are written now
}

size_t DramTier::dirty_rows(uint32_t* next, size_t max, uint64_t* keys, uint8_t* rows, KeyRange range) {
  if (*next >= plan_.capacity) return 0;
  const std::vector<uint64_t> words = dirty_words_of(range);
  size_t n = 0;
  for (; *next < plan_.capacity && n < max; ++*next) {
    const uint64_t bits = words[*next / 64] >> (*next % 64);
    if (bits == 0) {
      *next |= 63;  // the loop increment moves to the next word
      continue;
    }
    if (!(bits & 1)) continue;
    keys[n] = meta()[*next].key;
    std::memcpy(rows + n++ * row_bytes_, row(*next), row_bytes_);
  }
  return n;
}

// A row whose write has ended since its bit was read may have left its slot.
void DramTier::unwritten_rows(KeyRange range, const std::function<void(uint64_t, const uint8_t*, size_t)>& add) {
  const std::vector<uint64_t> words = dirty_words_of(range, true);
  std::vector<uint32_t> slots;
  std::vector<uint64_t> keys;
  for (size_t word = 0; word < words.size(); ++word) {
    for (uint64_t bits = words[word]; bits != 0; bits &= bits - 1) {
      const auto slot = static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::countr_zero(bits)));
      const uint64_t key = meta()[slot].load_key();
      if (!range.contains(key)) continue;
      slots.push_back(slot);
      keys.push_back(key);
    }
  }
  for_free_shards_first(keys.data(), keys.size(), [&](Shard& shard, const Probe* probes, size_t n) {
    for (size_t j = 0; j < n; ++j) {
      const uint64_t key = keys[probes[j].index];
      const uint32_t slot = slots[probes[j].index];
      if (shard.find(probes[j].tag, key) != slot || is_loading(meta()[slot].load_state())) continue;
      add(key, row(slot), row_bytes_);
    }
  });
}

// ---- invariants and statistics

void DramTier::check(bool idle) {
  const auto fail = [](const std::string& violation) { throw Error("DRAM tier: " + violation); };
  std::lock_guard ahead(write_ahead_mutex_);
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
    if (slot >= never_used_) {
      fail("the free list ends after " + std::to_string(listed) + " of " + std::to_string(free_listed_) + " slots");
    }
    if (meta()[slot].load_state() != SlotState::kFree) {
      fail("slot " + std::to_string(slot) + " is in the free list and in use");
    }
  }
  if (!idle) return;  // the sums below hold only while no call is in progress
  const uint32_t free = free_listed_ + plan_.capacity - never_used_;
  if (free + resident != plan_.capacity) {
    fail("free " + std::to_string(free) + " + resident " + std::to_string(resident) + " != capacity " +
         std::to_string(plan_.capacity));
  }
  if (pinned != 0) fail(std::to_string(pinned) + " rows are still pinned; unpin every pulled batch");
  for (uint32_t slot = 0; slot < plan_.capacity; ++slot) {
    if (written_words()[slot / 64].load() >> (slot % 64) & 1)
      fail("slot " + std::to_string(slot) + " is being written");
    const bool dirty = dirty_words()[slot / 64].load() >> (slot % 64) & 1;
    if (dirty && meta()[slot].load_state() != SlotState::kReady) {
      fail("slot " + std::to_string(slot) + " is dirty but holds no row");
    }
  }
}

size_t DramTier::pinned() const {
  size_t sum = 0;
  for (uint32_t h = 0; h < plan_.shards; ++h) {
    std::lock_guard lock(shards_[h].mutex);
    sum += shards_[h].pinned();
  }
  return sum;
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
  t.loaded_ahead = loaded_ahead_;
  t.read_ahead = read_ahead_;
  t.from_store = from_store_;
  t.initialised = initialised_;
  t.pushed = pushed_;
  t.reads = reads_;
  t.read_hits = read_hits_;
  t.read_from_store = read_from_store_;
  t.evictions = evictions_;
  t.flushed = flushed_;
  t.puts = puts_;
  t.written_ahead = written_ahead_;
  t.puts_in_pulls = puts_in_pulls_;
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
