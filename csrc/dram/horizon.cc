#include "dram/horizon.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "dram/kernels.h"
#include "util/error.h"

namespace thermocline {
namespace {

constexpr size_t kHashBlock = 256;
constexpr size_t kRangeIds = 32768;  // ids that one task scatters
constexpr size_t kBucketAhead = 24, kEntryAhead = 12;
constexpr uint32_t kMostIds = 1u << 31;
constexpr uint32_t kIndexMask = (1u << 24) - 1;

constexpr size_t kFewRows = 1 << 20;  // capacity of a tier below which partitions are few, to save memory

}  // namespace

// ---- HorizonBatch

HorizonBatch::HorizonBatch(Horizon& horizon, size_t ids)
    : horizon_(horizon), ids_(ids), first_key_(horizon.count_ + 1, 0) {}

double HorizonBatch::to_visit() const {
  const uint64_t at = horizon_.position_;
  return horizon_.dropped_ || at >= loaded_at_ ? 0 : static_cast<double>(loaded_at_ - at) / horizon_.count_;
}

bool HorizonBatch::loaded() const { return to_visit() == 0; }

// Visits the keys of a range in their order. Prefetches the entries ahead, also those of later partitions: small
// batches have few keys in each.
class HorizonBatch::Walk {
 public:
  Walk(const HorizonBatch& batch, size_t range)
      : batch_(batch), partition_(static_cast<uint32_t>(range) * (batch.horizon_.count_ / kRanges)) {
    ahead_ = partition_;
    next_ = next_ahead_ = batch.first_key_[partition_];
    end_ = batch.first_key_[partition_ + batch.horizon_.count_ / kRanges];
  }

  bool next() {
    if (next_ == end_) return false;
    for (; next_ahead_ < end_ && next_ahead_ <= next_ + kEntryAhead; ++next_ahead_) {
      while (next_ahead_ >= batch_.first_key_[ahead_ + 1]) ++ahead_;
      __builtin_prefetch(&batch_.horizon_.partitions_[ahead_].entry(batch_.indices_[next_ahead_]), 1);
    }
    while (next_ >= batch_.first_key_[partition_ + 1]) ++partition_;
    index_ = batch_.indices_[next_++];
    return true;
  }
  uint32_t key_number() const { return next_ - 1; }
  uint32_t partition() const { return partition_; }
  uint32_t index() const { return index_; }
  HorizonEntry& entry() const { return batch_.horizon_.partitions_[partition_].entry(index_); }

