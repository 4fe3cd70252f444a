// SsdStore on the POSIX file system when the kernel refuses a ring after the first.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

#include "ssd/store.h"
#include "ssd/store_test_util.h"
#include "testing/test.h"
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

}  // namespace
}  // namespace thermocline
