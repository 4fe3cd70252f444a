// The one door to files. Everything the store does to a disk goes through FileSystem, so that tests can record it,
// replay any crash of it, and make any single operation fail (csrc/testing).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace thermocline {

// Buffers, offsets and lengths of data files are multiples of this, so that O_DIRECT works.
inline constexpr size_t kSector = 4096;

// An open file. Closing is the destructor; it never throws and syncs nothing.
// Thread safety: pread and pwrite of different ranges may run concurrently.
class File {
 public:
  virtual ~File() = default;
  // Whole or an exception: a read that meets the end of the file is an IoError (code 0) that says so.
  virtual void pread(void* buf, size_t bytes, uint64_t offset) = 0;
  virtual void pwrite(const void* buf, size_t bytes, uint64_t offset) = 0;
  // Data and size are on the device when it returns. After a failure the file must not be trusted again.
  virtual void datasync() = 0;
  // Gives back the space of a tail that nobody needs, where that is possible; never throws.
  virtual void truncate(uint64_t /*bytes*/) noexcept {}
  virtual uint64_t size() = 0;
  virtual const std::string& path() const = 0;
};

struct ReadOp {
  File* file;
  uint64_t offset;
  uint32_t bytes;
  uint8_t* buf;
};

// One thread's reads in flight. Not thread-safe. Destroying a queue waits for what is in flight.
class ReadQueue {
 public:
  virtual ~ReadQueue() = default;
  // At most depth() reads may be in flight: wait() first when full.
  virtual void submit(const ReadOp& op, uint64_t tag) = 0;
  // The tag of one finished read, in any order. Throws IoError if that read failed; the others stay waitable.
  virtual uint64_t wait() = 0;
  virtual size_t depth() const = 0;
  // Most reads will go into this memory, which outlives the queue: lets the kernel prepare it once.
  virtual void use_buffer(uint8_t* /*memory*/, size_t /*bytes*/) {}
};

// Held for as long as it lives; released by process death too.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

enum class OpenMode {
  kRead,        // must exist
  kCreate,      // must not exist; data file: page-aligned, O_DIRECT where there is one
  kCreateMeta,  // must not exist; small buffered file, any alignment (still needs datasync)
  kReadMeta,    // must exist; small buffered file, any alignment
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual std::unique_ptr<File> open(const std::string& path, OpenMode mode) = 0;
  virtual void rename(const std::string& from, const std::string& to) = 0;  // atomic, replaces
  virtual void unlink(const std::string& path) = 0;
  virtual void link(const std::string& from, const std::string& to) = 0;  // hard link
  virtual void make_dir(const std::string& path) = 0;                     // fine if it exists
  virtual void sync_dir(const std::string& path) = 0;
  virtual bool exists(const std::string& path) = 0;
  virtual std::vector<std::string> list(const std::string& dir) = 0;    // names, sorted; throws NotFoundError
  virtual std::unique_ptr<FileLock> lock(const std::string& path) = 0;  // creates the file; throws LockError

  // Reads of `depth` at a time by each of `workers` threads suit this file system best.
  struct Concurrency {
    int workers;
    int depth;
  };
  virtual Concurrency read_concurrency() const { return {1, 1}; }
  // The default reads at once, inside submit().
  virtual std::unique_ptr<ReadQueue> read_queue(size_t depth);
  // Called at named moments of a commit or merge; test file systems kill the process or throw there.
  virtual void failpoint(std::string_view /*point*/) {}
  // "io_uring", "pread", ... for stats().
  virtual std::string name() const = 0;
};

enum class IoEngine { kAuto, kUring, kPread };

// The operating system's files. `workers` and `depth` 0: defaults of the engine.
std::shared_ptr<FileSystem> make_posix_fs(IoEngine engine = IoEngine::kAuto, int workers = 0, int depth = 0);

// Whole small files, for manifests and tests.
std::string read_whole(FileSystem& fs, const std::string& path);
// Atomic publish: write `path`.tmp, sync it, rename it to `path`, sync the folder. Removes the temporary on failure.
void publish_file(FileSystem& fs, const std::string& dir, const std::string& name, std::string_view bytes);

}  // namespace thermocline