 private:
  const HorizonBatch& batch_;
  uint32_t partition_, ahead_;
  uint32_t next_, next_ahead_, end_;  // keys
  uint32_t index_ = 0;
};

void HorizonBatch::expand(const Expanded& out) const {
  horizon_.tier_.pool().parallel(kRanges, [&](size_t r) {
    const Expanded o = out;
    Walk walk(*this, r);
    uint32_t u = 0;
    uint64_t key = 0;
    for (uint32_t j = first_id_[r]; j < first_id_[r + 1]; ++j) {
      const uint32_t value = order_[j], position = value >> 1;
      if (value & 1) {
        walk.next();
        u = walk.key_number();
        if (o.keys || o.ids) key = walk.entry().key;
        if (o.keys) o.keys[u] = key;
        if (o.starts) o.starts[u] = j;
      }
      if (o.inverse) o.inverse[position] = u;
      if (o.order) o.order[j] = position;
      if (o.ids) o.ids[position] = key;
    }
  });
  if (out.starts) out.starts[unique_] = static_cast<uint32_t>(ids_);
}

size_t HorizonBatch::take(uint32_t* slots) {
  std::lock_guard lock(horizon_.taken_mutex_);
  horizon_.taken_.insert(this);
  std::atomic<size_t> late{0};
  horizon_.tier_.pool().parallel(kRanges, [&](size_t r) {
    size_t count = 0;
    for (Walk walk(*this, r); walk.next();) {
      const uint32_t slot = walk.entry().load_slot(), u = walk.key_number();
      slots[u] = HorizonEntry::pinned(slot) ? slot : kNoSlot;
      count += slots[u] == kNoSlot;
    }
    late += count;
  });
  horizon_.late_ += late;
  return late;
}

void HorizonBatch::untake() {
  std::lock_guard lock(horizon_.taken_mutex_);
  horizon_.taken_.erase(this);
}

uint64_t HorizonBatch::key(size_t u) const {
  const auto after = std::upper_bound(first_key_.begin(), first_key_.end(), u);
  return horizon_.partitions_[after - first_key_.begin() - 1].entry(indices_[u]).key;
}

void HorizonBatch::release() {
  if (!released_.exchange(true)) horizon_.release(*this);
}

Horizon::Horizon(DramTier& tier, bool training)
    : tier_(tier),
      purpose_(training ? DramTier::Purpose::kAheadOfPull : DramTier::Purpose::kAheadOfRead),
      count_(tier.capacity() < kFewRows ? HorizonBatch::kRanges : kMaxPartitions),
      shift_(64 - std::countr_zero(count_)),
      partitions_(std::make_unique<HorizonPartition[]>(count_)) {}

// ---- add

// Working memory of add(): arrays of n elements, kept between calls. A partition uses its own range of each.
struct Horizon::Scratch {
  explicit Scratch(size_t n)
      : capacity(n),
        keys(n),
        pos(n),
        local(n),
        unique(n),
        count(n),
        order(n),
        part(n),
        begin(kMaxPartitions + 1),
        uniques(kMaxPartitions) {}
  const size_t capacity;
  Recycled<uint64_t> keys;    // ids, grouped by partition
  Recycled<uint32_t> pos;     // their positions in the batch
  Recycled<uint32_t> local;   // their index in `unique`, from the begin of the partition
  Recycled<uint32_t> unique;  // indices of the partition's unique keys
  Recycled<uint32_t> count;   // occurrences of each; then the next index into `order`; at last `unique` without gaps
  Recycled<uint32_t> order;   // as HorizonBatch::order_
  Recycled<uint8_t> part;     // [i] partition of the id at position i
  std::vector<uint32_t> begin, uniques;

  // Marks of one partition at a time: by index, the index in `unique` of a key of the batch being added.
  std::vector<uint32_t> take_marks() {
    std::lock_guard lock(marks_mutex);
    if (idle_marks.empty()) return {};
    std::vector<uint32_t> marks = std::move(idle_marks.back());
    idle_marks.pop_back();
    return marks;
  }
  void give_marks(std::vector<uint32_t> marks) {
    std::lock_guard lock(marks_mutex);
    idle_marks.push_back(std::move(marks));
  }
  size_t marks_bytes() const {
    size_t sum = 0;
    for (const auto& marks : idle_marks) sum += marks.capacity() * sizeof(uint32_t);
    return sum;
  }

