#include "util/posix_fs.h"

#include <dirent.h>
#include <fcntl.h>
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
#include <exception>

#include "util/error.h"
#include "util/uring.h"

namespace thermocline {
namespace {

// Measured best of 1-4 rings x 16-128 and 8-32 threads, random reads of 4 and 16 KiB: a ring reaches 1.6 times the rate
// of threads and needs fewer of them.
constexpr FileSystem::Concurrency kUringDefault{2, 64};
constexpr FileSystem::Concurrency kPreadDefault{32, 1};

enum class Intent { kRead, kWrite };

[[noreturn]] void throw_errno(int code, const std::string& what, Intent intent) {
  const std::string text = what + ": " + std::strerror(code);
  if (code == ENOSPC || code == EDQUOT) {
    throw DiskFullError(text + "; what was committed is safe: free some space and try again", code);
  }
  if (code == ENOENT) throw NotFoundError(text);
  if (intent == Intent::kWrite && (code == EROFS || code == EACCES)) {
    throw ReadOnlyError(text + "; open the store with read_only=True, or make the folder writable");
  }
  throw IoError(text, code);
}

std::string describe(const char* verb, const std::string& path, size_t bytes, uint64_t offset) {
  return std::string(verb) + " of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + " of " +
         path;
}

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

int open_retry(const std::string& path, int flags) {
  int fd;
  do fd = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  while (fd < 0 && errno == EINTR);
  return fd;
}

uint64_t fd_size(int fd, const std::string& path) {
  struct stat st;
  if (::fstat(fd, &st) != 0) throw_errno(errno, "fstat of " + path, Intent::kRead);
  return uint64_t(st.st_size);
}

class PosixFile : public File {
 public:
  // `aligned`: a data file. O_DIRECT is switched on after opening, not by open(): where a file system has none, open()
  // with O_CREAT would fail and still leave the file behind.
  PosixFile(const PosixCalls& calls, int fd, std::string path, bool aligned)
      : calls_(calls), fd_(fd), path_(std::move(path)), aligned_(aligned) {
    if (aligned_) {
      const int flags = ::fcntl(fd, F_GETFL);
      direct_ = flags >= 0 && ::fcntl(fd, F_SETFL, flags | O_DIRECT) == 0;
    }
  }

  void pread(void* buf, size_t bytes, uint64_t offset) override {
    check_aligned("read", buf, bytes, offset);
    read_rest(static_cast<uint8_t*>(buf), bytes, offset, 0);
  }

  void pwrite(const void* buf, size_t bytes, uint64_t offset) override {
    check_aligned("write", buf, bytes, offset);
    auto p = static_cast<const uint8_t*>(buf);
    for (size_t done = 0; done < bytes;) {
      const ssize_t n = calls_.pwrite(fd_.get(), p + done, bytes - done, off_t(offset + done));
      if (n > 0) {
        done += size_t(n);
        if (done < bytes && !is_aligned(done)) give_up_direct();
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EINVAL && give_up_direct()) continue;
      throw_errno(n < 0 ? errno : EIO, describe("write", path_, bytes, offset), Intent::kWrite);
    }
  }

  void datasync() override {
    int rc;
    do rc = calls_.fdatasync(fd_.get());
    while (rc != 0 && errno == EINTR);  // the only failure that says nothing about the data
    if (rc != 0) throw_errno(errno, "fdatasync of " + path_, Intent::kWrite);
  }
  void truncate(uint64_t bytes) noexcept override {
    if (::ftruncate(fd_.get(), off_t(bytes)) != 0) errno = 0;  // the space stays taken until the file goes
  }

  uint64_t size() override { return fd_size(fd_.get(), path_); }
  const std::string& path() const override { return path_; }

  int fd() const { return fd_.get(); }

  void check_aligned(const char* verb, const void* buf, size_t bytes, uint64_t offset) const {
    if (aligned_ && (reinterpret_cast<uintptr_t>(buf) | bytes | offset) % kSector != 0) {
      throw Error(describe(verb, path_, bytes, offset) +
                  ": buffer, length and offset of a data file must be multiples of " + std::to_string(kSector));
    }
  }

