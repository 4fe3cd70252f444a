// Division of the budget, and grouping of a batch by shard.
#include "dram/tier.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "util/error.h"
#include "util/hash.h"

namespace thermocline {
namespace {

constexpr size_t kSmallKeys = 65536;
constexpr size_t kSmallBudget = 64u << 20;
constexpr size_t kHashBlock = 256;
constexpr size_t kInlineKeys = 2048;  // smaller groups are processed without waking threads
constexpr size_t kStagedBytes = 8u << 20;
constexpr size_t kStagedRowBytes = sizeof(uint64_t) + sizeof(uint32_t);  // key and slot, beside the row

TierOptions options_with(TierOptions options, const RowStore* store) {
  if (!store) options.write_ahead = 0;
  return options;
}

static_assert(offsetof(SlotMeta, key) == 0);  // Rows::keys of rows() relies on it

}  // namespace

RowStore* DramTier::check_row_bytes(RowStore* store) const {
  if (store && store->row_bytes() != row_bytes_) {
    throw Error("the store has rows of " + std::to_string(store->row_bytes()) + " bytes, but dim " +
                std::to_string(options_.layout.dim) + " with this optimizer and precision needs rows of " +
                std::to_string(row_bytes_) + " bytes; open the store with row_bytes=" + std::to_string(row_bytes_) +
                ", or use the dim, optimizer and precision it was created with");
  }
  return store;
}

// ---- budget

DramTier::Plan DramTier::plan_for(uint32_t capacity, const TierOptions& options) {
  Plan p{};
  const size_t row_bytes = options.layout.bytes();
  p.capacity = capacity;
  p.shards = options.shards ? options.shards : std::bit_floor(std::clamp<uint32_t>(capacity / 4096, 1, 64));
  // The number of keys per shard varies: the index has buckets for eight standard deviations above the mean.
  const double share = static_cast<double>(capacity) / p.shards;
  const double most = std::min<double>(capacity, share + 8 * std::sqrt(share) + 32);
  p.buckets = static_cast<uint32_t>(most * 1.25) + 2;
  // Four: two parts of a look-ahead, and beside them a pull or read() and a push(). In little memory two larger ones.
  p.scratches = options.budget < kSmallBudget ? 2 : 4;
  p.scratch_keys = std::clamp<size_t>(options.budget / 16 / (p.scratches * Scratch::kBytes), 64, 1 << 22) / 64 * 64;
  const size_t small_keys = std::min(p.scratch_keys, kSmallKeys);
  const bool ahead = options.write_ahead.value_or(1) > 0;
  p.staged_rows = ahead ? std::min(kStagedBytes, options.budget / 32) / (row_bytes + kStagedRowBytes) : 0;
  p.rows = capacity * row_stride(row_bytes);
  p.metadata = (size_t{capacity} + size_t{p.shards} * Shard::kLists) * sizeof(SlotMeta) +
               (size_t{capacity} + 63) / 64 * (2 * sizeof(uint64_t) + 64) + p.shards * sizeof(Shard);
  p.index = size_t{p.shards} * p.buckets * sizeof(uint64_t);
  p.buffers = options.reserved + p.staged_rows * (row_bytes + kStagedRowBytes) +
              p.scratches * (p.scratch_keys * Scratch::kBytes + small_keys * Scratch::kSmallBytes);
  return p;
}

DramTier::Plan DramTier::make_plan(const TierOptions& options) {
  const auto fits = [&](uint32_t capacity) { return plan_for(capacity, options).total() <= options.budget; };
  if (!fits(1)) {
    throw BudgetError("DRAM tier: a budget of " + std::to_string(options.budget) + " bytes cannot hold one row of " +
                      std::to_string(options.layout.bytes()) + " bytes; the minimum is " +
                      std::to_string(plan_for(1, options).total()) + " bytes");
  }
  uint32_t lo = 1, hi = (1u << 31) + (1u << 30);  // below 2^32 minus the sentinels
  while (hi - lo > 1) {
    const uint32_t mid = lo + (hi - lo) / 2;
    (fits(mid) ? lo : hi) = mid;
  }
  return plan_for(lo, options);
}

DramTier::DramTier(const TierOptions& options, RowStore* store)
    : options_(options_with(options, store)),
      row_bytes_(options.layout.bytes()),
      stride_(row_stride(row_bytes_)),
      store_(check_row_bytes(store)),
      initial_(options.initial, options.layout),
      codec_{options.layout, table_mix(options.initial.seed, options.initial.table)},
      plan_(make_plan(options_)),
      slab_(plan_.rows),
      meta_((size_t{plan_.capacity} + size_t{plan_.shards} * Shard::kLists) * sizeof(SlotMeta)),
      index_(plan_.index),
      dirty_((size_t{plan_.capacity} + 63) / 64 * sizeof(uint64_t)),
      written_((size_t{plan_.capacity} + 63) / 64 * sizeof(uint64_t)),
      prefixes_((size_t{plan_.capacity} + 63) / 64 * 64),
      staging_(plan_.staged_rows * (row_bytes_ + kStagedRowBytes)),
      shards_(std::make_unique<Shard[]>(plan_.shards)),
      pool_(options.threads),
      scratch_(plan_.scratches, plan_.scratch_keys, false),
      small_scratch_(plan_.scratches, std::min(plan_.scratch_keys, kSmallKeys), true),
      slots_version_(next_slots_version()),
      reserve_(options_.write_ahead.value_or(plan_.capacity / 16)),
      background_([this] { write_ahead(reserve_); }) {
  for (uint32_t s = 0; s < plan_.shards; ++s) {
    shards_[s].init(meta(), prefixes_.as<uint8_t>(), plan_.capacity + s * Shard::kLists,
                    index_.as<uint64_t>() + size_t{s} * plan_.buckets, plan_.buckets,
                    store ? options.policy : Policy::kNever, plan_.capacity / plan_.shards);
  }
}

void DramTier::require_capacity(size_t needed, size_t missing) {
  size_t available = 0;
  if (store_) {
    for (uint32_t s = 0; s < plan_.shards; ++s) {
      std::lock_guard lock(shards_[s].mutex);
      available += shards_[s].evictable();
    }
  }
  {
    std::lock_guard lock(free_mutex_);
    available += free_listed_ + (plan_.capacity - never_used_);
  }
  if (missing > available) throw_over_budget(needed, missing, available);
}

void DramTier::throw_over_budget(size_t needed, size_t missing, size_t available) const {
  const double bytes_per_row = static_cast<double>(options_.budget) / plan_.capacity;
  std::string text = "DRAM tier: a working set of " + std::to_string(needed) + " rows does not fit: the budget of " +
                     std::to_string(options_.budget) + " bytes holds " + std::to_string(plan_.capacity) + " rows; " +
                     std::to_string(missing) + " rows are missing and " + std::to_string(available) +
                     " slots are free" + (store_ ? " or can be evicted" : "") + "; the other rows are pinned" +
                     (store_ ? "" : " or cannot be evicted without a store") + ". ";
  if (needed > plan_.capacity) {
    text +=
        "It needs a budget of about " +
        std::to_string(static_cast<uint64_t>(bytes_per_row * static_cast<double>(needed) * 1.01)) +
        " bytes (tiers.mem); raise it, or use a smaller batch" +
        (store_ ? "" : "; without a store (tiers.ssd) all rows of the training must fit, not only this working set");
  } else {
    text += store_ ? "Raise the budget (tiers.mem), or use smaller batches or fewer batches in flight"
                   : "Raise the budget (tiers.mem), or add a store (tiers.ssd)";
  }
  throw BudgetError(text);
}

// ---- grouping by shard

DramTier::Hash DramTier::hash(uint64_t key) const {
  const uint64_t m = mem_hash(hash_key(key));
  return {static_cast<uint32_t>(m >> 56) & (plan_.shards - 1), static_cast<uint32_t>(m)};
}

// A stable counting sort: within a shard, keys keep the order of the batch for any number of threads.
template <typename KeyOf>
void DramTier::group(const Scratch::Grouping& g, size_t n, const KeyOf& key_of, bool with_tags, const ShardTask& f) {
  const size_t shards = plan_.shards;
  const size_t chunks = std::min<size_t>(size_t{4} * pool_.size(), n / kInlineKeys + 1);
  // Per chunk and shard: the number of keys, then the offset of the chunk's next probe.
  std::vector<uint32_t> offsets(chunks * shards, 0);
  uint32_t* const tags = with_tags ? g.tags : nullptr;
  pool_.parallel(chunks, [&](size_t c) {
    const size_t end = n * (c + 1) / chunks, mask = shards - 1;
    uint32_t* const counts = offsets.data() + c * shards;
    uint8_t* const shard = g.shards;
    uint64_t keys[kHashBlock], hashes[kHashBlock];
    for (size_t b = n * c / chunks; b < end; b += kHashBlock) {
      const size_t m = std::min(kHashBlock, end - b);
      for (size_t i = 0; i < m; ++i) keys[i] = key_of(b + i);
      kernels().mem_hash_keys(keys, m, hashes);
      for (size_t i = 0; i < m; ++i) ++counts[shard[b + i] = static_cast<uint8_t>(hashes[i] >> 56 & mask)];
      for (size_t i = 0; tags && i < m; ++i) tags[b + i] = static_cast<uint32_t>(hashes[i]);
    }
  });
  std::vector<uint32_t> begin(shards + 1, 0);
  uint32_t sum = 0;
  for (size_t h = 0; h < shards; ++h) {
    begin[h] = sum;
    for (size_t c = 0; c < chunks; ++c) sum += std::exchange(offsets[c * shards + h], sum);
  }
  begin[shards] = sum;
  pool_.parallel(chunks, [&](size_t c) {
    const size_t end = n * (c + 1) / chunks;
    uint32_t* const next = offsets.data() + c * shards;
    const uint8_t* const shard = g.shards;
    Probe* const probes = g.probes;
    for (size_t i = n * c / chunks; i < end; ++i)
      probes[next[shard[i]]++] = {static_cast<uint32_t>(i), tags ? tags[i] : 0};
  });
  const auto task = [&](size_t h) {
    if (begin[h] == begin[h + 1]) return;
    std::lock_guard lock(shards_[h].mutex);
    f(shards_[h], g.probes + begin[h], begin[h + 1] - begin[h]);
  };
  if (n < kInlineKeys) {
    for (size_t h = 0; h < shards; ++h) task(h);
  } else {
    pool_.parallel(shards, task);
  }
}

void DramTier::sort_by_shard(const uint64_t* keys, size_t n, Probe* probes, uint32_t* starts) const {
  const size_t mask = plan_.shards - 1;
  uint64_t hashes[kHashBlock];
  uint32_t next[kMaxShards + 1] = {};
  const auto for_hashes = [&](const auto& f) {
    for (size_t b = 0; b < n; b += kHashBlock) {
      const size_t m = std::min(kHashBlock, n - b);
      kernels().mem_hash_keys(keys + b, m, hashes);
      for (size_t i = 0; i < m; ++i) f(b + i, hashes[i] >> 56 & mask, static_cast<uint32_t>(hashes[i]));
    }
  };
  for_hashes([&](size_t, size_t shard, uint32_t) { ++next[shard + 1]; });
  for (uint32_t h = 0; h < plan_.shards; ++h) next[h + 1] += next[h];
  std::copy_n(next, plan_.shards + 1, starts);
  for_hashes([&](size_t i, size_t shard, uint32_t tag) { probes[next[shard]++] = {static_cast<uint32_t>(i), tag}; });
}

void DramTier::for_key_groups(Scratch& s, const uint64_t* keys, const uint32_t* positions, size_t n,
                              const ShardTask& f) {
  const Scratch::Grouping g = s.grouping();
  if (positions) group(g, n, [keys, positions](size_t i) { return keys[positions[i]]; }, true, f);
  else group(g, n, [keys](size_t i) { return keys[i]; }, true, f);
}

void DramTier::for_slot_groups(Scratch& s, const uint32_t* slots, const uint64_t* keys, size_t n, const ShardTask& f) {
  const auto key_of_slot = [m = meta(), slots, n](size_t i) {
    __builtin_prefetch(&m[slots[std::min(i + 16, n - 1)]]);
    return m[slots[i]].key;
  };
  if (keys) group(s.grouping(), n, [keys](size_t i) { return keys[i]; }, false, f);
  else group(s.grouping(), n, key_of_slot, false, f);
}

void DramTier::check_slots(const uint32_t* slots, size_t n) const {
  uint32_t most = 0;
  for (size_t i = 0; i < n; ++i) most = std::max(most, slots[i]);
  if (n && most >= plan_.capacity) {
    throw Error("DRAM tier: slot " + std::to_string(most) + " is out of range: the tier has " +
                std::to_string(plan_.capacity) + " slots; pass slots that pull() returned");
  }
}

}  // namespace thermocline
