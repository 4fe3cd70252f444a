// The POSIX file system on real files: transfers, read queues, folders, locks, failpoints.
#include "util/posix_fs.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>

#include "testing/test.h"
#include "util/error.h"
#include "util/posix_test_util.h"

namespace thermocline {
namespace {

using testing::TempDir;

// Additional folders to test in: tmpfs (no O_DIRECT on older kernels), if available.
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

TEST(PosixFs, TooManyOpenFilesNamesTheLimit) {
  TempDir dir;
  auto fs = make_posix_fs(IoEngine::kPread);
  write_pages(*fs, dir / "data", 1);
  rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 3;  // standard input, output and error
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  std::string message;
  try {
    fs->open(dir / "data", OpenMode::kRead);
  } catch (const IoError& e) {
    message = e.what();
  }
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK(message.find("this process may have 3 open files") != std::string::npos);
  CHECK(message.find("ulimit -n") != std::string::npos);
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

TEST(PosixFs, QueueContinuesAfterAFailedRead) {
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
      Buffer b(32 * kSector);  // freed right after the queue: ASan reports a late write of the kernel
      auto q = fs->read_queue(32);
      for (uint64_t i = 0; i < 32; ++i) q->submit({f.get(), i * kSector, kSector, b.p + i * kSector}, i);
      if (round % 2) q->wait();
      q.reset();
      CHECK(filled(b.p, b.bytes, 0));
    }
  }
}

TEST(PosixFs, ReadsPastTheEndThrow) {
  TempDir dir;
  auto fs = make_posix_fs();
  {
    auto f = fs->open(dir / "odd", OpenMode::kCreateMeta);
    f->pwrite("hello", 5, 0);
    f->datasync();
  }
  CHECK_EQ(read_whole(*fs, dir / "odd"), "hello");
  for (IoEngine engine : engines()) {  // a data file that ends inside a sector
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

TEST(PosixFs, UnalignedTransfersOfADataFileThrow) {
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

TEST(PosixFs, MissingFilesThrowNotFoundError) {
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
  fs->make_dir(dir / "d");  // no error if it exists
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

TEST(PosixFs, UnwritableFolderThrowsReadOnlyError) {
  if (::geteuid() == 0) return;  // root may write anywhere; tests/faults mounts a read-only file system instead
  TempDir dir;
  auto fs = make_posix_fs();
  fs->make_dir(dir / "ro");
  ::chmod((dir / "ro").c_str(), 0555);
  CHECK_THROWS(ReadOnlyError, fs->open(dir / "ro/x", OpenMode::kCreate));
  CHECK_THROWS(ReadOnlyError, fs->lock(dir / "ro/LOCK"));
}

TEST(PosixFs, LockIsExclusiveInAndAcrossProcesses) {
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
  lock = fs->lock(dir / "LOCK");  // released
}

TEST(PosixFs, LockOfADeadProcessIsReleased) {
  TempDir dir;
  const pid_t child = ::fork();
  if (child == 0) {
    auto* lock = make_posix_fs(IoEngine::kPread)->lock(dir / "LOCK").release();
    ::kill(::getpid(), lock ? SIGKILL : SIGTERM);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  make_posix_fs()->lock(dir / "LOCK");
}

TEST(PosixFs, KillsTheProcessAtTheFailpoint) {
  TempDir dir;
  for (int count : {1, 3}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("THERMOCLINE_KILL_AT", ("publish.synced:" + std::to_string(count)).c_str(), 1);
      auto fs = make_posix_fs(IoEngine::kPread);
      for (int i = 1; i <= 3; ++i) publish_file(*fs, dir.path(), "f", std::to_string(i));
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    auto fs = make_posix_fs();
    CHECK(fs->exists(dir / "f.tmp"));
    if (count == 1) {
      CHECK(!fs->exists(dir / "f"));
    } else {
      CHECK_EQ(read_whole(*fs, dir / "f"), "2");
    }
  }
}

TEST(PosixFs, EngineIsSetByTheEnvironment) {
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

TEST(PosixFs, LinksIntoAFolderButNotThroughASymbolicLink) {
  TempDir dir;
  auto fs = make_posix_fs();
  write_pages(*fs, dir / "a", 1);
  CHECK_EQ(fs->link_unused(dir / "a", dir / "kept", "a"), "a");
  CHECK_EQ(fs->link_unused(dir / "a", dir / "kept", "a"), "a.1");
  CHECK_EQ(fs->link_unused(dir / "a", dir / "kept", "a"), "a.2");
  CHECK_EQ(fs->list(dir / "kept").size(), 3u);
  fs->make_dir(dir / "elsewhere");
  CHECK_EQ(::symlink((dir / "elsewhere").c_str(), (dir / "planted").c_str()), 0);
  CHECK_THROWS(FormatError, fs->link_unused(dir / "a", dir / "planted", "a"));
  CHECK_THROWS(FormatError, fs->link_unused(dir / "a", dir / "a", "a"));  // a file
  CHECK(fs->list(dir / "elsewhere").empty());
}

}  // namespace
}  // namespace thermocline
