// The files and epochs of a store. A file is needed by the retained epochs that list it, and by every holder of its
// DataFile (index, reads, scans, merges). collect() deletes the files that are not needed.
//
// Thread safety: all methods may run concurrently. mutex_ is innermost: no other lock is taken while it is held.
// Invariants:
//  1. Entry::epochs is the number of retained epochs that list the file.
//  2. No file of a retained epoch is deleted; with a damaged manifest no file is deleted at all.
//  3. A manifest is durably removed before any of its files is deleted.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ssd/files.h"
#include "ssd/manifest.h"

namespace thermocline::ssd {

class Catalog {
 public:
  explicit Catalog(Context& ctx) : ctx_(ctx) {}

  // Reads the folder: manifests and data files. A damaged manifest prevents all deletions until it is released or set
  // aside by a repair; a warning names it.
  void load();
  Manifest read(uint64_t epoch) const;

  std::vector<uint64_t> epochs() const;  // retained, oldest first; without epoch 0, the empty state of a new store
  uint64_t newest() const;               // 0: no commit
  bool has(uint64_t epoch) const;
  bool all_damaged() const;  // no manifest is valid

  std::shared_ptr<DataFile> create(FileKind kind);
  void opened(const std::shared_ptr<DataFile>& file);

  // Commits: publishes the manifest. The first commit removes epoch 0.
  void publish(const Manifest& manifest);
  void require_releasable(uint64_t epoch) const;  // throws NotFoundError, or Error for the newest
  void release(uint64_t epoch);                   // not concurrently with itself or publish()
  // Deletes all files that are not needed.
  void collect();

  uint64_t disk_bytes() const;
  uint64_t files() const;
  uint64_t next_file() const;

 private:
  struct Entry {
    FileKind kind;
    std::weak_ptr<DataFile> open;
    uint64_t pages = 0;
    uint32_t epochs = 0;  // retained epochs that list it
  };
  struct Epoch {
    std::vector<uint64_t> files;
    bool damaged = false;
  };
  void retain(const Manifest& manifest);
  void damaged(uint64_t epoch, const std::string& cause);
  void forget(uint64_t epoch);

  Context& ctx_;
  mutable std::mutex mutex_;  // protects all members below
  std::map<uint64_t, Entry> files_;
  std::map<uint64_t, Epoch> epochs_;
  uint64_t next_file_ = 1;
};

}  // namespace thermocline::ssd
