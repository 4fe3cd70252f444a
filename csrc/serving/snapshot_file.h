// A memory-mapped snapshot file (snapshot_format.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "serving/snapshot_format.h"
#include "util/huge_vector.h"
#include "util/mapped_file.h"

namespace thermocline::serving {

// Thread safety: all calls may run concurrently.
class SnapshotFile {
 public:
  // Verifies header, fences and deleted keys, and that the file is complete. Throws CorruptionError or FormatError.
  explicit SnapshotFile(const std::string& path);

  uint32_t row_bytes() const { return geometry_.row_bytes; }
  uint64_t rows() const { return header_.rows; }
  uint64_t bytes() const { return file_.size(); }
  const std::string& path() const { return file_.path(); }
  // DRAM beside the mapping: directory, fences and flags of verified pages.
  uint64_t mem_bytes() const;

  // ---- lookup in three steps, so that a batch can prefetch what the next step reads. h = hash_key(key).
  void prefetch_directory(uint64_t h) const { __builtin_prefetch(&directory_[h >> shift_]); }
  void prefetch_fence(uint64_t h) const { __builtin_prefetch(&fences_[directory_[h >> shift_]]); }
  // Row page that has the key if the file does; prefetches the keys near its expected position. rows() > 0.
  struct Place {
    uint64_t page;  // 0 is the first row page
    uint32_t guess, count;
  };
  Place locate(uint64_t h) const;
  // The row of the key, or nullptr. Verifies the page when it is read for the first time: throws CorruptionError.
  const uint8_t* find(uint64_t key, uint64_t h, const Place& place) const;
  // find() on the bytes of the page, read by the caller, who verifies them by check_page().
  const uint8_t* find_on(const uint8_t* bytes, uint64_t key, uint64_t h, const Place& place) const;
  void check_page(const uint8_t* bytes, uint64_t row_page) const;
  uint32_t page_bytes() const { return geometry_.page_bytes; }

  // Verifies every page.
  void verify() const;
  // Calls fn with each key and its row, in hash order, then with each deleted key and nullptr, in hash order.
  void for_each(const std::function<void(uint64_t key, const uint8_t* row)>& fn) const;
  // Copies rows [first, first + n) in hash order.
  void copy_rows(uint64_t first, uint64_t n, uint64_t* keys, uint8_t* rows) const;
  std::span<const uint64_t> deleted() const { return deleted_; }

 private:
  const uint8_t* page(uint64_t number) const { return file_.data() + number * geometry_.page_bytes; }
  uint32_t rows_on(uint64_t row_page) const;
  const uint8_t* verified_page(uint64_t row_page) const;
  HugeVector<uint64_t> read_column(uint64_t first_page, uint64_t values, uint32_t per_page, ssd::PageKind kind) const;

  MappedFile file_;
  ssd::Geometry geometry_{};
  SnapshotHeader header_{};
  SnapshotLayout layout_{};
  HugeVector<uint64_t> fences_, deleted_;
  HugeVector<uint32_t> directory_;  // by the first bits of a hash: the page that has the least hash of these bits
  int shift_ = 63;
  mutable std::unique_ptr<std::atomic<uint64_t>[]> verified_;  // one bit per row page
};

}  // namespace thermocline::serving
