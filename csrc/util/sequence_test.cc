#include "util/sequence.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "testing/test.h"

namespace thermocline {
namespace {

// Sequence numbers shared with a child process.
struct Shared {
  uint64_t* numbers =
      static_cast<uint64_t*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ~Shared() { munmap(numbers, 4096); }
};

TEST(Sequence, TwoProcessesAlternate) {
  Shared shared;
  constexpr uint64_t kTurns = 3000;
  const pid_t child = fork();
  if (child == 0) {
    uint64_t sum = 0;
    for (uint64_t turn = 1; turn <= kTurns; ++turn) {
      if (!wait_sequence(&shared.numbers[0], turn, 20)) _exit(1);
      sum += shared.numbers[2];  // written before the number was published
      shared.numbers[3] = sum;
      publish_sequence(&shared.numbers[1], turn);
    }
    _exit(0);
  }
  uint64_t expected = 0;
  for (uint64_t turn = 1; turn <= kTurns; ++turn) {
    expected += turn * turn;
    shared.numbers[2] = turn * turn;
    publish_sequence(&shared.numbers[0], turn);
    CHECK(wait_sequence(&shared.numbers[1], turn, 20));
    CHECK(shared.numbers[3] == expected);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(Sequence, WaitTimesOutAndSeesEarlierValues) {
  Shared shared;
  const auto begin = std::chrono::steady_clock::now();
  CHECK(!wait_sequence(&shared.numbers[0], 1, 0.05));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  CHECK(took.count() >= 0.05);
  publish_sequence(&shared.numbers[0], (uint64_t{1} << 32) + 5);  // its low half is less than 7
  CHECK(wait_sequence(&shared.numbers[0], 7, 0));
}

}  // namespace
}  // namespace thermocline
