#include "util/posix_fs.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "util/error.h"
#include "util/posix_file.h"
#include "util/pread_queue.h"
#include "util/slow_calls.h"
#include "util/uring.h"
#include "util/uring_queue.h"
#include "util/warnings.h"

namespace thermocline {
namespace {

// Rings: the threads that read also plan, verify and copy, so there is one per core that this process may use. Eight
// verify and copy several times faster than the measured disks read (3 GB/s). Rings reach 1.6 times the rate of threads
// for random reads of 4 and 16 KiB.
constexpr int kMinRings = 2, kMaxRings = 8, kRingDepth = 64;
constexpr FileSystem::Concurrency kPreadDefault{32, 1};

FileSystem::Concurrency uring_default() {
  cpu_set_t cores;
  const int usable = ::sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : kMinRings;
  return {std::clamp(usable, kMinRings, kMaxRings), kRingDepth};
}
constexpr int kSyncs = 8;  // in flight: the device merges their flushes; more adds threads, not speed

class PosixLock : public FileLock {
 public:
  PosixLock(int fd) : fd_(fd), owner_(::getpid()) {}
  // A forked child shares the lock: only the process that took it may release it.
  ~PosixLock() override {
    if (::getpid() == owner_) ::flock(fd_.get(), LOCK_UN);
  }

 private:
  const Fd fd_;
  const pid_t owner_;
};

std::unique_ptr<FileLock> acquire_lock(const std::string& path) {
  const int fd = open_retry(path, O_RDWR | O_CREAT);
  if (fd < 0) throw_errno(errno, "opening the lock " + path, Intent::kWrite);
  int rc;
  do rc = ::flock(fd, LOCK_EX | LOCK_NB);
  while (rc != 0 && errno == EINTR);
  if (rc != 0) {
    const int code = errno;
    char text[32] = {};
    const ssize_t n = code == EWOULDBLOCK ? ::pread(fd, text, sizeof text - 1, 0) : 0;
    ::close(fd);
    if (code == EWOULDBLOCK) {
      throw LockError("the store is already open for writing: " + path + " is locked" +
                      (n > 0 ? " by process " + std::string(text, size_t(n)) : std::string()) +
                      "; close it there, or open it here with read_only=True");
    }
    throw_errno(code, "locking " + path, Intent::kWrite);
  }
  // The process number is only used by the error message above: failing to write it is not an error.
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, pid.data(), pid.size(), 0) < 0) errno = 0;
  return std::make_unique<PosixLock>(fd);
}

// For crash tests: THERMOCLINE_KILL_AT=point:count kills the process at the count-th call of failpoint(point).
class KillAt {
 public:
  KillAt() {
    const char* env = std::getenv("THERMOCLINE_KILL_AT");
    if (!env || !*env) return;
    const std::string spec = env;
    const size_t colon = spec.rfind(':');
    point_ = spec.substr(0, colon);
    left_ = colon == std::string::npos ? 1 : std::atoi(spec.c_str() + colon + 1);
  }
  void failpoint(std::string_view point) {
    if (!point_.empty() && point == point_ && --left_ == 0) ::raise(SIGKILL);
  }

 private:
  std::string point_;
  std::atomic<int> left_{0};
};

