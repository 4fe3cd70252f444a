// File system interface. All file operations of the store use it, so that tests can record them, replay crashes and
// inject failures (csrc/testing).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace thermocline {

// Buffers, offsets and lengths of data files are multiples of this, as O_DIRECT requires.
inline constexpr size_t kSector = 4096;

// An open file. The destructor closes it, without a sync and without exceptions.
// Thread safety: pread and pwrite of disjoint ranges may run concurrently.
class File {
 public:
  virtual ~File() = default;
  // Transfer all bytes or throw. A read past the end of the file throws IoError with code 0.
  virtual void pread(void* buf, size_t bytes, uint64_t offset) = 0;
  virtual void pwrite(const void* buf, size_t bytes, uint64_t offset) = 0;
  // Makes data and size durable. After a failure the content of the file is unknown.
  virtual void datasync() = 0;
  // Throws the errors of all writes so far. datasync() of a later open() may miss them: the kernel keeps them with the
  // inode, which it may evict once the file is closed. Less than datasync(): O_DIRECT has reported them already.
  virtual void report_write_errors() { datasync(); }
  // Frees the space of an unused tail, if possible.
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

// Reads in flight of one thread. Not thread-safe. The destructor waits for all reads.
class ReadQueue {
 public:
  virtual ~ReadQueue() = default;
  // At most depth() reads may be in flight.
  virtual void submit(const ReadOp& op, uint64_t tag) = 0;
  // Blocks until a read finishes and returns its tag. Throws IoError if that read failed; the others stay in the queue.
  virtual uint64_t wait() = 0;
  virtual size_t depth() const = 0;
  // Starts all submitted reads. Without it a read may start as late as the next wait().
  virtual void flush() {}
  // Registers the memory that most reads use, so that the kernel pins it once. It must outlive the queue.
  virtual void use_buffer(uint8_t* /*memory*/, size_t /*bytes*/) {}
};

// An exclusive lock, released by the destructor or by the end of the process.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

enum class OpenMode {
  kRead,        // must exist
  kCreate,      // must not exist; data file: page-aligned, O_DIRECT if available
  kCreateMeta,  // must not exist; small buffered file, any alignment (still needs datasync)
  kReadMeta,    // must exist; small buffered file, any alignment
};

// Thread safety: all calls may run concurrently.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual std::unique_ptr<File> open(const std::string& path, OpenMode mode) = 0;
  virtual void rename(const std::string& from, const std::string& to) = 0;  // atomic, replaces
  virtual void unlink(const std::string& path) = 0;
  virtual void link(const std::string& from, const std::string& to) = 0;  // hard link
  virtual void make_dir(const std::string& path) = 0;                     // no error if it exists
  virtual void sync_dir(const std::string& path) = 0;
  // Links a file into the folder `dir`, which is created if it is missing, as `name`, or as name.1, name.2, ... if that
  // exists; returns the name. Throws FormatError if `dir` is a symbolic link: the link would be made elsewhere.
  virtual std::string link_unused(const std::string& from, const std::string& dir, const std::string& name);
  virtual bool exists(const std::string& path) = 0;
  virtual std::vector<std::string> list(const std::string& dir) = 0;    // names, sorted; throws NotFoundError
  virtual std::unique_ptr<FileLock> lock(const std::string& path) = 0;  // creates the file; throws LockError

  // The fastest concurrency of large batches: `workers` threads with up to `depth` reads in flight each.
  struct Concurrency {
    int workers;
    int depth;
  };
  virtual Concurrency read_concurrency() const { return {1, 1}; }
  // The default implementation reads synchronously inside submit().
  virtual std::unique_ptr<ReadQueue> read_queue(size_t depth);
  // Number of datasync calls that run at once in a commit.
  virtual int sync_concurrency() const { return 1; }
  // Called at named points of commits, merges and other writes. Crash tests kill the process or throw there.
  virtual void failpoint(std::string_view /*point*/) {}
  // Warnings for the user since the last call.
  virtual std::vector<std::string> take_warnings() { return {}; }
  // "io_uring", "pread", ... for stats().
  virtual std::string name() const = 0;
};

enum class IoEngine { kAuto, kUring, kPread };

// The file system of the operating system. `workers` and `depth` 0: defaults of the engine.
std::shared_ptr<FileSystem> make_posix_fs(IoEngine engine = IoEngine::kAuto, int workers = 0, int depth = 0);

// Reads a whole small file. Throws CorruptionError, before it allocates, if the file is larger than `max_bytes`.
std::string read_whole(FileSystem& fs, const std::string& path, size_t max_bytes = 1u << 20);
// Writes a file atomically: writes name.tmp, syncs it, renames it to name, syncs the folder. A failure removes
// name.tmp.
void publish_file(FileSystem& fs, const std::string& dir, const std::string& name, std::string_view bytes);

}  // namespace thermocline
