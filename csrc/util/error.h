// Error classes. Each is translated to a Python exception (bind/module.cc).
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>

namespace thermocline {

// Base class; thrown directly for misuse (closed store, wrong argument sizes).
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Bytes on disk differ from the bytes written. The message has file, page and cause.
struct CorruptionError : Error {
  using Error::Error;
};

// The store is open for writing in another process, or in another object of this process.
struct LockError : Error {
  using Error::Error;
};

// Not a store folder, a newer format version, or a different row size.
struct FormatError : Error {
  using Error::Error;
};

// The byte budget is too small. The message has the budget and the need.
struct BudgetError : Error {
  using Error::Error;
};

// The store or its file system does not accept writes.
struct ReadOnlyError : Error {
  using Error::Error;
};

// An operating system call failed; `code` is its errno.
struct IoError : Error {
  IoError(const std::string& what, int code) : Error(what), code(code) {}
  int code;
};

// Whether the device or the file system could not return the bytes of a file, or the file ends too early (code 0): the
// file is damaged. Other errors concern the process or the call: permissions, open files, memory.
inline bool is_unreadable(const IoError& e) {
  return e.code == 0 || e.code == EIO || e.code == ENODATA || e.code == EUCLEAN || e.code == EBADMSG;
}

// The file system is full (ENOSPC, EDQUOT). Committed rows are safe.
struct DiskFullError : IoError {
  using IoError::IoError;
};

// A file or epoch does not exist.
struct NotFoundError : Error {
  using Error::Error;
};

}  // namespace thermocline