 private:
  std::mutex marks_mutex;                         // protects idle_marks
  std::vector<std::vector<uint32_t>> idle_marks;  // as many as threads
};

std::unique_ptr<HorizonBatch> Horizon::add(const uint64_t* ids, size_t n) {
  if (n >= kMostIds) throw Error("look-ahead: a batch has " + std::to_string(n) + " ids; the maximum is 2^31 - 1");
  std::unique_ptr<HorizonBatch> batch(new HorizonBatch(*this, n));
  batch->released_ = true;  // until its keys are counted
  if (!scratch_ || scratch_->capacity < n) {
    scratch_.reset();  // first, so that both never exist at once
    scratch_ = std::make_unique<Scratch>(n + n / 8);
  }
  Scratch& s = *scratch_;
  scatter(ids, n, s);
  for (uint32_t p = 0; p < count_; ++p) {
    if (partitions_[p].live() + (s.begin[p + 1] - s.begin[p]) > HorizonPartition::kMaxKeys) {
      throw Error("look-ahead: more than 2^24 keys in one partition of the horizon. Lower lookahead");
    }
  }
  tier_.pool().parallel(count_, [&](size_t p) { number(static_cast<uint32_t>(p), s); });
  pack(s, *batch);
  marks_bytes_ = s.marks_bytes();
  batch->loaded_at_ = gathered_ + count_;
  batch_bytes_ += batch->bytes();
  batch->released_ = false;
  return batch;
}

void Horizon::scatter(const uint64_t* ids, size_t n, Scratch& s) {
  const size_t ranges = n / kRangeIds + 1;
  std::vector<std::array<uint32_t, kMaxPartitions>> next(ranges);
  const auto range = [&](size_t r) { return std::pair(n * r / ranges, n * (r + 1) / ranges); };
  tier_.pool().parallel(ranges, [&](size_t r) {
    const auto [begin, end] = range(r);
    auto& counts = next[r];
    counts.fill(0);
    uint8_t* const part = s.part.get();
    uint64_t hashes[kHashBlock];
    for (size_t b = begin; b < end; b += kHashBlock) {
      const size_t m = std::min(kHashBlock, end - b);
      kernels().hash_keys(ids + b, m, hashes);
      for (size_t i = 0; i < m; ++i) ++counts[part[b + i] = static_cast<uint8_t>(hashes[i] >> shift_)];
    }
  });
  uint32_t sum = 0;
  for (uint32_t p = 0; p < count_; ++p) {
    s.begin[p] = sum;
    for (size_t r = 0; r < ranges; ++r) sum += std::exchange(next[r][p], sum);
  }
  s.begin[count_] = sum;
  tier_.pool().parallel(ranges, [&](size_t r) {
    const auto [begin, end] = range(r);
    auto at = next[r];
    const uint8_t* const part = s.part.get();
    uint64_t* const keys = s.keys.get();
    uint32_t* const pos = s.pos.get();
    for (size_t i = begin; i < end; ++i) {
      const uint32_t to = at[part[i]]++;
      keys[to] = ids[i];
      pos[to] = static_cast<uint32_t>(i);
    }
  });
}

// Finds or inserts the keys of a partition, and groups the positions of each. A key is in this batch already if its
// mark is the index of the key itself among the partition's unique keys.
void Horizon::number(uint32_t p, Scratch& s) {
  const uint32_t begin = s.begin[p], n = s.begin[p + 1] - begin;
  const uint64_t* const keys = s.keys.get() + begin;
  const uint32_t* const pos = s.pos.get() + begin;
  uint32_t* const local = s.local.get() + begin;
  uint32_t* const unique = s.unique.get() + begin;
  uint32_t* const count = s.count.get() + begin;
  uint32_t found = 0;
  HorizonPartition& partition = partitions_[p];
  std::vector<uint32_t> marks = s.take_marks();
  {
    std::lock_guard lock(partition.mutex);
    if (marks.size() < size_t{partition.indices()} + n) marks.resize(size_t{partition.indices()} + n);
    uint64_t hashes[kHashBlock];
    for (uint32_t b = 0; b < n; b += kHashBlock) {
      const uint32_t m = std::min<uint32_t>(kHashBlock, n - b);
      kernels().hash_keys(keys + b, m, hashes);
      for (uint32_t i = 0; i < std::min<uint32_t>(m, kBucketAhead); ++i) partition.prefetch_bucket(hashes[i]);
      for (uint32_t i = 0; i < std::min<uint32_t>(m, kEntryAhead); ++i) partition.prefetch_entry(hashes[i]);
      for (uint32_t i = 0; i < m; ++i) {
        if (i + kBucketAhead < m) partition.prefetch_bucket(hashes[i + kBucketAhead]);
        if (i + kEntryAhead < m) partition.prefetch_entry(hashes[i + kEntryAhead]);
        const uint32_t index = partition.find_or_insert(keys[b + i], hashes[i]);
        uint32_t& mark = marks[index];
        if (mark >= found || unique[mark] != index) {
          mark = found;
          count[found] = 0;
          unique[found++] = index;
          partition.entry(index).use();
        }
        local[b + i] = mark;
        ++count[mark];
      }
    }
  }
  s.give_marks(std::move(marks));
  s.uniques[p] = found;
  uint32_t* const order = s.order.get() + begin;
  uint32_t at = 0;
  for (uint32_t u = 0; u < found; ++u) at += std::exchange(count[u], at);
  for (uint32_t j = 0; j < n; ++j) order[count[local[j]]++] = pos[j] << 1;
  // count[u] is now the end of key u, and thus the begin of key u + 1.
  if (found > 0) order[0] |= 1;
  for (uint32_t u = 0; u + 1 < found; ++u) order[count[u]] |= 1;
}

void Horizon::pack(Scratch& s, HorizonBatch& batch) {
  std::vector<uint32_t>& first = batch.first_key_;
  uint32_t most = 0;
  for (uint32_t p = 0; p < count_; ++p) {
    first[p + 1] = first[p] + s.uniques[p];
    std::copy_n(s.unique.get() + s.begin[p], s.uniques[p], s.count.get() + first[p]);
  }
  batch.unique_ = first[count_];
  for (size_t u = 0; u < batch.unique_; ++u) most = std::max(most, s.count[u]);
  const uint32_t per_range = count_ / HorizonBatch::kRanges;
  for (uint32_t r = 0; r <= HorizonBatch::kRanges; ++r) batch.first_id_[r] = s.begin[r * per_range];
  batch.order_ = packed(s.order.get(), batch.ids_, static_cast<uint32_t>(2 * batch.ids_ + 1));
  batch.indices_ = packed(s.count.get(), batch.unique_, most);
}

PackedArray Horizon::packed(const uint32_t* numbers, size_t n, uint32_t most) {
  constexpr size_t kBlock = PackedArray::kBlock;
  PackedArray array(n, most);
  const size_t blocks = (n + kBlock - 1) / kBlock, tasks = n / kRangeIds + 1;
  tier_.pool().parallel(tasks, [&](size_t t) {
    for (size_t b = blocks * t / tasks; b < blocks * (t + 1) / tasks; ++b) {
      array.store_block(b, numbers + b * kBlock, std::min(kBlock, n - b * kBlock));
    }
  });
  return array;
}

// ---- load

std::unique_ptr<HorizonPart> Horizon::next_part(size_t max, uint32_t partitions) {
  // Choose the partitions, and how many keys of each. Keys added to a partition after its turn wait for the next cycle.
  struct Visit {
    uint32_t keys, first;
  };
  std::array<Visit, kMaxPartitions> visits;
  std::unique_ptr<HorizonPart> part(new HorizonPart(*this));
  std::lock_guard sweep(sweep_mutex_);
  const uint64_t begin = gathered_;
  uint64_t end = begin;
  size_t total = 0;
  for (; end < begin + std::min(count_, partitions) && total < max && !dropped_; ++end) {
    HorizonPartition& partition = partitions_[end % count_];
    std::lock_guard lock(partition.mutex);
    const size_t keys = partition.pending.size();
    if (total > 0 && total + keys > max) break;
    visits[end - begin] = {static_cast<uint32_t>(std::min(keys, max)), static_cast<uint32_t>(total)};
    total += visits[end - begin].keys;
    gathered_ = end + 1;
  }
  part->begin_ = begin;
  part->numbers_.resize(total);
  part->keys_.resize(total);
  std::atomic<bool> partial{false};  // a partition has more than `max` keys: its visit is not over
  tier_.pool().parallel(end - begin, [&](size_t i) {
    const auto p = static_cast<uint32_t>((begin + i) % count_);
    HorizonPartition& partition = partitions_[p];
    std::lock_guard lock(partition.mutex);
    std::vector<uint32_t>& pending = partition.pending;
    uint32_t gathered = visits[i].first;
    for (uint32_t k = 0; k < visits[i].keys; ++k) {
      __builtin_prefetch(&partition.entry(pending[std::min<size_t>(k + kEntryAhead, pending.size() - 1)]), 1);
      HorizonEntry& e = partition.entry(pending[k]);
      if (e.uses == 0) {
        partition.erase(pending[k]);
        continue;
      }
      e.store_slot(HorizonEntry::kLoading);
      part->numbers_[gathered] = p << 24 | pending[k];
      part->keys_[gathered++] = e.key;
    }
    pending.erase(pending.begin(), pending.begin() + visits[i].keys);
    if (visits[i].keys == max && !pending.empty()) partial = true;
    visits[i].keys = gathered - visits[i].first;
  });
  size_t kept = 0;
  for (size_t i = 0; i < end - begin; ++i) {  // without the keys that were erased
    std::copy_n(part->numbers_.begin() + visits[i].first, visits[i].keys, part->numbers_.begin() + kept);
    std::copy_n(part->keys_.begin() + visits[i].first, visits[i].keys, part->keys_.begin() + kept);
    kept += visits[i].keys;
  }
  part->numbers_.resize(kept);
  part->keys_.resize(kept);
  gathered_ = partial ? end - 1 : end;
  if (kept > 0) {
    begins_.push_back(begin);
  } else {
    advance();
  }
  return part;
}

void Horizon::load_part(HorizonPart& part, const uint8_t* skip) {
  if (part.numbers_.empty()) return;
  std::vector<uint32_t> slots(part.numbers_.size(), HorizonEntry::kAbsent);
  std::vector<uint64_t> keys;
  if (skip) {
    for (size_t i = 0; i < part.keys_.size(); ++i) {
      if (!skip[i]) keys.push_back(part.keys_[i]);
    }
  }
  const std::vector<uint64_t>& wanted = skip ? keys : part.keys_;
  try {
    std::vector<uint32_t> pulled(wanted.size());
    tier_.pull(wanted.data(), wanted.size(), pulled.data(), purpose_);
    for (size_t i = 0, j = 0; i < slots.size(); ++i) {
      if (skip && skip[i]) continue;
      slots[i] = pulled[j] == kNoSlot ? HorizonEntry::kAbsent : pulled[j];
      ++j;
    }
  } catch (const BudgetError&) {
    put_back(part);
    throw;
  } catch (...) {
    publish(part, slots);
    throw;
  }
  publish(part, slots);
}

void Horizon::publish(HorizonPart& part, const std::vector<uint32_t>& slots) {
  // Ranges of whole partitions.
  const std::vector<uint32_t>& numbers = part.numbers_;
  std::vector<size_t> ranges;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i == 0 || numbers[i] >> 24 != numbers[i - 1] >> 24) ranges.push_back(i);
  }
  ranges.push_back(numbers.size());
  std::mutex mutex;
  Unpins unpins;
  tier_.pool().parallel(ranges.size() - 1, [&](size_t r) {
    HorizonPartition& partition = partitions_[numbers[ranges[r]] >> 24];
    std::lock_guard lock(partition.mutex);
    size_t kept = 0, absent = 0;
    for (size_t i = ranges[r]; i < ranges[r + 1]; ++i) {
      const uint32_t ahead = numbers[std::min(i + kEntryAhead, ranges[r + 1] - 1)];
      __builtin_prefetch(&partition.entry(ahead & kIndexMask), 1);
      const uint32_t index = numbers[i] & kIndexMask;
      HorizonEntry& e = partition.entry(index);
      const bool keep = e.uses > 0 && !dropped_;
      if (HorizonEntry::pinned(slots[i])) {
        kept += keep;
        if (!keep) {
          std::lock_guard unpins_lock(mutex);
          unpins.add(e, slots[i]);
        }
      }
      e.store_slot(keep ? slots[i] : HorizonEntry::kAbsent);
      if (e.uses == 0) {
        partition.erase(index);
      } else {
        absent += e.slot == HorizonEntry::kAbsent;
      }
    }
    pinned_ += kept;
    absent_ += absent;
  });
  {
    std::lock_guard sweep(sweep_mutex_);
    end_part(part);
  }
  unpin_rows(unpins);
}

