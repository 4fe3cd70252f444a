// Batched lookups of SsdStore: plan under the index lock, then read, verify and copy without it.
#include <algorithm>
#include <array>

#include "ssd/impl.h"

namespace thermocline {

using namespace ssd;

namespace {
constexpr size_t kPlanKeys = 1u << 20;  // of one plan: bounds the working memory of a call
constexpr size_t kMeasureFrom = 4096;   // lookups that justify measuring the device
}  // namespace

template <class Fn>
void SsdStore::Impl::for_each_plan(const uint64_t* keys, size_t n, Fn&& fn) {
  if (n > UINT32_MAX) throw Error(ctx.path + ": more than 2^32 keys in one call");
  // Large batches are split by hash, not by position, so that each plan has the key density of the whole batch.
  // start[b]: keys whose hash has a lower top byte than b.
  std::array<size_t, 257> start{};
  if (n > kPlanKeys) {
    for (size_t i = 0; i < n; ++i) ++start[(hash_key(keys[i]) >> 56) + 1];
    for (size_t b = 0; b < 256; ++b) start[b + 1] += start[b];
  }
  for (size_t b = 0; b < 256;) {
    size_t end = n > kPlanKeys ? b + 1 : 256;
    while (end < 256 && start[end + 1] - start[b] <= kPlanKeys) ++end;
    ReadPlan plan;
    plan.items.reserve(n > kPlanKeys ? start[end] - start[b] : n);
    for (size_t i = 0; i < n; ++i) {
      uint64_t hash = hash_key(keys[i]), bucket = hash >> 56;
      if (bucket >= b && bucket < end) plan.items.push_back({hash, static_cast<uint32_t>(i)});
    }
    b = end;
    if (plan.items.empty()) continue;
    sort_items(plan.items);
    fn(plan);
  }
}

void SsdStore::Impl::take_from_buffer(ReadPlan& plan, const uint64_t* keys, uint8_t* found, RowsOut rows) const {
  if (buffer_.size() == 0) return;
  size_t kept = 0;
  for (auto& item : plan.items) {
    int64_t at = buffer_.find(keys[item.index]);
    if (at < 0) {
      plan.items[kept++] = item;
    } else if (!buffer_.deleted(static_cast<uint32_t>(at))) {
      std::memcpy(rows.at(item.index), buffer_.row(static_cast<uint32_t>(at)), ctx.g.row_bytes);
      found[item.index] = 1;
    }
  }
  plan.items.resize(kept);
}

void SsdStore::Impl::get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) {
  auto life = alive();
  std::memset(found, 0, n);
  for_each_plan(keys, n, [&](ReadPlan& plan) {
    {
      std::shared_lock lock(index_mutex_);
      take_from_buffer(plan, keys, found, rows);
      plan_reads(index_, plan);
    }
    if (plan.lookups.size() >= kMeasureFrom) reader_.measure(plan);
    for (ReadPlan rest = reader_.run(plan, keys, found, rows); !rest.items.empty();) {
      {
        std::shared_lock lock(index_mutex_);
        plan_reads(index_, rest);
      }
      rest = reader_.run(rest, keys, found, rows);
    }
  });
}

double SsdStore::Impl::read_floor(const uint64_t* keys, size_t n) {
  auto life = alive();
  double seconds = 0;
  for_each_plan(keys, n, [&](ReadPlan& plan) {
    {
      std::shared_lock lock(index_mutex_);
      plan_reads(index_, plan);
    }
    if (plan.lookups.size() >= kMeasureFrom) reader_.measure(plan);
    seconds += reader_.time_reads(plan);
  });
  return seconds;
}

}  // namespace thermocline
