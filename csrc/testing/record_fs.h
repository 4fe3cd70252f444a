// Records all changes of a file system in order, so that crash.h can rebuild the states after a power loss.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "testing/mem_fs.h"
#include "util/fs.h"

namespace thermocline::testing {

enum class OpKind { kCreate, kWrite, kDatasync, kRename, kUnlink, kLink, kMakeDir, kSyncDir, kMarker };

// Files are numbered: writes belong to a file, whatever its names are.
struct RecordedOp {
  OpKind kind;
  uint32_t file = 0;     // kCreate, kWrite, kDatasync, kRename, kLink
  std::string path, to;  // kMarker: path is its text
  uint64_t offset = 0;   // kWrite
  std::string data;      // kWrite
};

struct Recording {
  std::shared_ptr<const MemFs> start;  // durable state at the start; its files have the numbers below
  std::map<std::string, uint32_t> start_files;
  std::vector<RecordedOp> ops;
};

// Thread safety: as FileSystem; changes are serialised, so that the recorded order is the real order.
class RecordFs : public FileSystem {
 public:
  // The current state of `inner` counts as durable.
  explicit RecordFs(std::shared_ptr<MemFs> inner);

  void marker(const std::string& text);
  // Repeats the first `count` operations of a recording with the same start.
  void repeat(const Recording& recording, size_t count);
  Recording recording() const;
  size_t size() const;

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override;
  void rename(const std::string& from, const std::string& to) override;
  void unlink(const std::string& path) override;
  void link(const std::string& from, const std::string& to) override;
  void make_dir(const std::string& path) override;
  void sync_dir(const std::string& path) override;
  bool exists(const std::string& path) override { return inner_->exists(path); }
  std::vector<std::string> list(const std::string& dir) override { return inner_->list(dir); }
  // Not recorded: the survival of the empty lock file has no effect.
  std::unique_ptr<FileLock> lock(const std::string& path) override { return inner_->lock(path); }
  std::string name() const override { return "record"; }

 private:
  friend class RecordFile;
  const std::shared_ptr<MemFs> inner_;
  mutable std::mutex mutex_;  // protects all members below
  Recording log_;
  std::map<std::string, uint32_t> files_;
  uint32_t next_file_ = 1;
};

}  // namespace thermocline::testing