// Visits the keys of a part again: the sweep goes back to its begin.
void Horizon::put_back(HorizonPart& part) {
  std::lock_guard sweep(sweep_mutex_);
  for (uint32_t number : part.numbers_) {
    HorizonPartition& partition = partitions_[number >> 24];
    std::lock_guard lock(partition.mutex);
    partition.entry(number & kIndexMask).store_slot(HorizonEntry::kPending);
    partition.pending.push_back(number & kIndexMask);
  }
  gathered_ = std::min<uint64_t>(gathered_, part.begin_);
  end_part(part);
}

// The two methods below are called under sweep_mutex_.
void Horizon::end_part(HorizonPart& part) {
  begins_.erase(std::find(begins_.begin(), begins_.end(), part.begin_));
  part.numbers_.clear();
  advance();
}

void Horizon::advance() {
  uint64_t position = gathered_;
  for (uint64_t begin : begins_) position = std::min(position, begin);
  position_ = position;
}

HorizonPart::~HorizonPart() {
  if (!numbers_.empty()) horizon_.put_back(*this);
}

bool Horizon::load(size_t max) {
  const std::unique_ptr<HorizonPart> part = next_part(max);
  if (part->keys().empty()) return false;
  load_part(*part);
  return true;
}

// ---- release and drop

