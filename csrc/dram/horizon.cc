#include "dram/horizon.h"

#include <algorithm>
#include <utility>

#include "util/error.h"
#include "util/hash.h"
#include "util/recycled.h"

namespace thermocline {
namespace {

constexpr size_t kPrefetchAhead = 8;
constexpr size_t kRangeIds = 65536;      // ids that one task hashes
constexpr size_t kReleaseBlock = 65536;  // rows unpinned by one call of the tier

uint32_t partition_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 56); }
// The partition uses the top byte; tables use the bits below it.
size_t bucket_of(uint64_t hash, size_t table) { return (hash >> 16) & (table - 1); }

}  // namespace

// ---- add

void Horizon::Partition::grow() {
  const size_t size = table.empty() ? 8 : 2 * table.size();
  table.assign(size, 0);
  for (uint32_t i = 0; i < keys.size(); ++i) {
    size_t at = bucket_of(hash_key(keys[i]), size);
    while (table[at] != 0) at = (at + 1) & (size - 1);
    table[at] = i + 1;
  }
}

uint32_t Horizon::Partition::insert(uint64_t key, uint64_t hash, uint32_t batch) {
  if (2 * (keys.size() + 1) > table.size()) grow();
  size_t at = bucket_of(hash, table.size());
  for (; table[at] != 0; at = (at + 1) & (table.size() - 1)) {
    const uint32_t i = table[at] - 1;
    if (keys[i] == key) {
      last[i] = batch;
      return i;
    }
  }
  if (keys.size() == kMaxPartitionKeys) throw Error("look-ahead: more than 2^32 unique keys in one horizon");
  keys.push_back(key);
  last.push_back(batch);
  table[at] = static_cast<uint32_t>(keys.size());
  return static_cast<uint32_t>(keys.size() - 1);
}

void Horizon::add(const uint64_t* ids, size_t n, uint32_t* numbers) {
  if (sealed_) throw Error("look-ahead: ids were added to a sealed horizon");
  open_ = true;
  const Recycled<Entry> grouped(n);
  // Group the ids by partition, so that one partition's table is in cache while its ids are inserted.
  const size_t ranges = n / kRangeIds + 1;
  std::vector<std::array<uint32_t, kPartitions>> starts(ranges + 1);  // the last: end of each partition
  tier_.pool().parallel(ranges, [&](size_t r) {
    auto& count = starts[r];
    count.fill(0);
    for (size_t i = n * r / ranges; i < n * (r + 1) / ranges; ++i) ++count[partition_of(hash_key(ids[i]))];
  });
  std::array<uint32_t, kPartitions> begin;
  uint32_t at = 0;
  for (uint32_t p = 0; p < kPartitions; ++p) {
    begin[p] = at;
    for (size_t r = 0; r < ranges; ++r) at += std::exchange(starts[r][p], at);
    starts[ranges][p] = at;
  }
  Entry* const entries = grouped.get();
  tier_.pool().parallel(ranges, [&](size_t r) {
    auto next = starts[r];
    for (size_t i = n * r / ranges; i < n * (r + 1) / ranges; ++i) {
      const uint64_t hash = hash_key(ids[i]);
      entries[next[partition_of(hash)]++] = {hash, static_cast<uint32_t>(i)};
    }
  });
  const auto batch = static_cast<uint32_t>(batches_);
  tier_.pool().parallel(kPartitions, [&](size_t p) {
    Partition& partition = partitions_[p];
    const uint32_t end = starts[ranges][p];
    for (uint32_t j = begin[p]; j < end; ++j) {
      if (!partition.table.empty()) {
        const uint64_t ahead = entries[std::min<size_t>(j + kPrefetchAhead, end - 1)].hash;
        __builtin_prefetch(&partition.table[bucket_of(ahead, partition.table.size())]);
      }
      const uint32_t i = entries[j].position;
      const uint32_t index = partition.insert(ids[i], entries[j].hash, batch);
      numbers[i] = static_cast<uint32_t>(p) << 24 | index;
    }
  });
}

void Horizon::end_batch() {
  ++batches_;
  open_ = false;
}

