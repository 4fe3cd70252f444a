// What the memory tier needs of the tier below it. Implemented by ssd/store.h; tests use a map.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

// Where row i of a batch is written: base + (slot ? slot[i] : i) * stride.
struct RowsOut {
  uint8_t* base;
  size_t stride;
  const uint32_t* slot = nullptr;
  uint8_t* at(size_t i) const { return base + (slot ? slot[i] : i) * stride; }
};

// Where row i of a batch is read from.
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

  // found[i] = 1 and the row is written if key i is there; otherwise found[i] = 0 and its place stays untouched.
  // Keys may repeat.
  virtual void get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) = 0;

  // Newest wins; of a key that repeats within one call the last occurrence wins.
  virtual void put(const uint64_t* keys, size_t n, RowsIn rows) = 0;
};

}  // namespace thermocline