void Horizon::release(HorizonBatch& batch) {
  std::array<Unpins, HorizonBatch::kRanges> unpins;
  tier_.pool().parallel(HorizonBatch::kRanges, [&](size_t r) { release_range(batch, r, &unpins[r]); });
  {
    std::lock_guard lock(taken_mutex_);
    taken_.erase(&batch);
  }
  batch_bytes_ -= batch.bytes();
  for (size_t r = 1; r < unpins.size(); ++r) unpins[0].add(unpins[r]);
  unpin(unpins[0]);
}

void Horizon::release_range(const HorizonBatch& batch, size_t range, Unpins* unpins) {
  std::unique_lock<std::mutex> lock;
  for (HorizonBatch::Walk walk(batch, range); walk.next();) {
    HorizonPartition& partition = partitions_[walk.partition()];
    if (lock.mutex() != &partition.mutex) {
      lock = {};  // unlock first: two mutexes of partitions are never held at once
      lock = std::unique_lock(partition.mutex);
    }
    HorizonEntry& e = walk.entry();
    if (--e.uses > 0) continue;
    // The sweep erases a key that it has still to visit or that it is loading.
    if (e.slot == HorizonEntry::kPending || e.slot == HorizonEntry::kLoading) continue;
    if (HorizonEntry::pinned(e.slot)) {
      unpins->add(e, e.slot);
    } else {
      --absent_;
    }
    partition.erase(walk.index());
  }
}

