// Replaceable system calls of the POSIX file system, so that tests can interrupt, shorten and fail single calls. Other
// code uses make_posix_fs (util/fs.h).
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "util/fs.h"
#include "util/uring.h"

namespace thermocline {

struct PosixCalls {
  ssize_t (*pread)(int fd, void* buf, size_t bytes, off_t offset);
  ssize_t (*pwrite)(int fd, const void* buf, size_t bytes, off_t offset);
  int (*fdatasync)(int fd);
  int32_t (*uring_result)(int32_t result);  // replaces the result of a completion; null: unchanged
  std::unique_ptr<Uring> (*make_ring)(unsigned entries) = Uring::create;
};

PosixCalls real_posix_calls();
std::shared_ptr<FileSystem> make_posix_fs_on(const PosixCalls& calls, IoEngine engine, int workers, int depth);

}  // namespace thermocline
