// A store in a map, options and row access for the tests of DramTier.
#pragma once

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "dram/tier.h"
#include "util/error.h"

namespace thermocline {

// A store in a map. Counts calls, and can fail.
class MapStore : public RowStore {
 public:
  explicit MapStore(size_t row_bytes) : row_bytes_(row_bytes) {}
  size_t row_bytes() const override { return row_bytes_; }
  void get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) override {
    std::lock_guard lock(mutex_);
    ++gets;
    if (fail_gets) throw IoError("get fails", EIO);
    for (size_t i = 0; i < n; ++i) {
      auto it = rows_.find(keys[i]);
      found[i] = it != rows_.end();
      if (found[i]) std::memcpy(rows.at(i), it->second.data(), row_bytes_);
    }
  }
  void put(const uint64_t* keys, size_t n, RowsIn rows) override {
    std::lock_guard lock(mutex_);
    ++puts;
    if (fail_puts) throw DiskFullError("put fails", ENOSPC);
    for (size_t i = 0; i < n; ++i) rows_[keys[i]].assign(rows.at(i), rows.at(i) + row_bytes_);
  }
  size_t size() const { return rows_.size(); }

  std::atomic<int> gets{0}, puts{0};
  std::atomic<bool> fail_gets{false}, fail_puts{false};

 private:
  const size_t row_bytes_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::vector<uint8_t>> rows_;
};

inline constexpr RowLayout kLayout{4, Optimizer::kSgd};

inline TierOptions options(size_t budget, Policy policy = Policy::kLruLfu, int threads = 2, int shards = 4) {
  TierOptions o;
  o.layout = kLayout;
  o.initial = {InitialKind::kUniform, 0.5f, 0, 1, 2};
  o.budget = budget;
  o.policy = policy;
  o.threads = threads;
  o.shards = shards;
  o.write_ahead = 0;  // puts depend on the calls only
  return o;
}

using Row = std::array<float, 4>;

inline Row initial_row(const DramTier& tier, uint64_t key) {
  Row row;
  tier.initial().write(key, row.data());
  return row;
}

inline float* row_at(DramTier& tier, uint32_t slot) {
  return reinterpret_cast<float*>(tier.rows().base + slot * tier.rows().stride);
}

inline std::vector<uint32_t> pull(DramTier& tier, const std::vector<uint64_t>& keys) {
  std::vector<uint32_t> slots(keys.size());
  tier.pull(keys.data(), keys.size(), slots.data());
  return slots;
}

inline std::vector<uint64_t> range(uint64_t begin, uint64_t end) {
  std::vector<uint64_t> keys;
  for (uint64_t k = begin; k < end; ++k) keys.push_back(k);
  return keys;
}

}  // namespace thermocline
