// The errors a user can meet. Each kind becomes its own Python exception (bind/module.cc).
#pragma once

#include <stdexcept>
#include <string>

namespace thermocline {

// Base of all: also used as such for misuse (closed store, wrong argument sizes).
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Bytes on disk are not what was written. Names file, page and cause.
struct CorruptionError : Error {
  using Error::Error;
};

// Another process (or another object of this one) has the store open for writing.
struct LockError : Error {
  using Error::Error;
};

// Not one of our folders, a newer format, or a row size other than the one asked for.
struct FormatError : Error {
  using Error::Error;
};

// The byte budget cannot hold what was asked for. Names the budget and the need.
struct BudgetError : Error {
  using Error::Error;
};

// The store, or the file system under it, takes no writes.
struct ReadOnlyError : Error {
  using Error::Error;
};

// An operating system call failed; `code` is its errno.
struct IoError : Error {
  IoError(const std::string& what, int code) : Error(what), code(code) {}
  int code;
};

// The file system is full (ENOSPC, EDQUOT). What was committed is safe.
struct DiskFullError : IoError {
  using IoError::IoError;
};

// There is no such file or epoch.
struct NotFoundError : Error {
  using Error::Error;
};

}  // namespace thermocline
