#include "util/posix_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "util/error.h"

namespace thermocline {
namespace {

std::string describe(const char* verb, const std::string& path, size_t bytes, uint64_t offset) {
  return std::string(verb) + " of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + " of " +
         path;
}

// Waits before a failed read is repeated: errors of a path or a controller that resets end within this time.
constexpr std::array<std::chrono::milliseconds, 3> kRetryAfter{
    std::chrono::milliseconds(1), std::chrono::milliseconds(10), std::chrono::milliseconds(100)};

constexpr size_t kSyncBatch = 64;  // files that sync_files() has open at once

bool is_aligned(size_t n) { return n % kSector == 0; }

}  // namespace

void throw_errno(int code, const std::string& operation, Intent intent) {
  const std::string text = operation + ": " + std::strerror(code);
  if (code == ENOSPC || code == EDQUOT) {
    throw DiskFullError(text + "; committed data is safe: free some space and try again", code);
  }
  if (code == ENOENT) throw NotFoundError(text);
  if (intent == Intent::kWrite && (code == EROFS || code == EACCES)) {
    throw ReadOnlyError(text + "; open the store with read_only=True, or make the folder writable");
  }
  if (code == EMFILE) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    throw IoError(text + ": this process may have " + std::to_string(limit.rlim_cur) +
                      " open files; a store has up to 1,300, and ranks have connections: raise the limit (ulimit -n)",
                  code);
  }
  throw IoError(text, code);
}

int open_retry(const std::string& path, int flags) {
  int fd;
  do fd = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  while (fd < 0 && errno == EINTR);
  return fd;
}

void sync_files(const std::vector<std::string>& paths, const PosixCalls& calls) {
  for (size_t first = 0; first < paths.size(); first += kSyncBatch) {
    std::vector<std::unique_ptr<PosixFile>> files;
    for (size_t i = first; i < std::min(first + kSyncBatch, paths.size()); ++i) {
      const int fd = open_retry(paths[i], O_RDONLY);
      if (fd < 0) throw_errno(errno, "opening " + paths[i], Intent::kRead);
      files.push_back(std::make_unique<PosixFile>(calls, fd, paths[i], false));
      if (::sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE) != 0) errno = 0;  // datasync() writes, too
    }
    for (auto& file : files) file->datasync();
  }
}

// O_DIRECT is set after opening: on a file system without it, open() with O_CREAT would fail and still leave the file.
PosixFile::PosixFile(const PosixCalls& calls, int fd, std::string path, bool aligned)
    : calls_(calls), fd_(fd), path_(std::move(path)), aligned_(aligned) {
  if (aligned_) {
    const int flags = ::fcntl(fd, F_GETFL);
    direct_ = flags >= 0 && ::fcntl(fd, F_SETFL, flags | O_DIRECT) == 0;
  }
}

void PosixFile::check_aligned(const char* verb, const void* buf, size_t bytes, uint64_t offset) const {
  if (aligned_ && (reinterpret_cast<uintptr_t>(buf) | bytes | offset) % kSector != 0) {
    throw Error(describe(verb, path_, bytes, offset) +
                ": buffer, length and offset of a data file must be multiples of " + std::to_string(kSector));
  }
}

void PosixFile::pread(void* buf, size_t bytes, uint64_t offset) {
  check_aligned("read", buf, bytes, offset);
  read_rest(static_cast<uint8_t*>(buf), bytes, offset, 0);
}

void PosixFile::read_rest(uint8_t* buf, size_t bytes, uint64_t offset, size_t done) {
  size_t retries = 0;
  while (done < bytes) {
    const ssize_t n = calls_.pread(fd_.get(), buf + done, bytes - done, off_t(offset + done));
    if (n > 0) {
      done += size_t(n);
      if (done < bytes && !is_aligned(done)) disable_direct();  // the rest starts inside a sector
      continue;
    }
    if (n == 0) {
      throw IoError(describe("read", path_, bytes, offset) + ": the file ends at " + std::to_string(size()) +
                        ", it was truncated",
                    0);
    }
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == EINVAL && disable_direct()) continue;
    if (errno == EIO && retries < kRetryAfter.size()) {
      std::this_thread::sleep_for(kRetryAfter[retries++]);
      continue;
    }
    throw_errno(errno, describe("read", path_, bytes, offset), Intent::kRead);
  }
}

void PosixFile::pwrite(const void* buf, size_t bytes, uint64_t offset) {
  check_aligned("write", buf, bytes, offset);
  auto p = static_cast<const uint8_t*>(buf);
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = calls_.pwrite(fd_.get(), p + done, bytes - done, off_t(offset + done));
    if (n > 0) {
      done += size_t(n);
      if (done < bytes && !is_aligned(done)) disable_direct();
      continue;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && disable_direct()) continue;
    throw_errno(n < 0 ? errno : EIO, describe("write", path_, bytes, offset), Intent::kWrite);
  }
}

void PosixFile::datasync() {
  int rc;
  do rc = calls_.fdatasync(fd_.get());
  while (rc != 0 && errno == EINTR);  // the only failure after which a retry is valid
  if (rc != 0) throw_errno(errno, "fdatasync of " + path_, Intent::kWrite);
}

void PosixFile::report_write_errors() {
  if (!direct_) datasync();
}

void PosixFile::truncate(uint64_t bytes) noexcept {
  if (::ftruncate(fd_.get(), off_t(bytes)) != 0) errno = 0;  // the space stays in use until the file is deleted
}

uint64_t PosixFile::size() {
  struct stat st;
  if (::fstat(fd_.get(), &st) != 0) throw_errno(errno, "fstat of " + path_, Intent::kRead);
  return uint64_t(st.st_size);
}

bool PosixFile::disable_direct() {
  if (!direct_.exchange(false)) return false;
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  return flags >= 0 && ::fcntl(fd_.get(), F_SETFL, flags & ~O_DIRECT) == 0;
}

}  // namespace thermocline
