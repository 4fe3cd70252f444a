// THERMOCLINE_IO_DELAY: reads of both engines, writes and syncs take longer, with the same bytes.
#include "util/slow_calls.h"

#include <chrono>
#include <cstdlib>

#include "testing/test.h"
#include "util/error.h"
#include "util/posix_test_util.h"

namespace thermocline {
namespace {

using testing::TempDir;

class Delay {
 public:
  explicit Delay(const char* text) { ::setenv("THERMOCLINE_IO_DELAY", text, 1); }
  ~Delay() {
    ::unsetenv("THERMOCLINE_IO_DELAY");
    posix_calls_from_env();
  }
};

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(SlowCalls, AddLatencyToReadsWritesAndSyncs) {
  TempDir dir;
  write_pages(*make_posix_fs(), dir / "data", 16);
  // 16 calls of 0 to 10 ms: below 20 ms by chance once in more than ten million times.
  for (IoEngine engine : engines()) {
    const Delay delay("read=5000");
    auto fs = make_posix_fs(engine);
    auto file = fs->open(dir / "data", OpenMode::kRead);
    Buffer b(16 * kSector);
    CHECK(seconds_of([&] {
            auto queue = fs->read_queue(16);
            for (uint64_t i = 0; i < 16; ++i) {
              queue->submit({file.get(), i * kSector, uint32_t(kSector), b.p + i * kSector}, i);
              queue->wait();
            }
          }) > 0.02);
    CHECK(filled(b.p, b.bytes, 0));
  }
  const Delay delay("write=2000,sync=5000");
  auto fs = make_posix_fs();
  const double written = seconds_of([&] {
    for (int i = 0; i < 16; ++i) write_pages(*fs, dir / std::to_string(i), 1);
  });
  CHECK(written > 0.03);
}

TEST(SlowCalls, WithoutTheVariableCallsAreTheRealOnes) {
  CHECK(posix_calls_from_env().pread == real_posix_calls().pread);
  const Delay zero("read=0");
  CHECK(posix_calls_from_env().fdatasync == real_posix_calls().fdatasync);
}

TEST(SlowCalls, OtherTextIsAnError) {
  for (const char* wrong : {"5", "read", "read=", "read=x", "read=-1", "seek=5", "read=5;sync=5", "sync=10000001"}) {
    const Delay delay("");
    ::setenv("THERMOCLINE_IO_DELAY", wrong, 1);
    CHECK(contains(message<Error>([] { make_posix_fs(); }), "use read=N,write=N,sync=N"));
  }
}

}  // namespace
}  // namespace thermocline
