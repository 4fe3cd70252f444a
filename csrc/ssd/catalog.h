// Which files exist and who still needs them: retained epochs, and whatever holds a DataFile open (the index, reads,
// scans, merges). A file that nobody needs is deleted by collect().
// Thread safety: all methods may run concurrently.
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

  // Reads the folder: manifests and data files. A manifest that cannot be read keeps every file alive until released.
  void load();
  Manifest read(uint64_t epoch) const;

  std::vector<uint64_t> epochs() const;  // retained, oldest first; without the empty epoch 0 of a new store
  uint64_t newest() const;               // 0: nothing committed
  bool has(uint64_t epoch) const;

  std::shared_ptr<DataFile> create(FileKind kind);
  void opened(const std::shared_ptr<DataFile>& file);

  // Publishes the manifest: the commit. Epoch 0 is forgotten by the first one.
  void publish(const Manifest& manifest);
  void require_releasable(uint64_t epoch) const;  // throws NotFoundError, or Error for the newest
  void release(uint64_t epoch);
  // Deletes the files nobody needs.
  void collect();

  uint64_t disk_bytes() const;
  uint64_t files() const;
  uint64_t next_file() const;

 private:
  struct Entry {
    FileKind kind;
    std::weak_ptr<DataFile> open;
    uint64_t pages = 0;
    uint32_t epochs = 0;  // that need it
  };
  struct Epoch {
    std::vector<uint64_t> files;
    bool damaged = false;
  };
  void retain(const Manifest& manifest);
  void forget(uint64_t epoch);

  Context& ctx_;
  mutable std::mutex mutex_;  // protects what follows
  std::map<uint64_t, Entry> files_;
  std::map<uint64_t, Epoch> epochs_;
  uint64_t next_file_ = 1;
};

}  // namespace thermocline::ssd
