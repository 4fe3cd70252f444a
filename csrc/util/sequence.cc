#include "util/sequence.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <climits>

namespace thermocline {
namespace {

static_assert(std::endian::native == std::endian::little);  // the futex is the low half of the number
constexpr int kSpins = 200;                                 // a few microseconds: enough for ranks that run in step

uint32_t* low_half(uint64_t* sequence) { return reinterpret_cast<uint32_t*>(sequence); }

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void publish_sequence(uint64_t* sequence, uint64_t value) {
  std::atomic_ref<uint64_t>(*sequence).store(value, std::memory_order_release);
  syscall(SYS_futex, low_half(sequence), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool wait_sequence(uint64_t* sequence, uint64_t value, double seconds) {
  using Clock = std::chrono::steady_clock;
  const std::atomic_ref<uint64_t> shared(*sequence);
  for (int i = 0; i < kSpins; ++i) {
    if (shared.load(std::memory_order_acquire) >= value) return true;
    pause_briefly();
  }
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (true) {
    const uint64_t now = shared.load(std::memory_order_acquire);
    if (now >= value) return true;
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    if (left <= 0) return false;
    timespec limit{.tv_sec = static_cast<time_t>(left), .tv_nsec = 0};
    limit.tv_nsec = static_cast<long>((left - static_cast<double>(limit.tv_sec)) * 1e9);
    syscall(SYS_futex, low_half(sequence), FUTEX_WAIT, static_cast<uint32_t>(now), &limit, nullptr, 0);
  }
}

}  // namespace thermocline
