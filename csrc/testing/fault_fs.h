// Makes chosen operations of a file system fail, flips bits in what is read, and acts at named points.
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
  kShortRead,  // the file seems to end inside the read
  kTornWrite,  // some of the pages are written, then EIO
  kFlip,       // one bit of what is read is wrong; nothing is reported
};

// Classes of operations, to be combined.
enum FaultOps : unsigned {
  kReads = 1,
  kWrites = 2,
  kSyncs = 4,  // datasync and sync_dir
  kNames = 8,  // create, rename, unlink, link, make_dir
  kAllOps = 15,
};

struct FaultPlan {
  Fault fault = Fault::kIoError;
  unsigned ops = kAllOps;  // which operations are counted and may fail
  uint64_t at = 0;         // the first of them to fail, from 0
  bool for_good = false;   // and all after it
  uint64_t bit = 0;        // of kFlip, modulo the length of the read
};

// Thread safety: like any FileSystem; arm and disarm at any time.
class FaultFs : public FileSystem {
 public:
  explicit FaultFs(std::shared_ptr<FileSystem> inner) : inner_(std::move(inner)) {}

  void arm(const FaultPlan& plan);  // counting begins anew
  void disarm();
  uint64_t seen() const { return seen_; }    // operations of the plan's classes since arm()
  uint64_t fired() const { return fired_; }  // of them failed

  // Called at every named point; may throw or end the process.
  void on_point(std::function<void(std::string_view)> hook);
  std::map<std::string, uint64_t> points() const;  // how often each was reached

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
  std::string name() const override { return "fault"; }

 private:
  friend class FaultFile;
  // Counts an operation; true if the plan's fault hits it.
  bool hit(unsigned op, FaultPlan* plan);
  void maybe_fail(unsigned op, const std::string& what);

  const std::shared_ptr<FileSystem> inner_;
  std::atomic<uint64_t> seen_{0}, fired_{0};
  mutable std::mutex mutex_;  // protects what follows
  bool armed_ = false;
  FaultPlan plan_;
  std::function<void(std::string_view)> hook_;
  std::map<std::string, uint64_t, std::less<>> points_;
};

}  // namespace thermocline::testing
