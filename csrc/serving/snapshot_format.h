// The snapshot file: rows of one table for serving, immutable, in hash order. docs/formats.md describes it. Persisted
// numbers never change. Pages are those of the store (ssd/format.h): keys, then rows, with a checksum per page.
//
//   page 0                  header
//   row_pages pages         rows; every page but the last is full
//   fence pages             first hash of each row page
//   key pages               deleted keys (a delta has them, a base has none)
#pragma once

#include <cstdint>

#include "ssd/format.h"

namespace thermocline::serving {

inline constexpr uint32_t kSnapshotVersion = 1;
inline constexpr char kSnapshotMagic[8] = {'T', 'H', 'M', 'C', 'S', 'N', 'A', 'P'};
inline constexpr uint64_t kMaxRows = uint64_t{1} << 40;

// Follows the PageHeader on page 0.
struct SnapshotHeader {
  char magic[8];
  uint32_t version;
  uint32_t row_bytes;
  uint32_t page_bytes;
  uint32_t reserved32;
  uint64_t nonce;  // seed of all page checksums
  uint64_t rows;
  uint64_t deleted;
};
static_assert(sizeof(SnapshotHeader) == 48);

// Page numbers of the parts of a file.
struct SnapshotLayout {
  uint64_t row_pages, fence_pages, key_pages;
  uint64_t first_fence_page() const { return 1 + row_pages; }
  uint64_t first_key_page() const { return 1 + row_pages + fence_pages; }
  uint64_t pages() const { return 1 + row_pages + fence_pages + key_pages; }

  static SnapshotLayout of(const ssd::Geometry& g, uint64_t rows, uint64_t deleted) {
    uint64_t row_pages = g.row_pages(rows);
    return {row_pages, g.fence_pages(row_pages), g.key_pages(deleted)};
  }
};

}  // namespace thermocline::serving
