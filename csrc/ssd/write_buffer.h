// Collects rows of small puts until there are enough for an extent. Allocated on first use.
// Thread safety: protected by the store's index lock: shared for const methods, exclusive for the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "util/hash.h"

namespace thermocline::ssd {

class WriteBuffer {
 public:
  WriteBuffer(uint32_t row_bytes, size_t budget_bytes)
      : row_bytes_(row_bytes), capacity_(static_cast<uint32_t>(budget_bytes / (row_bytes + 8 + 1 + 8))) {
    if (capacity_ < 1) capacity_ = 1;
  }

  uint32_t capacity() const { return capacity_; }
  uint32_t size() const { return static_cast<uint32_t>(keys_.size()); }
  bool full() const { return size() == capacity_; }

  // Returns the index of the key's entry, or -1.
  int64_t find(uint64_t key) const {
    if (keys_.empty()) return -1;
    for (uint64_t at = probe(key) & mask_;; at = (at + 1) & mask_) {
      uint32_t entry = table_[at];
      if (entry == 0) return -1;
      if (keys_[entry - 1] == key) return entry - 1;
    }
  }

  uint64_t key(uint32_t i) const { return keys_[i]; }
  bool deleted(uint32_t i) const { return deleted_[i] != 0; }
  const uint8_t* row(uint32_t i) const { return rows_.data() + uint64_t{i} * row_bytes_; }
  const std::vector<uint64_t>& keys() const { return keys_; }
  const uint8_t* rows() const { return rows_.data(); }

  // `row` null: a deletion. The buffer must not be full unless the key is in it.
  void set(uint64_t key, const uint8_t* row) {
    if (table_.empty()) allocate();
    int64_t i = find(key);
    if (i < 0) {
      i = size();
      keys_.push_back(key);
      deleted_.push_back(0);
      uint64_t at = probe(key) & mask_;
      while (table_[at] != 0) at = (at + 1) & mask_;
      table_[at] = static_cast<uint32_t>(i + 1);
    }
    deleted_[static_cast<size_t>(i)] = row == nullptr;
    if (row) std::memcpy(rows_.data() + static_cast<uint64_t>(i) * row_bytes_, row, row_bytes_);
  }

  void clear() {
    keys_.clear();
    deleted_.clear();
    std::fill(table_.begin(), table_.end(), 0);
  }

  uint64_t memory() const {
    return keys_.capacity() * 8 + deleted_.capacity() + rows_.capacity() + table_.capacity() * 4;
  }

 private:
  static uint64_t probe(uint64_t key) { return mem_hash(hash_key(key)); }

  void allocate() {
    uint64_t slots = 16;
    while (slots < uint64_t{capacity_} * 5 / 4) slots *= 2;
    keys_.reserve(capacity_);
    deleted_.reserve(capacity_);
    rows_.resize(uint64_t{capacity_} * row_bytes_);
    table_.assign(slots, 0);  // last: a non-empty table_ means that everything is allocated
    mask_ = slots - 1;
  }

  const uint32_t row_bytes_;
  uint32_t capacity_;
  uint64_t mask_ = 0;
  std::vector<uint32_t> table_;  // entry index + 1; 0: free
  std::vector<uint64_t> keys_;
  std::vector<uint8_t> deleted_;
  std::vector<uint8_t> rows_;
};

}  // namespace thermocline::ssd
