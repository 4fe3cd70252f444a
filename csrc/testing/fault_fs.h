// Injects failures into operations of a file system, flips bits of reads, calls hooks at failpoints, syncs and reads.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "util/fs.h"

namespace thermocline::testing {

enum class Fault {
  kIoError,    // EIO
  kDiskFull,   // ENOSPC
  kShortRead,  // as if the file ends inside the read
  kTornWrite,  // some pages are written, then EIO
  kFlip,       // one bit of the read is flipped, without an error
};

// Classes of operations, a bit mask.
enum FaultOps : unsigned {
  kReads = 1,
  kWrites = 2,
  kSyncs = 4,  // datasync and sync_dir
  kNames = 8,  // create, rename, unlink, link, make_dir
  kAllOps = 15,
};

struct FaultPlan {
  Fault fault = Fault::kIoError;
  unsigned ops = kAllOps;  // operations that are counted and may fail
  uint64_t at = 0;         // index of the first one that fails
  bool for_good = false;   // all later ones fail too
  uint64_t bit = 0;        // kFlip: bit index, modulo the length of the read
};

// Thread safety: as FileSystem; arm() and disarm() may be called at any time.
class FaultFs : public FileSystem {
 public:
  explicit FaultFs(std::shared_ptr<FileSystem> inner) : inner_(std::move(inner)) {}

  void arm(const FaultPlan& plan);  // restarts the count
  void disarm();
  uint64_t seen() const { return seen_; }    // operations of the plan's classes since arm()
  uint64_t fired() const { return fired_; }  // operations that failed

  // Sets a hook for every failpoint; it may throw or end the process.
  void on_point(std::function<void(std::string_view)> hook);
  std::map<std::string, uint64_t> points() const;  // calls per failpoint
  // Sets a hook at the start of every datasync, on its thread: it may block or sleep. `concurrency`: syncs at once.
  void on_sync(std::function<void()> hook, int concurrency = 1);
  // Sets a hook at the start of every read of a file, on its thread: it may block or sleep.
  void on_read(std::function<void()> hook);

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override;
  void rename(const std::string& from, const std::string& to) override;
  void unlink(const std::string& path) override;
  void link(const std::string& from, const std::string& to) override;
  void make_dir(const std::string& path) override;
  void sync_dir(const std::string& path) override;
  bool exists(const std::string& path) override { return inner_->exists(path); }
  std::vector<std::string> list(const std::string& dir) override { return inner_->list(dir); }
  std::unique_ptr<FileLock> lock(const std::string& path) override { return inner_->lock(path); }
  void failpoint(std::string_view point) override;
  int sync_concurrency() const override { return sync_concurrency_; }
  std::string name() const override { return "fault"; }

 private:
  friend class FaultFile;
  // Counts an operation; true if it must fail.
  bool hit(unsigned op, FaultPlan* plan);
  void maybe_fail(unsigned op, const std::string& what);
  void call(std::function<void()> FaultFs::* member);  // a hook, without the lock

  const std::shared_ptr<FileSystem> inner_;
  std::atomic<uint64_t> seen_{0}, fired_{0};
  std::atomic<int> sync_concurrency_{1};
  mutable std::mutex mutex_;  // protects all members below
  bool armed_ = false;
  FaultPlan plan_;
  std::function<void(std::string_view)> hook_;
  std::function<void()> sync_hook_, read_hook_;
  std::map<std::string, uint64_t, std::less<>> points_;
};

}  // namespace thermocline::testing
