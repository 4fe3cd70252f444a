#include "util/posix_fs.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <set>

#include "testing/test.h"
#include "util/aligned.h"
#include "util/error.h"
#include "util/uring.h"

namespace thermocline {
namespace {

using testing::TempDir;

struct Buffer {
  explicit Buffer(size_t bytes) : memory(bytes), p(memory.data()), bytes(bytes) { std::memset(p, 0, bytes); }
  const AlignedBuffer memory;
  uint8_t* const p;
  const size_t bytes;
};

// Word i of a test file holds f(i), so that every range can be checked alone.
void fill(uint8_t* p, size_t bytes, uint64_t offset) {
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t v = (offset + i) * 0x9e3779b97f4a7c15ULL;
    std::memcpy(p + i, &v, 8);
  }
}
bool filled(const uint8_t* p, size_t bytes, uint64_t offset) {
  Buffer want(bytes);
  fill(want.p, bytes, offset);
  return std::memcmp(p, want.p, bytes) == 0;
}

void write_pages(FileSystem& fs, const std::string& path, size_t pages) {
  Buffer b(pages * kSector);
  fill(b.p, b.bytes, 0);
  auto f = fs.open(path, OpenMode::kCreate);
  f->pwrite(b.p, b.bytes, 0);
  f->datasync();
}

std::vector<IoEngine> engines() {
  std::vector<IoEngine> all = {IoEngine::kPread};
  if (Uring::create(4)) all.push_back(IoEngine::kUring);
  return all;
}

template <typename E>
std::string message(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const E& e) {
    return e.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Folders to test in: the usual one, and tmpfs (no O_DIRECT on older kernels) where there is one.
std::vector<std::string> more_dirs() {
  struct stat st;
  std::vector<std::string> dirs;
  if (::stat("/dev/shm", &st) == 0 && ::access("/dev/shm", W_OK) == 0) dirs.push_back("/dev/shm");
  return dirs;
}

TEST(PosixFs, WritesAndReadsBackOnDiskAndTmpfs) {
  TempDir dir;
  std::vector<std::string> paths = {dir / "data"};
  for (const std::string& d : more_dirs()) paths.push_back(d + "/thermocline-test-" + std::to_string(::getpid()));
  for (const std::string& path : paths) {
    for (IoEngine engine : engines()) {
      auto fs = make_posix_fs(engine);
      write_pages(*fs, path, 8);
      CHECK_THROWS(IoError, fs->open(path, OpenMode::kCreate));  // must not exist
      auto f = fs->open(path, OpenMode::kRead);
      CHECK_EQ(f->size(), 8 * kSector);
      CHECK_EQ(f->path(), path);
      Buffer b(3 * kSector);
      f->pread(b.p, b.bytes, 4 * kSector);
      CHECK(filled(b.p, b.bytes, 4 * kSector));
      fs->unlink(path);
      f->pread(b.p, b.bytes, 0);  // an unlinked file stays readable while open
      CHECK(filled(b.p, b.bytes, 0));
      CHECK(!fs->exists(path));
    }
  }
}

TEST(PosixFs, QueueReadsEverythingAtEveryDepth) {
  TempDir dir;
  write_pages(*make_posix_fs(IoEngine::kPread), dir / "data", 64);
  for (IoEngine engine : engines()) {
    for (size_t depth : {1, 2, 7, 64}) {
      auto fs = make_posix_fs(engine);
      auto f = fs->open(dir / "data", OpenMode::kRead);
      auto q = fs->read_queue(depth);
      CHECK_EQ(q->depth(), depth);
      std::mt19937_64 rng(depth);
      struct Slot {
        uint64_t page = 0;
        uint32_t pages = 0;
      };
      Buffer b(depth * 4 * kSector);
      std::vector<Slot> slots(depth);
      std::vector<uint64_t> free;
      for (size_t i = 0; i < depth; ++i) free.push_back(i);
      for (size_t sent = 0, done = 0; done < 500;) {
        while (sent < 500 && !free.empty() && rng() % 8 != 0) {
          const uint64_t s = free.back();
          free.pop_back();
          slots[s] = {rng() % 60, uint32_t(1 + rng() % 4)};
          q->submit({f.get(), slots[s].page * kSector, uint32_t(slots[s].pages * kSector), b.p + s * 4 * kSector}, s);
          ++sent;
        }
        if (sent == done) continue;
        const uint64_t s = q->wait();
        CHECK(filled(b.p + s * 4 * kSector, slots[s].pages * kSector, slots[s].page * kSector));
        free.push_back(s);
        ++done;
      }
      CHECK_THROWS(Error, q->wait());  // nothing in flight
    }
  }
}

TEST(PosixFs, QueueKeepsGoingAfterAFailedRead) {
  TempDir dir;
  write_pages(*make_posix_fs(IoEngine::kPread), dir / "data", 4);
  for (IoEngine engine : engines()) {
    auto fs = make_posix_fs(engine);
    auto f = fs->open(dir / "data", OpenMode::kRead);
    auto q = fs->read_queue(4);
    Buffer b(8 * kSector);
    q->submit({f.get(), 0, kSector, b.p}, 10);
    q->submit({f.get(), 3 * kSector, 2 * kSector, b.p + kSector}, 11);  // one page past the end
    q->submit({f.get(), 9 * kSector, kSector, b.p + 3 * kSector}, 12);  // all past the end
    q->submit({f.get(), 2 * kSector, kSector, b.p + 4 * kSector}, 13);
    CHECK_THROWS(Error, q->submit({f.get(), 0, kSector, b.p}, 14));  // full
    std::set<uint64_t> tags;
    int failures = 0;
    for (int i = 0; i < 4; ++i) {
      try {
        tags.insert(q->wait());
      } catch (const IoError& e) {
        CHECK_EQ(e.code, 0);
        CHECK(contains(e.what(), "data") && contains(e.what(), "16384"));
        ++failures;
      }
    }
    CHECK_EQ(failures, 2);
    CHECK(tags == (std::set<uint64_t>{10, 13}));
    CHECK(filled(b.p, kSector, 0) && filled(b.p + 4 * kSector, kSector, 2 * kSector));
  }
}

TEST(PosixFs, DestroyedQueueWaitsForItsReads) {
  TempDir dir;
  write_pages(*make_posix_fs(IoEngine::kPread), dir / "data", 64);
  for (IoEngine engine : engines()) {
    auto fs = make_posix_fs(engine);
    auto f = fs->open(dir / "data", OpenMode::kRead);
    for (int round = 0; round < 50; ++round) {
      Buffer b(32 * kSector);  // freed at once afterwards: ASan sees a read that lands late
      auto q = fs->read_queue(32);
      for (uint64_t i = 0; i < 32; ++i) q->submit({f.get(), i * kSector, kSector, b.p + i * kSector}, i);
      if (round % 2) q->wait();
      q.reset();
      CHECK(filled(b.p, b.bytes, 0));
    }
  }
}

TEST(PosixFs, ShortFilesAreErrorsThatSaySo) {
  TempDir dir;
  auto fs = make_posix_fs();
  {
    auto f = fs->open(dir / "odd", OpenMode::kCreateMeta);
    f->pwrite("hello", 5, 0);
    f->datasync();
  }
  CHECK_EQ(read_whole(*fs, dir / "odd"), "hello");
  for (IoEngine engine : engines()) {  // a data file cut at an odd byte
    auto e = make_posix_fs(engine);
    auto f = e->open(dir / "odd", OpenMode::kRead);
    Buffer b(kSector);
    const std::string text = message<IoError>([&] { f->pread(b.p, kSector, 0); });
    CHECK(contains(text, "ends at 5") && contains(text, "odd"));
    auto q = e->read_queue(2);
    q->submit({f.get(), 0, kSector, b.p}, 1);
    CHECK_THROWS(IoError, q->wait());
  }
}

TEST(PosixFs, UnalignedUseOfADataFileIsRefusedEverywhere) {
  TempDir dir;
  write_pages(*make_posix_fs(IoEngine::kPread), dir / "data", 2);
  for (IoEngine engine : engines()) {
    auto fs = make_posix_fs(engine);
    auto f = fs->open(dir / "data", OpenMode::kRead);
    Buffer b(2 * kSector);
    CHECK_THROWS(Error, f->pread(b.p + 512, kSector, 0));
    CHECK_THROWS(Error, f->pread(b.p, kSector, 512));
    CHECK_THROWS(Error, f->pread(b.p, 512, 0));
    auto q = fs->read_queue(1);
    if (engine == IoEngine::kUring) CHECK_THROWS(Error, q->submit({f.get(), 512, kSector, b.p}, 0));
  }
}

// What the injected system calls do. Each counts its calls; every second one misbehaves.
std::atomic<int> g_calls{0};
std::atomic<int> g_errno{0};

ssize_t bumpy_pread(int fd, void* buf, size_t bytes, off_t offset) {
  switch (g_calls++ % 3) {
    case 0:
      errno = EINTR;
      return -1;
    case 1:
      return ::pread(fd, buf, std::min<size_t>(bytes, kSector), offset);
    default:
      return ::pread(fd, buf, bytes, offset);
  }
}
ssize_t bumpy_pwrite(int fd, const void* buf, size_t bytes, off_t offset) {
  switch (g_calls++ % 3) {
    case 0:
      errno = EINTR;
      return -1;
    case 1:
      return ::pwrite(fd, buf, std::min<size_t>(bytes, kSector), offset);
    default:
      return ::pwrite(fd, buf, bytes, offset);
  }
}
int bumpy_fdatasync(int fd) {
  if (g_calls++ % 2 == 0) {
    errno = EINTR;
    return -1;
  }
  return ::fdatasync(fd);
}
int32_t bumpy_uring(int32_t result) {
  switch (g_calls++ % 4) {
    case 0:
      return -EINTR;
    case 1:
      return -EAGAIN;
    case 2:
      return std::min<int32_t>(result, kSector);
    default:
      return result;
  }
}
ssize_t failing_pwrite(int, const void*, size_t, off_t) {
  errno = g_errno;
  return -1;
}
ssize_t failing_pread(int, void*, size_t, off_t) {
  errno = g_errno;
  return -1;
}
int failing_fdatasync(int) {
  ++g_calls;
  errno = g_errno;
  return -1;
}

TEST(PosixFs, InterruptedAndShortCallsAreContinued) {
  TempDir dir;
  const PosixCalls bumpy = {bumpy_pread, bumpy_pwrite, bumpy_fdatasync, bumpy_uring};
  for (IoEngine engine : engines()) {
    const std::string path = dir / (engine == IoEngine::kUring ? "u" : "p");
    auto fs = make_posix_fs_on(bumpy, engine, 0, 0);
    write_pages(*fs, path, 32);
    auto f = fs->open(path, OpenMode::kRead);
    CHECK_EQ(f->size(), 32 * kSector);
    Buffer b(32 * kSector);
    f->pread(b.p, b.bytes, 0);
    CHECK(filled(b.p, b.bytes, 0));
    auto q = fs->read_queue(4);
    for (int round = 0; round < 50; ++round) {
      std::memset(b.p, 0, b.bytes);
      for (uint64_t i = 0; i < 4; ++i) q->submit({f.get(), i * 8 * kSector, 8 * kSector, b.p + i * 8 * kSector}, i);
      for (int i = 0; i < 4; ++i) q->wait();
      CHECK(filled(b.p, b.bytes, 0));
    }
  }
}

TEST(PosixFs, RealSignalsDoNotDisturb) {
  TempDir dir;
  auto fs = make_posix_fs();
  struct sigaction act = {}, old = {};
  act.sa_handler = [](int) { ++g_calls; };  // without SA_RESTART: blocking calls return EINTR
  ::sigaction(SIGALRM, &act, &old);
  itimerval timer = {{0, 200}, {0, 200}};
  ::setitimer(ITIMER_REAL, &timer, nullptr);
  std::string problem;
  try {
    for (int i = 0; i < 30 && problem.empty(); ++i) {
      const std::string path = dir / ("s" + std::to_string(i));
      write_pages(*fs, path, 64);
      auto f = fs->open(path, OpenMode::kRead);
      Buffer b(64 * kSector);
      auto q = fs->read_queue(16);
      for (uint64_t k = 0; k < 16; ++k) q->submit({f.get(), k * 4 * kSector, 4 * kSector, b.p + k * 4 * kSector}, k);
      for (int k = 0; k < 16; ++k) q->wait();
      if (!filled(b.p, b.bytes, 0)) problem = "wrong bytes";
    }
  } catch (const std::exception& e) {
    problem = e.what();
  }
  timer = {};
  ::setitimer(ITIMER_REAL, &timer, nullptr);
  ::sigaction(SIGALRM, &old, nullptr);
  CHECK_EQ(problem, "");
}

TEST(PosixFs, ErrnoBecomesTheRightError) {
  TempDir dir;
  write_pages(*make_posix_fs(IoEngine::kPread), dir / "data", 1);
  const PosixCalls failing = {failing_pread, failing_pwrite, failing_fdatasync, nullptr};
  auto fs = make_posix_fs_on(failing, IoEngine::kPread, 0, 0);
  auto w = fs->open(dir / "new", OpenMode::kCreate);
  Buffer b(kSector);
  g_errno = ENOSPC;
  CHECK_THROWS(DiskFullError, w->pwrite(b.p, kSector, 0));
  g_errno = EDQUOT;
  CHECK_THROWS(DiskFullError, w->pwrite(b.p, kSector, 0));
  CHECK_THROWS(DiskFullError, w->datasync());
  g_errno = EROFS;
  CHECK_THROWS(ReadOnlyError, w->pwrite(b.p, kSector, 0));
  g_errno = EIO;
  const std::string text = message<IoError>([&] { w->pwrite(b.p, kSector, 2 * kSector); });
  CHECK(contains(text, "new") && contains(text, "4096 bytes") && contains(text, "8192") && contains(text, "error"));
  CHECK_THROWS(IoError, fs->open(dir / "data", OpenMode::kRead)->pread(b.p, kSector, 0));
  g_calls = 0;
  CHECK_THROWS(IoError, w->datasync());
  CHECK_EQ(g_calls.load(), 1);  // a failed sync is never tried again: the kernel has forgotten the pages
}

TEST(PosixFs, MissingThingsAreNotFound) {
  TempDir dir;
  auto fs = make_posix_fs();
  CHECK_THROWS(NotFoundError, fs->open(dir / "none", OpenMode::kRead));
  CHECK_THROWS(NotFoundError, fs->open(dir / "none", OpenMode::kReadMeta));
  CHECK_THROWS(NotFoundError, fs->open(dir / "none/x", OpenMode::kCreate));
  CHECK_THROWS(NotFoundError, fs->unlink(dir / "none"));
  CHECK_THROWS(NotFoundError, fs->rename(dir / "none", dir / "other"));
  CHECK_THROWS(NotFoundError, fs->list(dir / "none"));
  CHECK(!fs->exists(dir / "none"));
}

TEST(PosixFs, FoldersLinksAndRenames) {
  TempDir dir;
  auto fs = make_posix_fs();
  fs->make_dir(dir / "d");
  fs->make_dir(dir / "d");  // fine if it exists
  write_pages(*fs, dir / "d/b", 1);
  write_pages(*fs, dir / "d/c", 2);
  CHECK_THROWS(IoError, fs->make_dir(dir / "d/b"));  // a file is not a folder
  fs->link(dir / "d/b", dir / "d/a");
  CHECK_THROWS(IoError, fs->link(dir / "d/b", dir / "d/c"));
  fs->rename(dir / "d/c", dir / "d/b");  // replaces
  fs->sync_dir(dir / "d");
  CHECK(fs->list(dir / "d") == (std::vector<std::string>{"a", "b"}));
  CHECK_EQ(fs->open(dir / "d/a", OpenMode::kRead)->size(), kSector);
  CHECK_EQ(fs->open(dir / "d/b", OpenMode::kRead)->size(), 2 * kSector);
}

TEST(PosixFs, UnwritableFolderIsAReadOnlyError) {
  if (::geteuid() == 0) return;  // root may write anywhere; tests/faults mounts a read-only file system instead
  TempDir dir;
  auto fs = make_posix_fs();
  fs->make_dir(dir / "ro");
  ::chmod((dir / "ro").c_str(), 0555);
  CHECK_THROWS(ReadOnlyError, fs->open(dir / "ro/x", OpenMode::kCreate));
  CHECK_THROWS(ReadOnlyError, fs->lock(dir / "ro/LOCK"));
}

TEST(PosixFs, LockIsExclusiveInOneProcessAndAcross) {
  TempDir dir;
  auto fs = make_posix_fs();
  auto lock = fs->lock(dir / "LOCK");
  const std::string text = message<LockError>([&] { fs->lock(dir / "LOCK"); });
  CHECK(contains(text, std::to_string(::getpid())) && contains(text, "read_only"));
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      make_posix_fs(IoEngine::kPread)->lock(dir / "LOCK");
    } catch (const LockError&) {
      ::_exit(7);
    } catch (...) {
    }
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  lock.reset();
  lock = fs->lock(dir / "LOCK");  // free again
}

TEST(PosixFs, LockOfADeadProcessIsFree) {
  TempDir dir;
  const pid_t child = ::fork();
  if (child == 0) {
    auto* held = make_posix_fs(IoEngine::kPread)->lock(dir / "LOCK").release();
    ::kill(::getpid(), held ? SIGKILL : SIGTERM);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  make_posix_fs()->lock(dir / "LOCK");
}

TEST(PosixFs, KillsItselfAtTheNamedPoint) {
  TempDir dir;
  for (int wanted : {1, 3}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("THERMOCLINE_KILL_AT", ("publish.synced:" + std::to_string(wanted)).c_str(), 1);
      auto fs = make_posix_fs(IoEngine::kPread);
      for (int i = 1; i <= 3; ++i) publish_file(*fs, dir.path(), "f", std::to_string(i));
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    auto fs = make_posix_fs();
    CHECK(fs->exists(dir / "f.tmp"));
    if (wanted == 1) {
      CHECK(!fs->exists(dir / "f"));
    } else {
      CHECK_EQ(read_whole(*fs, dir / "f"), "2");
    }
  }
}

TEST(PublishFile, ReplacesWholeOrNotAtAll) {
  TempDir dir;
  auto fs = make_posix_fs();
  publish_file(*fs, dir.path(), "f", "one");
  publish_file(*fs, dir.path(), "f", "");
  CHECK_EQ(read_whole(*fs, dir / "f"), "");
  publish_file(*fs, dir.path(), "f", "two");
  fs->open(dir / "f.tmp", OpenMode::kCreateMeta)->pwrite("stale", 5, 0);  // as a crash leaves it
  publish_file(*fs, dir.path(), "f", "three");
  CHECK_EQ(read_whole(*fs, dir / "f"), "three");

  g_errno = ENOSPC;
  for (const PosixCalls& calls : {PosixCalls{failing_pread, failing_pwrite, ::fdatasync, nullptr},
                                  PosixCalls{failing_pread, ::pwrite, failing_fdatasync, nullptr}}) {
    auto full = make_posix_fs_on(calls, IoEngine::kPread, 0, 0);
    CHECK_THROWS(DiskFullError, publish_file(*full, dir.path(), "f", "four"));
    CHECK_EQ(read_whole(*fs, dir / "f"), "three");
    CHECK(fs->list(dir.path()) == std::vector<std::string>{"f"});  // no temporary left
  }
}

TEST(PosixFs, EngineIsChosenByTheEnvironment) {
  const char* before = std::getenv("THERMOCLINE_IO");
  const std::string saved = before ? before : "auto";
  ::setenv("THERMOCLINE_IO", "pread", 1);
  CHECK_EQ(make_posix_fs()->name(), "pread");
  CHECK_EQ(make_posix_fs()->read_concurrency().depth, 1);
  ::setenv("THERMOCLINE_IO", "nonsense", 1);
  CHECK_THROWS(Error, make_posix_fs());
  ::unsetenv("THERMOCLINE_IO");
  if (Uring::create(4)) CHECK_EQ(make_posix_fs()->name(), "io_uring");
  CHECK_EQ(make_posix_fs(IoEngine::kAuto, 3, 5)->read_concurrency().workers, 3);
  ::setenv("THERMOCLINE_IO", saved.c_str(), 1);
}

}  // namespace
}  // namespace thermocline
