// The POSIX file system on injected system calls: interruptions, short transfers and errors.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "testing/test.h"
#include "util/error.h"
#include "util/posix_file.h"
#include "util/posix_fs.h"
#include "util/posix_test_util.h"

namespace thermocline {
namespace {

using testing::TempDir;

// Injected system calls: most calls are interrupted or short.
std::atomic<int> g_calls{0};
std::atomic<int> g_errno{0};

ssize_t flaky_pread(int fd, void* buf, size_t bytes, off_t offset) {
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
ssize_t flaky_pwrite(int fd, const void* buf, size_t bytes, off_t offset) {
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
int flaky_fdatasync(int fd) {
  if (g_calls++ % 2 == 0) {
    errno = EINTR;
    return -1;
  }
  return ::fdatasync(fd);
}
int32_t flaky_uring(int32_t result) {
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
  const PosixCalls flaky = {flaky_pread, flaky_pwrite, flaky_fdatasync, flaky_uring};
  for (IoEngine engine : engines()) {
    const std::string path = dir / (engine == IoEngine::kUring ? "u" : "p");
    auto fs = make_posix_fs_on(flaky, engine, 0, 0);
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

TEST(PosixFs, SignalsDoNotInterruptTransfers) {
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

// Injected calls for the fall-back: the kernel gives the ring of the probe and one more.
std::atomic<int> g_rings{0}, g_inside{0}, g_most_inside{0};

std::unique_ptr<Uring> two_rings(unsigned entries) {
  if (++g_rings <= 2) return Uring::create(entries);
  errno = ENOMEM;
  return nullptr;
}
ssize_t slow_pread(int fd, void* buf, size_t bytes, off_t offset) {
  const int now = ++g_inside;
  for (int most = g_most_inside; now > most && !g_most_inside.compare_exchange_weak(most, now);) {
  }
  ::usleep(20000);
  --g_inside;
  return ::pread(fd, buf, bytes, offset);
}

TEST(PosixFs, ThreadsTakeOverWithFullDepthWhenARingIsRefused) {
  if (engines().size() < 2) return;  // no io_uring here
  TempDir dir;
  g_rings = g_most_inside = 0;
  PosixCalls calls = real_posix_calls();
  calls.pread = slow_pread;
  calls.make_ring = two_rings;
  auto fs = make_posix_fs_on(calls, IoEngine::kUring, 0, 0);
  constexpr size_t kReads = 16;
  write_pages(*fs, dir / "f", kReads);
  auto f = fs->open(dir / "f", OpenMode::kRead);
  auto read_all = [&](ReadQueue& q) {
    Buffer b(kReads * kSector);
    CHECK_EQ(q.depth(), kReads);
    for (uint64_t i = 0; i < kReads; ++i) q.submit({f.get(), i * kSector, kSector, b.p + i * kSector}, i);
    CHECK_THROWS(Error, q.submit({f.get(), 0, kSector, b.p}, 0));
    std::vector<bool> seen(kReads);
    for (size_t i = 0; i < kReads; ++i) seen[q.wait()] = true;
    CHECK(std::count(seen.begin(), seen.end(), true) == kReads);
    CHECK_THROWS(Error, q.wait());
    CHECK(filled(b.p, b.bytes, 0));
  };
  auto ring = fs->read_queue(kReads);
  CHECK_EQ(fs->name(), "io_uring");
  CHECK(fs->take_warnings().empty());
  auto threads = fs->read_queue(kReads);
  CHECK_EQ(fs->name(), "pread");
  const auto warnings = fs->take_warnings();
  CHECK_EQ(warnings.size(), 1u);
  CHECK(contains(warnings[0], "io_uring") && contains(warnings[0], "Cannot allocate memory"));
  read_all(*ring);
  CHECK_EQ(g_most_inside.load(), 0);
  read_all(*threads);
  CHECK(g_most_inside >= int(kReads) / 2);  // one at a time before
  read_all(*fs->read_queue(kReads));
  CHECK(fs->take_warnings().empty());  // one warning
  // A failed read is reported by its wait(); destruction waits for reads in flight.
  Buffer b(4 * kSector);
  threads->submit({f.get(), kReads * kSector, kSector, b.p}, 1);
  CHECK_THROWS(IoError, threads->wait());
  for (uint64_t i = 0; i < 4; ++i) threads->submit({f.get(), i * kSector, kSector, b.p + i * kSector}, i);
  threads.reset();
  CHECK(filled(b.p, b.bytes, 0));
}

TEST(PosixFs, CallersReadIfTheSystemRefusesRingsAndThreads) {
  if (engines().size() < 2) return;  // no io_uring here
  TempDir dir;
  g_rings = 1;  // the probe only
  PosixCalls calls = real_posix_calls();
  calls.make_ring = two_rings;
  auto fs = make_posix_fs_on(calls, IoEngine::kUring, 0, 0);
  write_pages(*fs, dir / "f", 1);
  auto f = fs->open(dir / "f", OpenMode::kRead);
  NoNewThreads no_threads;
  CHECK(no_threads.refused());
  auto q = fs->read_queue(4);
  CHECK(contains(fs->take_warnings().at(0), "reads continue on 0 pread threads"));
  Buffer b(kSector);
  q->submit({f.get(), 0, kSector, b.p}, 7);
  CHECK_EQ(q->wait(), 7u);
  CHECK(filled(b.p, b.bytes, 0));
}

TEST(PosixFs, ErrnoIsTranslatedToErrorClasses) {
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
  CHECK_EQ(g_calls.load(), 1);  // a failed sync is not retried: the kernel may have dropped the pages
}

// Inodes that were synced.
std::vector<ino_t> g_synced;

int recording_fdatasync(int fd) {
  struct stat st;
  if (flaky_fdatasync(fd) != 0) return -1;
  if (::fstat(fd, &st) == 0) g_synced.push_back(st.st_ino);
  return 0;
}

TEST(SyncFiles, EveryFileIsSyncedWithFewOpenAtOnce) {
  TempDir dir;
  std::vector<std::string> paths;
  std::vector<ino_t> inodes;
  for (int i = 0; i < 150; ++i) {
    paths.push_back(dir / std::to_string(i));
    Fd fd(open_retry(paths.back(), O_CREAT | O_WRONLY));
    struct stat st;
    CHECK_EQ(::fstat(fd.get(), &st), 0);
    inodes.push_back(st.st_ino);
  }
  PosixCalls calls = real_posix_calls();
  calls.fdatasync = recording_fdatasync;
  g_synced.clear();
  g_calls = 0;
  const int free_fd = Fd(open_retry(paths[0], O_RDONLY)).get();
  rlimit old{};
  ::getrlimit(RLIMIT_NOFILE, &old);
  const rlimit few{rlim_t(free_fd) + 70, old.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &few);
  std::string problem;
  try {
    sync_files(paths, calls);
  } catch (const std::exception& e) {
    problem = e.what();
  }
  ::setrlimit(RLIMIT_NOFILE, &old);
  CHECK_EQ(problem, "");
  CHECK(g_synced == inodes);
  CHECK_EQ(g_calls.load(), 300);  // each file once interrupted
}

TEST(SyncFiles, ErrorsAreRaised) {
  TempDir dir;
  write_pages(*make_posix_fs(IoEngine::kPread), dir / "f", 1);
  PosixCalls calls = real_posix_calls();
  calls.fdatasync = failing_fdatasync;
  g_calls = 0;
  g_errno = EIO;
  CHECK(contains(message<IoError>([&] { sync_files({dir / "f"}, calls); }), dir / "f"));
  g_errno = ENOSPC;
  CHECK_THROWS(DiskFullError, sync_files({dir / "f"}, calls));
  CHECK_EQ(g_calls.load(), 2);
  CHECK_THROWS(NotFoundError, sync_files({dir / "none"}, calls));
}

TEST(PublishFile, ReplacesTheFileAtomically) {
  TempDir dir;
  auto fs = make_posix_fs();
  publish_file(*fs, dir.path(), "f", "one");
  publish_file(*fs, dir.path(), "f", "");
  CHECK_EQ(read_whole(*fs, dir / "f"), "");
  publish_file(*fs, dir.path(), "f", "two");
  fs->open(dir / "f.tmp", OpenMode::kCreateMeta)->pwrite("stale", 5, 0);  // left by a crashed process
  publish_file(*fs, dir.path(), "f", "three");
  CHECK_EQ(read_whole(*fs, dir / "f"), "three");

  g_errno = ENOSPC;
  for (const PosixCalls& calls : {PosixCalls{failing_pread, failing_pwrite, ::fdatasync, nullptr},
                                  PosixCalls{failing_pread, ::pwrite, failing_fdatasync, nullptr}}) {
    auto full = make_posix_fs_on(calls, IoEngine::kPread, 0, 0);
    CHECK_THROWS(DiskFullError, publish_file(*full, dir.path(), "f", "four"));
    CHECK_EQ(read_whole(*fs, dir / "f"), "three");
    CHECK(fs->list(dir.path()) == std::vector<std::string>{"f"});  // no temporary file
  }
}

}  // namespace
}  // namespace thermocline