  // Reads what is missing of a request of which `done` bytes are there. Also the slow path of the ring.
  void read_rest(uint8_t* buf, size_t bytes, uint64_t offset, size_t done) {
    while (done < bytes) {
      const ssize_t n = calls_.pread(fd_.get(), buf + done, bytes - done, off_t(offset + done));
      if (n > 0) {
        done += size_t(n);
        if (done < bytes && !is_aligned(done)) give_up_direct();  // the rest begins off a sector
        continue;
      }
      if (n == 0) {
        throw IoError(describe("read", path_, bytes, offset) + ": the file ends at " + std::to_string(size()) +
                          ", it was cut short",
                      0);
      }
      if (errno == EINTR || errno == EAGAIN) continue;
      if (errno == EINVAL && give_up_direct()) continue;
      throw_errno(errno, describe("read", path_, bytes, offset), Intent::kRead);
    }
  }

 private:
  static bool is_aligned(size_t n) { return n % kSector == 0; }

  // Some file systems accept the flag and refuse the transfer. False if it was already off.
  bool give_up_direct() {
    if (!direct_.exchange(false)) return false;
    const int flags = ::fcntl(fd_.get(), F_GETFL);
    return flags >= 0 && ::fcntl(fd_.get(), F_SETFL, flags & ~O_DIRECT) == 0;
  }

  const PosixCalls calls_;
  const Fd fd_;
  const std::string path_;
  const bool aligned_;
  std::atomic<bool> direct_{false};
};

// Submissions collect until the completions at hand are used up, so that one system call submits and waits for many.
class UringQueue : public ReadQueue {
 public:
  UringQueue(const PosixCalls& calls, std::unique_ptr<Uring> ring, size_t depth)
      : calls_(calls), ring_(std::move(ring)), reads_(depth) {
    for (size_t i = depth; i-- > 0;) free_.push_back(uint32_t(i));
  }

  // The kernel writes into the callers' buffers until the last completion: there is no leaving before.
  ~UringQueue() override {
    while (free_.size() < reads_.size()) {
      const size_t before = free_.size();
      try {
        wait();
      } catch (const IoError&) {
        // A failed read is no longer in flight, which is all that matters here. If the ring itself is broken, going
        // on would let the kernel write into freed memory.
        if (free_.size() == before) std::terminate();
      }
    }
  }

  void submit(const ReadOp& op, uint64_t tag) override {
    if (free_.empty()) throw Error("read queue is full: call wait() first");
    auto* file = dynamic_cast<PosixFile*>(op.file);
    if (!file) throw Error("read queue: " + op.file->path() + " was opened by another file system");
    file->check_aligned("read", op.buf, op.bytes, op.offset);
    const uint32_t slot = free_.back();
    free_.pop_back();
    reads_[slot] = {file, op.offset, op.bytes, 0, op.buf, tag};
    prepare(slot);
  }

  uint64_t wait() override {
    if (free_.size() == reads_.size()) throw Error("read queue is empty: nothing to wait for");
    for (;;) {
      Uring::Completion c;
      if (!ring_->pop(&c)) {
        ring_->enter(true);
        continue;
      }
      if (ring_->prepared() * 4 >= reads_.size()) ring_->enter(false);  // keep the device busy meanwhile
      const auto slot = uint32_t(c.user_data);
      Read& r = reads_[slot];
      const int32_t result = calls_.uring_result ? calls_.uring_result(c.result) : c.result;
      if (result > 0) {
        r.done += uint32_t(result);
        if (r.done < r.bytes) {
          if (r.done % kSector == 0) {
            prepare(slot);
            continue;
          }
          return finish_slowly(slot);
        }
        free_.push_back(slot);
        return r.tag;
      }
      if (result == -EAGAIN || result == -EINTR) {
        prepare(slot);
        continue;
      }
      return finish_slowly(slot);
    }
  }

  size_t depth() const override { return reads_.size(); }
  void use_buffer(uint8_t* memory, size_t bytes) override { ring_->register_buffer(memory, bytes); }

 private:
  struct Read {
    PosixFile* file;
    uint64_t offset;
    uint32_t bytes, done;
    uint8_t* buf;
    uint64_t tag;
  };

  void prepare(uint32_t slot) {
    const Read& r = reads_[slot];
    ring_->prepare_read(r.file->fd(), r.buf + r.done, r.bytes - r.done, r.offset + r.done, slot);
  }

  // End of file, errors and odd lengths are rare: one pread decides, and makes the error text.
  uint64_t finish_slowly(uint32_t slot) {
    const Read r = reads_[slot];
    free_.push_back(slot);
    r.file->read_rest(r.buf, r.bytes, r.offset, r.done);
    return r.tag;
  }

