// Files of the operating system: system calls with retries, error translation, and O_DIRECT where it is available.
// Used by posix_fs.cc and uring_queue.cc; all other code uses util/fs.h, except sync_files().
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "util/posix_fs.h"

namespace thermocline {

enum class Intent { kRead, kWrite };

// Throws the Error class of an errno: DiskFullError, NotFoundError, ReadOnlyError (writes only) or IoError.
[[noreturn]] void throw_errno(int code, const std::string& operation, Intent intent);

// Opens with O_CLOEXEC and retries EINTR. Returns the descriptor, or -1 with errno set.
int open_retry(const std::string& path, int flags);

// Makes data and sizes of files durable, 64 files at a time: starts the writes of all before it waits for any, so that
// a journal commits them together.
void sync_files(const std::vector<std::string>& paths, const PosixCalls& calls = real_posix_calls());

// Owns a file descriptor.
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

// Thread safety: as File.
class PosixFile : public File {
 public:
  // `aligned`: a data file, with page-aligned transfers and O_DIRECT if the file system supports it.
  PosixFile(const PosixCalls& calls, int fd, std::string path, bool aligned);

  void pread(void* buf, size_t bytes, uint64_t offset) override;
  void pwrite(const void* buf, size_t bytes, uint64_t offset) override;
  void datasync() override;
  void report_write_errors() override;
  void truncate(uint64_t bytes) noexcept override;
  uint64_t size() override;
  const std::string& path() const override { return path_; }

  int fd() const { return fd_.get(); }
  // Throws Error unless buffer, length and offset of a data file are aligned.
  void check_aligned(const char* verb, const void* buf, size_t bytes, uint64_t offset) const;
  // Reads the rest of a request of which `done` bytes are already in the buffer. Also the slow path of io_uring reads.
  void read_rest(uint8_t* buf, size_t bytes, uint64_t offset, size_t done);

 private:
  // Switches O_DIRECT off: some file systems accept the flag and refuse the transfer. False if it was already off.
  bool disable_direct();

  const PosixCalls calls_;
  const Fd fd_;
  const std::string path_;
  const bool aligned_;
  std::atomic<bool> direct_{false};
};

}  // namespace thermocline
