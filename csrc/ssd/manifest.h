// Identity and manifests of a store. A manifest lists the whole state of one epoch. Publishing it atomically under its
// own name is the commit; the files it lists are never written again while it exists.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ssd/format.h"
#include "util/fs.h"

namespace thermocline::ssd {

// The identity of a store, in the file STORE.
struct Identity {
  uint64_t store_id[2] = {0, 0};
  Geometry geometry;

  std::string encode() const;
  static Identity decode(std::string_view bytes, const std::string& path);
};

// Partition i covers the hashes from lo up to (not including) the next partition's lo.
struct PartitionRecord {
  uint64_t lo = 0;
  uint64_t merged_seq = 0;  // extents up to this number are merged into the base
  uint64_t file = 0;        // base file number; 0: no base
  uint64_t nonce = 0;
  uint64_t rows = 0;
  uint64_t pages = 0;         // row pages
  uint64_t filter_bytes = 0;  // 0: the base has no filter
};

struct SegmentRecord {
  uint64_t file = 0;
  uint64_t nonce = 0;
  uint64_t pages = 0;  // used by the extents of this commit, header included
};

struct ExtentRecord {
  uint64_t seq = 0;
  uint64_t segment = 0;     // file number
  uint64_t first_page = 0;  // key pages, then row pages
  uint64_t rows = 0;
  uint64_t tombstones = 0;  // 1: deletions, key pages only
};

struct Manifest {
  uint64_t store_id[2] = {0, 0};
  uint64_t epoch = 0;
  uint64_t next_file = 1;
  uint64_t next_seq = 1;
  std::string note;
  std::vector<PartitionRecord> partitions;
  std::vector<SegmentRecord> segments;
  std::vector<ExtentRecord> extents;  // by seq

  std::string encode() const;
  // Every number is within its bound afterwards, and every page of an extent within its segment.
  static Manifest decode(std::string_view bytes, const std::string& path, const Geometry& g);
};

// Reads STORE or a manifest. If the device cannot read it, the IoError names the command that repairs the store.
std::string read_record(FileSystem& fs, const std::string& path);
std::string manifest_name(uint64_t epoch);  // "MANIFEST-000000000012"
bool parse_manifest_name(const std::string& name, uint64_t* epoch);

}  // namespace thermocline::ssd
