// Repairs the files of a closed store: rebuilds what follows from undamaged pages, sets aside the rest.
//
// After repair_store() the store opens, check() passes, and every row outside the reported losses has the bytes of its
// commit. No stale row becomes visible: where the newest version of a row, or its deletion, is lost, older versions are
// removed too (unless `keep_older`). Damaged files, replaced files and manifests are kept in the folder damaged/ of the
// store; nothing is deleted.
//
// Crash safety: files are written under new names and synced before a rename or a manifest makes them visible. After a
// crash at any point every commit is in its old or its repaired state, and another repair continues.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "util/fs.h"

namespace thermocline {

struct RepairOptions {
  bool dry_run = false;     // report, change no file
  bool keep_older = false;  // keep older versions of rows whose newest version or deletion is lost
  size_t mem_budget = 256u << 20;
};

struct RepairReport {
  struct Rebuilt {
    std::string file, cause;  // the cause has the first damaged page
  };
  struct Loss {
    std::string file, cause;
    uint64_t first_page = 0, pages = 0;
    uint64_t rows = 0;             // on these pages: rows, or deletions of the log
    uint64_t lo = 0, hi = 0;       // hashes of the lost rows are in this range, both inclusive
    std::vector<uint64_t> epochs;  // commits that list the file
  };
  struct LostCommit {
    uint64_t epoch = 0;
    std::string cause;
  };
  uint64_t epoch = 0;            // the newest commit that can be opened
  std::vector<Rebuilt> rebuilt;  // without any loss
  std::vector<Loss> losses;
  std::vector<LostCommit> lost_commits;  // their manifests are damaged
  uint64_t rows_hidden = 0;              // older versions of lost rows that are removed, in all commits
  std::vector<std::string> set_aside;    // names in damaged/
};

// `path` is the folder of a store that no process has open. Throws LockError, NotFoundError or FormatError if it is
// none, CorruptionError if no commit can be recovered.
RepairReport repair_store(std::shared_ptr<FileSystem> fs, const std::string& path, const RepairOptions& options);

}  // namespace thermocline
