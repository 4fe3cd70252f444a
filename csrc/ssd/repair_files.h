// Files that a repair reads before the data: the identity of the store, and the files that its manifests list.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ssd/manifest.h"
#include "ssd/salvage.h"
#include "util/error.h"
#include "util/fs.h"

namespace thermocline::ssd {

inline constexpr char kIdentityFile[] = "STORE";

// The hashes of a partition.
HashRange range_of(const Manifest& m, size_t partition);

// The message of an error without the advice to repair.
std::string cause_of(const Error& e);

// Reads STORE or a manifest and decodes it. An unreadable one is damaged.
template <class Decode>
auto read_damaged(FileSystem& fs, const std::string& path, Decode&& decode) {
  try {
    return decode(read_record(fs, path));
  } catch (const IoError& e) {
    if (!is_unreadable(e)) throw;
    throw CorruptionError(cause_of(e));
  }
}

// Rebuilds the identity from a data file whose store id is that of a manifest. `cause`: the damage of STORE.
Identity rebuild_identity(FileSystem& fs, const std::string& path, const std::string& cause);

struct BaseUse {
  PartitionRecord record;
  HashRange range;
  std::vector<uint64_t> epochs;
};

struct SegmentUse {
  uint64_t nonce = 0, pages = 0;             // pages: the most of all manifests
  std::map<uint64_t, ExtentRecord> extents;  // by first page
  std::vector<uint64_t> epochs;
};

struct FileUses {
  std::map<uint64_t, BaseUse> bases;  // by file number
  std::map<uint64_t, SegmentUse> segments;

  // Adds the files of a manifest. False, with no change: it contradicts those added before.
  bool add(const Manifest& m, const Geometry& g);
  bool names(uint64_t file) const { return bases.count(file) || segments.count(file); }

 private:
  bool add_base(const Manifest& m, size_t i);
  bool add_segment(const Manifest& m, const SegmentRecord& s);
};

}  // namespace thermocline::ssd