void Horizon::seal() {
  if (std::exchange(sealed_, true)) return;
  if (open_) end_batch();  // add() has failed
  size_t total = 0;
  for (uint32_t p = 0; p < kPartitions; ++p) {
    first_[p] = static_cast<uint32_t>(total);
    total += partitions_[p].keys.size();
  }
  first_[kPartitions] = static_cast<uint32_t>(total);
  keys_.resize(total);
  slots_.resize(total);
  by_last_use_.resize(total);
  groups_.assign(batches_ + 1, 0);
  for (const Partition& partition : partitions_)
    for (uint32_t last : partition.last) ++groups_[last + 1];
  for (size_t b = 0; b < batches_; ++b) groups_[b + 1] += groups_[b];
  std::vector<uint32_t> next(groups_.begin(), groups_.end());
  for (uint32_t p = 0; p < kPartitions; ++p) {
    Partition& partition = partitions_[p];
    std::copy(partition.keys.begin(), partition.keys.end(), keys_.begin() + first_[p]);
    for (uint32_t i = 0; i < partition.last.size(); ++i) by_last_use_[next[partition.last[i]]++] = first_[p] + i;
    partition = {};
  }
}

// ---- load and release

bool Horizon::load(size_t max) {
  if (!sealed_) throw Error("look-ahead: a horizon must be sealed before it is loaded");
  size_t begin;
  {
    std::lock_guard lock(mutex_);
    if (!loading_ || loaded_ == keys_.size()) return false;
    begin = loaded_;
  }
  const size_t n = std::min(max, keys_.size() - begin);
  tier_.pull(keys_.data() + begin, n, slots_.data() + begin, purpose_);
  std::unique_lock lock(mutex_);
  if (!loading_) {
    lock.unlock();
    tier_.unpin(slots_.data() + begin, n, false, keys_.data() + begin);
    return false;
  }
  loaded_ = begin + n;
  pinned_ += n;
  return loaded_ < keys_.size();
}

void Horizon::release(size_t batch) {
  std::lock_guard lock(mutex_);
  loading_ = false;
  if (!sealed_) return;
  for (; released_ <= batch && released_ < batches_; ++released_) release_group(released_);
}

void Horizon::release_group(size_t batch) {
  const size_t block = std::min<size_t>(groups_[batch + 1] - groups_[batch], kReleaseBlock);
  std::vector<uint32_t> slots(block);
  std::vector<uint64_t> keys(block);
  size_t n = 0;
  const auto flush = [&] {
    tier_.unpin(slots.data(), n, false, keys.data());
    pinned_ -= std::exchange(n, 0);
  };
  for (uint32_t j = groups_[batch]; j < groups_[batch + 1]; ++j) {
    const uint32_t i = by_last_use_[j];
    if (i >= loaded_) continue;
    slots[n] = slots_[i];
    keys[n++] = keys_[i];
    if (n == block) flush();
  }
  flush();
}

void Horizon::drop() {
  std::lock_guard lock(mutex_);
  loading_ = false;
  if (!sealed_) return;
  for (; released_ < batches_; ++released_) release_group(released_);
}

void Horizon::keys_of(const uint32_t* numbers, size_t n, uint64_t* out) const {
  if (!sealed_) throw Error("look-ahead: keys were requested of a horizon that is not sealed");
  for (size_t i = 0; i < n; ++i) out[i] = keys_[first_[numbers[i] >> 24] + (numbers[i] & (kMaxPartitionKeys - 1))];
}

void Horizon::keys_by_owner(uint32_t world, uint64_t* keys, uint32_t* counts) const {
  if (!sealed_) throw Error("look-ahead: keys were requested of a horizon that is not sealed");
  const auto owner_of = [world](uint64_t key) { return (hash_key(key) & 0xFFFF) * world >> 16; };
  std::fill_n(counts, world * batches_, 0);
  const auto for_each = [&](const auto& visit) {
    for (size_t b = 0; b < batches_; ++b)
      for (uint32_t j = groups_[b]; j < groups_[b + 1]; ++j) {
        const uint64_t key = keys_[by_last_use_[j]];
        visit(owner_of(key) * batches_ + b, key);
      }
  };
  for_each([&](size_t group, uint64_t) { ++counts[group]; });
  std::vector<uint32_t> next(world * batches_);
  uint32_t at = 0;
  for (size_t group = 0; group < next.size(); ++group) {
    next[group] = at;
    at += counts[group];
  }
  for_each([&](size_t group, uint64_t key) { keys[next[group]++] = key; });
}

// ---- counters

size_t Horizon::unique() const {
  if (sealed_) return keys_.size();
  size_t sum = 0;
  for (const Partition& p : partitions_) sum += p.keys.size();
  return sum;
}

size_t Horizon::pinned() const {
  std::lock_guard lock(mutex_);
  return pinned_;
}

size_t Horizon::bytes() const {
  size_t sum = keys_.capacity() * 8 + (slots_.capacity() + by_last_use_.capacity() + groups_.capacity()) * 4;
  for (const Partition& p : partitions_) sum += p.keys.capacity() * 8 + (p.last.capacity() + p.table.capacity()) * 4;
  return sum;
}

}  // namespace thermocline