class PosixFs : public FileSystem {
 public:
  PosixFs(const PosixCalls& calls, bool uring, int workers, int depth) : calls_(calls), uring_(uring) {
    const Concurrency d = uring ? uring_default() : kPreadDefault;
    concurrency_ = {workers > 0 ? workers : d.workers, depth > 0 ? depth : d.depth};
  }

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    const bool create = mode == OpenMode::kCreate || mode == OpenMode::kCreateMeta;
    const int fd = open_retry(path, create ? O_RDWR | O_CREAT | O_EXCL : O_RDONLY);
    if (fd < 0) {
      throw_errno(errno, (create ? "creating " : "opening ") + path, create ? Intent::kWrite : Intent::kRead);
    }
    return std::make_unique<PosixFile>(calls_, fd, path, mode == OpenMode::kCreate || mode == OpenMode::kRead);
  }

  void rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) throw_errno(errno, "renaming " + from + " to " + to, Intent::kWrite);
  }
  void unlink(const std::string& path) override {
    if (::unlink(path.c_str()) != 0) throw_errno(errno, "removing " + path, Intent::kWrite);
  }
  void link(const std::string& from, const std::string& to) override {
    if (::link(from.c_str(), to.c_str()) == 0) return;
    const int code = errno;
    throw_errno(code,
                "hard link from " + from + " to " + to +
                    (code == EXDEV || code == EPERM ? " (both must be on one file system that has hard links)" : ""),
                Intent::kWrite);
  }
  void make_dir(const std::string& path) override {
    if (::mkdir(path.c_str(), 0755) == 0) return;
    const int code = errno;
    struct stat st;
    if (code == EEXIST && ::stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode)) return;
    throw_errno(code, "creating the folder " + path, Intent::kWrite);
  }
  // Through a descriptor of the folder: nobody can replace it by a symbolic link between two calls.
  std::string link_unused(const std::string& from, const std::string& dir, const std::string& name) override {
    if (::mkdir(dir.c_str(), 0755) != 0 && errno != EEXIST) {
      throw_errno(errno, "creating the folder " + dir, Intent::kWrite);
    }
    const Fd folder(open_retry(dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    if (folder.get() < 0) {
      if (errno == ELOOP || errno == ENOTDIR) {
        throw FormatError(dir + " is a symbolic link or no folder, and files would be written elsewhere: remove it");
      }
      throw_errno(errno, "opening the folder " + dir, Intent::kWrite);
    }
    std::string to = name;
    for (int i = 1; ::linkat(AT_FDCWD, from.c_str(), folder.get(), to.c_str(), 0) != 0; ++i) {
      if (errno != EEXIST) throw_errno(errno, "hard link from " + from + " to " + dir + "/" + to, Intent::kWrite);
      to = name + "." + std::to_string(i);
    }
    return to;
  }
  void sync_dir(const std::string& path) override {
    const Fd fd(open_retry(path, O_RDONLY | O_DIRECTORY));
    if (fd.get() < 0) throw_errno(errno, "opening the folder " + path, Intent::kRead);
    int rc;
    do rc = ::fsync(fd.get());
    while (rc != 0 && errno == EINTR);
    // EINVAL: this file system does not sync folders (their entries are written through).
    if (rc != 0 && errno != EINVAL) throw_errno(errno, "fsync of the folder " + path, Intent::kWrite);
  }
  bool exists(const std::string& path) override {
    struct stat st;
    if (::stat(path.c_str(), &st) == 0) return true;
    if (errno == ENOENT || errno == ENOTDIR) return false;
    throw_errno(errno, "stat of " + path, Intent::kRead);
  }
  std::vector<std::string> list(const std::string& dir) override {
    DIR* d = ::opendir(dir.c_str());
    if (!d) throw_errno(errno, "listing " + dir, Intent::kRead);
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(d)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
      errno = 0;
    }
    const int code = errno;
    ::closedir(d);
    if (code != 0) throw_errno(code, "listing " + dir, Intent::kRead);
    std::sort(names.begin(), names.end());
    return names;
  }
  std::unique_ptr<FileLock> lock(const std::string& path) override { return acquire_lock(path); }

  Concurrency read_concurrency() const override { return concurrency_; }
  std::unique_ptr<ReadQueue> read_queue(size_t depth) override {
    depth = std::max<size_t>(depth, 1);
    if (uring_) {
      errno = 0;
      if (auto ring = calls_.make_ring(unsigned(depth)))
        return std::make_unique<UringQueue>(calls_, std::move(ring), depth);
      fall_back(errno);
    }
    std::lock_guard lock(pool_mutex_);
    if (pool_) return std::make_unique<PreadQueue>(pool_, depth);
    return FileSystem::read_queue(depth);  // the caller has one thread per read
  }
  int sync_concurrency() const override { return kSyncs; }
  void failpoint(std::string_view point) override { kill_at_.failpoint(point); }
  std::vector<std::string> take_warnings() override { return warnings_.take(); }
  std::string name() const override { return uring_ ? "io_uring" : "pread"; }

 private:
  // The kernel refused a ring after the probe: a limit on rings, locked memory or descriptors. Threads take over for
  // good, with the depth of a ring.
  void fall_back(int code) {
    std::lock_guard lock(pool_mutex_);
    if (!uring_) return;
    auto pool = std::make_shared<PreadPool>(kPreadDefault.workers);
    const size_t threads = pool->size();
    if (threads > 0) pool_ = std::move(pool);  // else the callers read
    uring_ = false;
    warnings_.add(std::string("io_uring: the kernel refused another ring") +
                  (code ? std::string(" (") + std::strerror(code) + ")" : std::string()) + "; reads continue on " +
                  std::to_string(threads) +
                  " pread threads. Raise the limits of locked memory and open files (ulimit -l, ulimit -n), or set "
                  "THERMOCLINE_IO=pread");
  }

  const PosixCalls calls_;
  std::atomic<bool> uring_;
  Concurrency concurrency_;
  KillAt kill_at_;
  Warnings warnings_;
  std::mutex pool_mutex_;            // protects pool_; a writer of uring_ holds it
  std::shared_ptr<PreadPool> pool_;  // null: no fall-back so far, or no thread
};

IoEngine engine_from_env() {
  const char* env = std::getenv("THERMOCLINE_IO");
  const std::string_view name = env ? env : "";
  if (name == "uring" || name == "io_uring") return IoEngine::kUring;
  if (name == "pread") return IoEngine::kPread;
  if (name.empty() || name == "auto") return IoEngine::kAuto;
  throw Error("THERMOCLINE_IO=" + std::string(name) + " is unknown: use uring, pread or auto");
}

}  // namespace

PosixCalls real_posix_calls() { return {::pread, ::pwrite, ::fdatasync, nullptr, Uring::create}; }

// Raises the soft limit of open files: a store keeps hundreds to thousands open, and the usual limit is 1,024.
static void raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);  // if refused, opening too many files fails later
}

std::shared_ptr<FileSystem> make_posix_fs_on(const PosixCalls& calls, IoEngine engine, int workers, int depth) {
  if (engine == IoEngine::kAuto) engine = engine_from_env();
  const bool uring = engine != IoEngine::kPread && calls.make_ring(4) != nullptr;
  if (engine == IoEngine::kUring && !uring) {
    throw Error("io_engine is io_uring, but the kernel or a container's filter refuses it; use pread or auto");
  }
  raise_file_limit();
  return std::make_shared<PosixFs>(calls, uring, workers, depth);
}

std::shared_ptr<FileSystem> make_posix_fs(IoEngine engine, int workers, int depth) {
  return make_posix_fs_on(posix_calls_from_env(), engine, workers, depth);
}

}  // namespace thermocline