  const PosixCalls calls_;
  std::unique_ptr<Uring> ring_;
  std::vector<Read> reads_;
  std::vector<uint32_t> free_;
};

class PosixLock : public FileLock {
 public:
  PosixLock(int fd) : fd_(fd), owner_(::getpid()) {}
  // A forked child shares the lock: only its owner may let go of it.
  ~PosixLock() override {
    if (::getpid() == owner_) ::flock(fd_.get(), LOCK_UN);
  }

 private:
  const Fd fd_;
  const pid_t owner_;
};

std::unique_ptr<FileLock> take_lock(const std::string& path) {
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
  // Who holds it is a courtesy to the reader of the error above: on a full disk it stays away.
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, pid.data(), pid.size(), 0) < 0) errno = 0;
  return std::make_unique<PosixLock>(fd);
}

// THERMOCLINE_KILL_AT=point:count kills the process the count-th time it gets to that point. For crash tests.
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
  void reached(std::string_view point) {
    if (!point_.empty() && point == point_ && --left_ == 0) ::raise(SIGKILL);
  }

 private:
  std::string point_;
  std::atomic<int> left_{0};
};

class PosixFs : public FileSystem {
 public:
  PosixFs(const PosixCalls& calls, bool uring, int workers, int depth) : calls_(calls), uring_(uring) {
    const Concurrency d = uring ? kUringDefault : kPreadDefault;
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
    throw_errno(code, "making the folder " + path, Intent::kWrite);
  }
  void sync_dir(const std::string& path) override {
    const Fd fd(open_retry(path, O_RDONLY | O_DIRECTORY));
    if (fd.get() < 0) throw_errno(errno, "opening the folder " + path, Intent::kRead);
    int rc;
    do rc = ::fsync(fd.get());
    while (rc != 0 && errno == EINTR);
    // EINVAL: this file system has no sync of folders (their entries are written through).
    if (rc != 0 && errno != EINVAL) throw_errno(errno, "fsync of the folder " + path, Intent::kWrite);
  }
  bool exists(const std::string& path) override {
    struct stat st;
    if (::stat(path.c_str(), &st) == 0) return true;
    if (errno == ENOENT || errno == ENOTDIR) return false;
    throw_errno(errno, "looking for " + path, Intent::kRead);
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
  std::unique_ptr<FileLock> lock(const std::string& path) override { return take_lock(path); }

  Concurrency read_concurrency() const override { return concurrency_; }
  std::unique_ptr<ReadQueue> read_queue(size_t depth) override {
    depth = std::max<size_t>(depth, 1);
    if (uring_) {
      // Refused later than the probe means a limit on rings or locked memory: reads still work, one at a time.
      if (auto ring = Uring::create(unsigned(depth)))
        return std::make_unique<UringQueue>(calls_, std::move(ring), depth);
    }
    return FileSystem::read_queue(depth);
  }
  void reached(std::string_view point) override { kill_at_.reached(point); }
  std::string name() const override { return uring_ ? "io_uring" : "pread"; }

 private:
  const PosixCalls calls_;
  const bool uring_;
  Concurrency concurrency_;
  KillAt kill_at_;
};

IoEngine engine_from_env() {
  const char* env = std::getenv("THERMOCLINE_IO");
  const std::string_view name = env ? env : "";
  if (name == "uring" || name == "io_uring") return IoEngine::kUring;
  if (name == "pread") return IoEngine::kPread;
  if (name.empty() || name == "auto") return IoEngine::kAuto;
  throw Error("THERMOCLINE_IO=" + std::string(name) + " is not known: use uring, pread or auto");
}

}  // namespace

PosixCalls real_posix_calls() { return {::pread, ::pwrite, ::fdatasync, nullptr}; }

// A store keeps all its files open, hundreds to thousands: the usual soft limit of 1,024 is too low.
static void allow_many_files() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);  // if refused: opening says so when it comes to it
}

std::shared_ptr<FileSystem> make_posix_fs_on(const PosixCalls& calls, IoEngine engine, int workers, int depth) {
  if (engine == IoEngine::kAuto) engine = engine_from_env();
  const bool uring = engine != IoEngine::kPread && Uring::create(4) != nullptr;
  if (engine == IoEngine::kUring && !uring) {
    throw Error("io_uring was asked for, but the kernel or a container's filter refuses it; use pread or auto");
  }
  allow_many_files();
  return std::make_shared<PosixFs>(calls, uring, workers, depth);
}

std::shared_ptr<FileSystem> make_posix_fs(IoEngine engine, int workers, int depth) {
  return make_posix_fs_on(real_posix_calls(), engine, workers, depth);
}

}  // namespace thermocline
