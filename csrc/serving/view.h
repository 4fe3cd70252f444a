// One version of a served table: a base file and the changes of later deltas. Immutable: a delta gives a new view, so a
// lookup sees one version, while newer ones are being prepared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "serving/overlay.h"
#include "serving/page_reader.h"
#include "serving/snapshot_file.h"

namespace thermocline::serving {

// Stored form of a row of `dim` weights.
enum class RowFormat : uint8_t {
  kFp32 = 0,
  kFp16 = 1,
  kInt8 = 2,  // fp32 scale, fp32 offset, then one unsigned byte per weight: weight = offset + scale * byte
};
uint64_t row_bytes_of(RowFormat format, uint32_t dim);

// Thread safety: all calls may run concurrently.
class View {
 public:
  static std::shared_ptr<const View> open(const std::string& base, RowFormat format, uint32_t dim);
  // A copy of this view whose lookups read pages of the base from the device, past the page cache.
  std::shared_ptr<const View> with_direct_reads(std::shared_ptr<FileSystem> fs) const;
  // The next version. Verifies every page of the delta first: throws CorruptionError and changes nothing.
  std::shared_ptr<const View> with_delta(const std::string& delta) const;

  // found[i]: whether the table has key i; its weights are written to out + i * dim. Other rows are not written.
  void lookup(const uint64_t* keys, size_t n, uint8_t* found, float* out) const;
  // For benchmarks: seconds of the page reads of a lookup alone. Only with direct reads.
  double read_floor(const uint64_t* keys, size_t n) const;

  // Iterates over the rows of this version in hash order.
  class Scan {
   public:
    explicit Scan(std::shared_ptr<const View> view);
    // Copies stored rows; returns their number; 0: end.
    size_t next(size_t max_rows, uint64_t* keys, uint8_t* rows);
    uint32_t row_bytes() const { return view_->row_bytes(); }

   private:
    std::shared_ptr<const View> view_;
    std::vector<Overlay::Entry> changed_;  // in hash order
    size_t changed_at_ = 0;
    uint64_t base_at_ = 0;
    std::vector<uint64_t> keys_;  // read ahead from the base
    std::vector<uint8_t> rows_;
    size_t ahead_ = 0, ahead_at_ = 0;
  };

  uint32_t dim() const { return dim_; }
  uint32_t row_bytes() const { return base_->row_bytes(); }
  uint64_t changed_rows() const;  // keys in deltas since the base, deleted ones included
  uint64_t base_rows() const { return base_->rows(); }
  uint64_t mem_bytes() const;
  void verify() const { base_->verify(); }

 private:
  View() = default;
  // Hashes the keys and prefetches what locating them reads.
  void prefetch_block(const uint64_t* keys, size_t n, uint64_t* hashes) const;
  void lookup_direct(const uint64_t* keys, size_t n, uint8_t* found, float* out) const;
  const Overlay::Entry* find_changed(uint64_t key, uint64_t h) const;
  void decode(const uint8_t* row, float* out) const;

  std::shared_ptr<const SnapshotFile> base_;
  std::shared_ptr<const Overlay> main_, recent_;  // recent_ is newer and small; each may be nullptr
  std::shared_ptr<const ChangeFilter> filter_;    // of the keys of both; nullptr: there are none
  std::shared_ptr<PageReader> direct_;            // nullptr: lookups read the mapping
  RowFormat format_{};
  uint32_t dim_ = 0;
};

}  // namespace thermocline::serving