void Horizon::Unpins::add(const HorizonEntry& e, uint32_t slot) {
  slots.push_back(slot);
  keys.push_back(e.key);
  batches.push_back(static_cast<uint8_t>(e.seen));
}

void Horizon::Unpins::add(const Unpins& others) {
  slots.insert(slots.end(), others.slots.begin(), others.slots.end());
  keys.insert(keys.end(), others.keys.begin(), others.keys.end());
  batches.insert(batches.end(), others.batches.begin(), others.batches.end());
}

void Horizon::unpin(const Unpins& unpins) {
  pinned_ -= unpins.slots.size();
  unpin_rows(unpins);
}

void Horizon::unpin_rows(const Unpins& unpins) {
  tier_.unpin(unpins.slots.data(), unpins.slots.size(), false, unpins.keys.data(), unpins.batches.data());
}

void Horizon::drop() {
  std::lock_guard lock(taken_mutex_);
  dropped_ = true;
  std::vector<uint32_t> kept;
  for (const HorizonBatch* batch : taken_) {
    for (size_t r = 0; r < HorizonBatch::kRanges; ++r) {
      for (HorizonBatch::Walk walk(*batch, r); walk.next();) kept.push_back(walk.partition() << 24 | walk.index());
    }
  }
  std::sort(kept.begin(), kept.end());
  Unpins unpins;
  for (uint32_t p = 0; p < count_; ++p) {
    std::lock_guard partition_lock(partitions_[p].mutex);
    partitions_[p].for_each([&](uint32_t index, HorizonEntry& e) {
      if (!HorizonEntry::pinned(e.slot) || std::binary_search(kept.begin(), kept.end(), p << 24 | index)) return;
      unpins.add(e, e.slot);
      e.store_slot(HorizonEntry::kAbsent);
      ++absent_;  // under the lock: release() of this entry subtracts it
    });
  }
  unpin(unpins);
}

Horizon::~Horizon() {
  taken_.clear();
  drop();
}

// ---- counters

size_t Horizon::unique() const {
  size_t sum = 0;
  for (uint32_t p = 0; p < count_; ++p) sum += partitions_[p].live();
  return sum;
}

size_t Horizon::bytes() const {
  size_t sum = sizeof(*this) + count_ * sizeof(HorizonPartition) + batch_bytes_ + marks_bytes_;
  for (uint32_t p = 0; p < count_; ++p) sum += partitions_[p].bytes();
  return sum;
}

}  // namespace thermocline
