// SsdStore on the POSIX file system when the kernel refuses a ring after the first, and when reads fail for a while.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

#include "ssd/store.h"
#include "ssd/store_test_util.h"
#include "testing/test.h"
#include "util/error.h"
#include "util/posix_fs.h"

namespace thermocline {
namespace {

std::atomic<int> g_rings{0}, g_allowed{0};

std::unique_ptr<Uring> counted_ring(unsigned entries) {
  if (++g_rings <= g_allowed) return Uring::create(entries);
  errno = EMFILE;
  return nullptr;
}

TEST(StoreEngine, ThreadsTakeOverFromIoUring) {
  if (!Uring::create(4)) return;  // no io_uring here
  for (int allowed : {1, 2}) {    // 1: only the probe; 2: also the channel of the first worker
    testing::TempDir dir;
    g_rings = 0;
    g_allowed = allowed;
    PosixCalls calls = real_posix_calls();
    calls.make_ring = counted_ring;
    StoreOptions o = small_options();
    auto store = SsdStore::open(make_posix_fs_on(calls, IoEngine::kUring, 2, 16), dir / "a", o);
    CHECK_EQ(store->stats().engine, "io_uring");
    put_range(*store, 0, 20000);
    store->merge_all();
    std::vector<uint64_t> keys;
    for (uint64_t k = 0; k < 20000; ++k) keys.push_back(k);
    std::vector<uint8_t> found(keys.size()), rows(keys.size() * kRow);
    for (int i = 0; i < 20; ++i) {
      std::fill(rows.begin(), rows.end(), 0);
      store->get(keys.data(), keys.size(), found.data(), {rows.data(), kRow});
      for (uint64_t k = 0; k < keys.size(); ++k) CHECK(found[k] && std::memcmp(&rows[k * kRow], &k, 8) == 0);
    }
    if (allowed == 2 && g_rings <= allowed) continue;  // one worker served all reads
    CHECK_EQ(store->stats().engine, "pread");
    CHECK_EQ(store->take_warnings().size(), 1u);
  }
}

std::atomic<int> g_failing{0};  // reads that fail from now on

ssize_t failing_pread(int fd, void* buf, size_t bytes, off_t offset) {
  if (g_failing > 0) {
    --g_failing;
    errno = EIO;
    return -1;
  }
  return ::pread(fd, buf, bytes, offset);
}

// An error that ends after some repetitions has no effect; one that stays sets the partition aside.
TEST(StoreEngine, TemporaryReadErrorsAreRepeated) {
  for (const bool stays : {false, true}) {
    testing::TempDir dir;
    PosixCalls calls = real_posix_calls();
    calls.pread = failing_pread;
    StoreOptions o = small_options();
    o.background_merge = false;
    auto store = SsdStore::open(make_posix_fs_on(calls, IoEngine::kPread, 2, 1), dir / "a", o);
    put_range(*store, 0, 2000);
    store->merge_all();
    put_range(*store, 0, 100);
    g_failing = stays ? 1 << 20 : 3;
    if (stays) {
      CHECK_THROWS(IoError, store->merge_all());
      g_failing = 0;
      CHECK(store->damage().find("Input/output error") != std::string::npos);
      continue;
    }
    store->merge_all();
    CHECK_EQ(g_failing.load(), 0);
    CHECK(store->damage().empty() && store->take_warnings().empty());
    uint64_t key = 7;
    uint8_t found = 0;
    Row row;
    g_failing = 2;
    store->get(&key, 1, &found, {row.data(), kRow});
    CHECK(found && std::memcmp(row.data(), &key, 8) == 0);
    CHECK_EQ(g_failing.load(), 0);
  }
}

}  // namespace
}  // namespace thermocline
