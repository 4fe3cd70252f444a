// Write-back ahead of need: the rows that the policy evicts next are written to the store before a pull needs their
// slots, so that the pull finds clean rows to evict and does not wait for a put.
//
// A pass copies the dirty rows among the next victims, marks them clean and kWriting, and puts the copies. The rows
// stay resident and in their lists, so that the order of evictions does not depend on the timing of passes. Meanwhile
// pulls may pin and change the rows; a row that is changed is dirty again. An eviction that reaches a row in state
// kWriting waits until the put has ended: the store has the row then, or the row is dirty again.
#include <algorithm>
#include <cstring>

#include "dram/tier.h"

namespace thermocline {

size_t DramTier::write_ahead(size_t rows) {
  if (plan_.staged_rows == 0) return 0;
  std::lock_guard lock(write_ahead_mutex_);
  const size_t share = (rows + plan_.shards - 1) / plan_.shards;
  size_t staged = 0, written = 0;
  bool enough = true;
  const auto put = [&] {
    put_staged(staged);
    written += std::exchange(staged, 0);
  };
  try {
    for (uint32_t h = 0; h < plan_.shards; ++h) {
      for (bool complete = false; !complete;) {
        if (staged == plan_.staged_rows) put();
        complete = stage_dirty(shards_[h], share, &staged, &enough);
      }
    }
    if (staged > 0) put();
  } catch (...) {
    end_writing(staged, false);
    throw;
  }
  if (!enough && rows == reserve_) continue_at_unpin_ = true;
  return written;
}

// Copies dirty rows among the next `share` victims of a shard. Returns false if the memory for copies is full. Sets
// *enough to false if the shard has fewer victims: the other rows are pinned.
bool DramTier::stage_dirty(Shard& shard, size_t share, size_t* staged, bool* enough) {
  const Staging to = staging();
  bool complete = true;
  std::lock_guard lock(shard.mutex);
  if (shard.evictable() < share && shard.pinned() > 0) *enough = false;
  shard.for_next_victims(share, [&](uint32_t slot) {
    SlotMeta& m = meta()[slot];
    // kWriting: copied by this pass, and perhaps changed since
    if (m.load_state() != SlotState::kReady || !is_dirty(slot)) return true;
    if (*staged == plan_.staged_rows) return complete = false;
    set_written(slot);
    clear_dirty(slot);
    m.store_state(SlotState::kWriting);
    std::memcpy(to.rows + *staged * row_bytes_, row(slot), row_bytes_);
    to.keys[*staged] = m.key;
    to.slots[(*staged)++] = slot;
    return true;
  });
  return complete;
}

void DramTier::put_staged(size_t n) {
  const Staging from = staging();
  store_->put(from.keys, n, RowsIn{from.rows, row_bytes_});
  flushed_ += n;
  written_ahead_ += n;
  ++puts_;
  end_writing(n, true);
}

// Ends the state kWriting of the staged rows. If they were not written, they are dirty again.
void DramTier::end_writing(size_t n, bool written) {
  const Staging rows = staging();
  std::unique_lock<std::mutex> lock;
  for (size_t j = 0; j < n; ++j) {
    Shard& shard = shards_[hash(rows.keys[j]).shard];
    if (lock.mutex() != &shard.mutex) {  // rows are grouped by shard
      lock = {};                         // unlock first: two shard mutexes are never held at once
      lock = std::unique_lock(shard.mutex);
    }
    if (!written) set_dirty(rows.slots[j]);
    clear_written(rows.slots[j]);
    meta()[rows.slots[j]].store_state(SlotState::kReady);
  }
  lock = {};
  notify_waiters();
}

void DramTier::wait_until_written(uint32_t slot) {
  std::unique_lock lock(wait_mutex_);
  ready_.wait(lock, [&] { return meta()[slot].load_state() != SlotState::kWriting; });
}

// Called when slots were taken. Requests a pass when a fourth of the reserve may be used up: rows with one visit
// pass through their list within a few pulls.
void DramTier::keep_reserve(size_t taken) {
  if (plan_.staged_rows == 0) return;
  if (!options_.write_ahead) {
    // Three pulls of the size of recent ones: two parts of a look-ahead are loaded at once. A large pull is forgotten
    // when eight times its rows have been taken since, not after some pulls: between two parts there are many small
    // ones.
    const size_t before = recent_taken_;  // read once: another pull may change it
    const size_t recent = std::max(taken, before - std::min(before, taken / 8));
    recent_taken_ = recent;
    reserve_ = std::clamp<size_t>(3 * recent, plan_.capacity / 16, plan_.capacity / 4);
  }
  if (taken_since_pass_.fetch_add(taken) + taken < reserve_ / 4) return;
  {
    std::lock_guard lock(free_mutex_);
    if (size_t{free_listed_} + plan_.capacity - never_used_ >= reserve_) return;
  }
  taken_since_pass_ = 0;
  background_.request();
}

void DramTier::continue_reserve() {
  if (continue_at_unpin_.load(std::memory_order_relaxed) && continue_at_unpin_.exchange(false)) background_.request();
}

}  // namespace thermocline
