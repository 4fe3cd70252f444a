#include "testing/fault_fs.h"

#include <cerrno>

#include "util/error.h"

namespace thermocline::testing {
namespace {

[[noreturn]] void throw_fault(Fault fault, const std::string& what) {
  if (fault == Fault::kDiskFull) throw DiskFullError(what + ": No space left on device (injected)", ENOSPC);
  if (fault == Fault::kShortRead) throw IoError(what + ": the file was truncated (injected)", 0);
  throw IoError(what + ": Input/output error (injected)", EIO);
}

}  // namespace

class FaultFile : public File {
 public:
  FaultFile(FaultFs& fs, std::unique_ptr<File> inner) : fs_(fs), inner_(std::move(inner)) {}

  void pread(void* buf, size_t bytes, uint64_t offset) override {
    fs_.call(&FaultFs::read_hook_);
    FaultPlan plan;
    if (!fs_.hit(kReads, &plan)) return inner_->pread(buf, bytes, offset);
    if (plan.fault != Fault::kFlip) throw_fault(plan.fault, "read of " + path());
    inner_->pread(buf, bytes, offset);
    const uint64_t bit = plan.bit % (bytes * 8);
    static_cast<uint8_t*>(buf)[bit / 8] ^= uint8_t(1u << (bit % 8));
  }

  void pwrite(const void* buf, size_t bytes, uint64_t offset) override {
    FaultPlan plan;
    if (!fs_.hit(kWrites, &plan)) return inner_->pwrite(buf, bytes, offset);
    if (plan.fault == Fault::kTornWrite && bytes > kSector) {
      inner_->pwrite(buf, bytes / kSector / 2 * kSector + (bytes < 2 * kSector ? kSector : 0), offset);
    }
    throw_fault(plan.fault, "write to " + path());
  }

  void datasync() override {
    fs_.call(&FaultFs::sync_hook_);
    fs_.maybe_fail(kSyncs, "fdatasync of " + path());
    inner_->datasync();
  }
  uint64_t size() override { return inner_->size(); }
  const std::string& path() const override { return inner_->path(); }

 private:
  FaultFs& fs_;
  const std::unique_ptr<File> inner_;
};

void FaultFs::arm(const FaultPlan& plan) {
  std::lock_guard lock(mutex_);
  plan_ = plan;
  armed_ = true;
  seen_ = fired_ = 0;
}

void FaultFs::disarm() {
  std::lock_guard lock(mutex_);
  armed_ = false;
}

bool FaultFs::hit(unsigned op, FaultPlan* plan) {
  std::lock_guard lock(mutex_);
  if (!armed_ || !(plan_.ops & op)) return false;
  const uint64_t i = seen_++;
  if (i < plan_.at || (i > plan_.at && !plan_.for_good)) return false;
  ++fired_;
  *plan = plan_;
  return true;
}

void FaultFs::maybe_fail(unsigned op, const std::string& what) {
  FaultPlan plan;
  if (hit(op, &plan)) throw_fault(plan.fault, what);
}

void FaultFs::on_point(std::function<void(std::string_view)> hook) {
  std::lock_guard lock(mutex_);
  hook_ = std::move(hook);
}

void FaultFs::on_sync(std::function<void()> hook, int concurrency) {
  std::lock_guard lock(mutex_);
  sync_hook_ = std::move(hook);
  sync_concurrency_ = concurrency;
}

void FaultFs::on_read(std::function<void()> hook) {
  std::lock_guard lock(mutex_);
  read_hook_ = std::move(hook);
}

void FaultFs::call(std::function<void()> FaultFs::* member) {
  std::function<void()> hook;
  {
    std::lock_guard lock(mutex_);
    hook = this->*member;
  }
  if (hook) hook();
}

std::map<std::string, uint64_t> FaultFs::points() const {
  std::lock_guard lock(mutex_);
  return {points_.begin(), points_.end()};
}

void FaultFs::failpoint(std::string_view point) {
  std::function<void(std::string_view)> hook;
  {
    std::lock_guard lock(mutex_);
    auto it = points_.find(point);
    if (it == points_.end()) it = points_.emplace(std::string(point), 0).first;
    ++it->second;
    hook = hook_;
  }
  if (hook) hook(point);
  inner_->failpoint(point);
}

std::unique_ptr<File> FaultFs::open(const std::string& path, OpenMode mode) {
  if (mode == OpenMode::kCreate || mode == OpenMode::kCreateMeta) maybe_fail(kNames, "creating " + path);
  return std::make_unique<FaultFile>(*this, inner_->open(path, mode));
}

void FaultFs::rename(const std::string& from, const std::string& to) {
  maybe_fail(kNames, "renaming " + from + " to " + to);
  inner_->rename(from, to);
}

void FaultFs::unlink(const std::string& path) {
  maybe_fail(kNames, "removing " + path);
  inner_->unlink(path);
}

void FaultFs::link(const std::string& from, const std::string& to) {
  maybe_fail(kNames, "hard link from " + from + " to " + to);
  inner_->link(from, to);
}

void FaultFs::make_dir(const std::string& path) {
  maybe_fail(kNames, "creating the folder " + path);
  inner_->make_dir(path);
}

void FaultFs::sync_dir(const std::string& path) {
  maybe_fail(kSyncs, "fsync of the folder " + path);
  inner_->sync_dir(path);
}

}  // namespace thermocline::testing
