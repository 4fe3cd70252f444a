// Interface of the tier below the DRAM tier. Implemented by ssd/store.h; tests use a map.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

// Destination of the rows of a batch: row i is at base + (slot ? slot[i] : i) * stride.
struct RowsOut {
  uint8_t* base;
  size_t stride;
  const uint32_t* slot = nullptr;
  uint8_t* at(size_t i) const { return base + (slot ? slot[i] : i) * stride; }
};

// Source of the rows of a batch, with the same addressing.
struct RowsIn {
  const uint8_t* base;
  size_t stride;
  const uint32_t* slot = nullptr;
  const uint8_t* at(size_t i) const { return base + (slot ? slot[i] : i) * stride; }
};

// Thread safety: all calls may run concurrently; a put is seen by every get that starts after it returned.
class RowStore {
 public:
  virtual ~RowStore() = default;
  virtual size_t row_bytes() const = 0;

  // If the store has key i, writes its row and sets found[i] = 1. Otherwise sets found[i] = 0 and writes no row. Keys
  // may repeat.
  virtual void get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) = 0;

  // Replaces the rows of the keys. The last row of a repeated key wins.
  virtual void put(const uint64_t* keys, size_t n, RowsIn rows) = 0;
};

}  // namespace thermocline
