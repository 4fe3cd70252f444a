#include "util/slow_calls.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

#include "util/error.h"
#include "util/hash.h"

namespace thermocline {
namespace {

constexpr uint64_t kMostMicroseconds = 10'000'000;

// Means in microseconds. PosixCalls has plain functions, so that these cannot be members.
std::atomic<uint64_t> read_mean{0}, write_mean{0}, sync_mean{0}, calls{0};

void sleep_about(uint64_t mean) {
  if (mean == 0) return;
  const uint64_t random = mix64(calls.fetch_add(1, std::memory_order_relaxed) + 1);
  std::this_thread::sleep_for(std::chrono::microseconds(random % (2 * mean + 1)));
}

ssize_t slow_pread(int fd, void* buf, size_t bytes, off_t offset) {
  sleep_about(read_mean);
  return ::pread(fd, buf, bytes, offset);
}

ssize_t slow_pwrite(int fd, const void* buf, size_t bytes, off_t offset) {
  sleep_about(write_mean);
  return ::pwrite(fd, buf, bytes, offset);
}

int slow_fdatasync(int fd) {
  sleep_about(sync_mean);
  return ::fdatasync(fd);
}

int32_t slow_uring_result(int32_t result) {
  sleep_about(read_mean);
  return result;
}

}  // namespace

PosixCalls posix_calls_from_env() {
  const char* env = std::getenv("THERMOCLINE_IO_DELAY");
  uint64_t read = 0, write = 0, sync = 0;
  for (std::string_view rest = env ? env : ""; !rest.empty();) {
    const std::string_view part = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    const size_t equals = std::min(part.find('='), part.size());
    const std::string_view name = part.substr(0, equals), number = part.substr(std::min(equals + 1, part.size()));
    uint64_t* mean = name == "read" ? &read : name == "write" ? &write : name == "sync" ? &sync : nullptr;
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    if (!mean || error != std::errc() || end != number.data() + number.size() || value > kMostMicroseconds) {
      throw Error("THERMOCLINE_IO_DELAY=" + std::string(env) + ": use read=N,write=N,sync=N with microseconds up to " +
                  std::to_string(kMostMicroseconds));
    }
    *mean = value;
  }
  read_mean = read;
  write_mean = write;
  sync_mean = sync;
  if (read + write + sync == 0) return real_posix_calls();
  return {slow_pread, slow_pwrite, slow_fdatasync, slow_uring_result, Uring::create};
}

}  // namespace thermocline
