// Reads damaged data files: finds every damaged page, what can be rebuilt from the others, and what is lost.
//
// Row pages have the keys of their rows. Header, fences, filter and the key columns of extents of rows follow from the
// manifest and the row pages: they are rebuilt with the same bytes. A damaged row page is lost, and so is a damaged
// page of tombstones, the only copy of its keys.
//
// A version that is lost from the log hides older versions of its key: they are not the committed row. LostVersions
// says which older versions must not be returned any more.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ssd/files.h"

namespace thermocline::ssd {

struct HashRange {
  uint64_t lo = 0, hi = 0;  // both inclusive
};

// Consecutive lost pages of one file.
struct LostPages {
  uint64_t first_page = 0, pages = 0;
  uint64_t rows = 0;  // on these pages: rows, or deletions of the log
  HashRange range;    // contains the hashes of all of them
  std::string cause;  // of the first page
};

// Versions of an extent that are lost.
struct LostVersions {
  uint64_t seq = 0;
  std::vector<uint64_t> hashes;   // ascending: rows whose keys are known from the key column
  std::vector<HashRange> ranges;  // of rows or deletions whose keys are unknown; ascending, disjoint

  bool empty() const { return hashes.empty() && ranges.empty(); }
  bool contains(uint64_t hash) const;
  bool intersects(const HashRange& range) const;
};

// Reads pages of a data file that may be missing, truncated, unreadable or damaged. Not thread-safe.
class PageReader {
 public:
  PageReader(Context& ctx, FileKind kind, uint64_t number, uint64_t nonce);

  uint64_t count() const { return pages_; }  // whole pages of the file; 0: it is missing
  // Bytes of a page, or null if it cannot be read; cause() then says why. Valid until the next call.
  const uint8_t* raw(uint64_t page);
  // Bytes of a valid page of this kind, or null, as raw().
  const uint8_t* read(uint64_t page, PageKind kind);
  const uint8_t* header();
  const std::string& cause() const { return cause_; }

 private:
  bool fill(uint64_t page, uint64_t pages);

  Context& ctx_;
  const FileKind kind_;
  const uint64_t number_, nonce_;
  std::unique_ptr<File> file_;
  uint64_t pages_ = 0;
  AlignedBuffer buffer_;
  uint64_t first_ = 0, buffered_ = 0;
  std::string cause_;
};

// State of a base file. `record` and `range` are those of its partition.
struct BaseScan {
  PartitionRecord record;
  HashRange range;
  std::string rebuild;  // "" or the first damaged page of header, fences or filter
  std::vector<LostPages> lost;
  bool drop_filter = false;  // its size in the manifest has no relation to the file

  bool damaged() const { return !rebuild.empty() || replaced(); }
  bool replaced() const { return !lost.empty() || drop_filter; }  // by a file with other contents
  bool lost_page(uint64_t page) const;
};

BaseScan scan_base(Context& ctx, const PartitionRecord& record, const HashRange& range);
// Writes the rows of all pages that are not lost. The result is byte for byte the undamaged file if no page is lost and
// `file` and `filter` have its nonce and its size.
std::shared_ptr<const BaseFile> copy_base(Context& ctx, const BaseScan& scan, std::shared_ptr<DataFile> file,
                                          Filter filter);

// State of an extent.
struct ExtentScan {
  ExtentRecord record;
  std::string rebuild;  // "" or the first damaged key page of an extent of rows
  std::vector<LostPages> lost;
  LostVersions versions;
  std::vector<uint64_t> keys;  // of all rows that are not lost, in order

  bool damaged() const { return !rebuild.empty() || !lost.empty(); }
};

ExtentScan scan_extent(Context& ctx, PageReader& pages, const ExtentRecord& record);
// Reads the rows that are not lost, in the order of scan.keys.
std::vector<uint8_t> read_rows(Context& ctx, PageReader& pages, const ExtentScan& scan);

}  // namespace thermocline::ssd
