// A file system in memory. Tests can build, copy and damage any state of it.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "util/fs.h"

namespace thermocline::testing {

// Contents of one file, shared by its hard links and by open files (so that unlinking an open file works).
// Copies of a MemFs share the bytes until one side writes.
struct MemInode {
  std::mutex mutex;  // protects bytes
  std::shared_ptr<std::string> bytes = std::make_shared<std::string>();
  std::string& own();  // makes the bytes private to this inode. The caller holds mutex.
};

// Thread safety: all calls of FileSystem may run concurrently. No other call may run during those marked "alone".
// Data files have the alignment rules of the real file system.
class MemFs : public FileSystem {
 public:
  using Names = std::map<std::string, std::shared_ptr<MemInode>>;

  MemFs() = default;

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override;
  void rename(const std::string& from, const std::string& to) override;
  void unlink(const std::string& path) override;
  void link(const std::string& from, const std::string& to) override;
  void make_dir(const std::string& path) override;
  void sync_dir(const std::string& path) override;
  bool exists(const std::string& path) override;
  std::vector<std::string> list(const std::string& dir) override;
  std::unique_ptr<FileLock> lock(const std::string& path) override;
  std::string name() const override { return "memory"; }

  // Copies files and links, not locks. Alone.
  std::shared_ptr<MemFs> clone() const;
  // The bytes of a file, for changes by tests. Alone.
  std::string& bytes(const std::string& path);
  // Sets the inode of a path and creates its folders; null removes the file. Alone.
  void set(const std::string& path, std::shared_ptr<MemInode> inode);
  void set_bytes(const std::string& path, std::string bytes);
  // All files by path, and the sum of the sizes of all inodes. Alone.
  const Names& files() const { return names_; }
  uint64_t total_bytes() const;

  static std::string parent(const std::string& path);

 private:
  friend class MemLock;
  std::shared_ptr<MemInode> find(const std::string& path) const;  // throws NotFoundError
  void need_dir(const std::string& path) const;

  mutable std::mutex mutex_;  // protects all members below
  Names names_;
  std::set<std::string> dirs_;
  std::shared_ptr<std::set<std::string>> locked_ = std::make_shared<std::set<std::string>>();
};

}  // namespace thermocline::testing
