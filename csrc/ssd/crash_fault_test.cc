// Power loss: every state that crash.h builds from a recorded run must open at the last commit that returned, or at the
// one in progress, with its note. Every retained epoch must open too, and the store must be usable afterwards.
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "ssd/store.h"
#include "testing/crash.h"
#include "testing/fault_fs.h"
#include "testing/mem_fs.h"
#include "testing/record_fs.h"
#include "testing/store_driver.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline::testing {
namespace {

constexpr const char* kPath = "/d/store";

struct Run {
  Recording recording;
  std::vector<StoreDriver::Attempt> attempts;
  std::vector<StoreDriver::Checkpoint> checkpoints;
  DriverOptions options;
  uint64_t commits_beside_merges = 0;  // commits while several merges were between writing and installing their files
};

enum class Merging {
  kOne,      // inline, one partition at a time
  kInTurn,   // inline, the files of three partitions are written alternately: depends on the seed only
  kThreads,  // by four background threads
};

struct RunOptions {
  bool put_in_commits =
      false;  // rows are put and deleted between the syncs of every commit, and must not be part of it
  Merging merging = Merging::kOne;
};

// Delays every merge that has written its files and not installed them, until a commit has begun, so that commits find
// several merges in this state.
class MergeDelay {
 public:
  void written() {
    std::unique_lock lock(mutex_);
    most_ = std::max(most_, ++waiting_);
    const uint64_t seen = commits_;
    changed_.wait_for(lock, std::chrono::milliseconds(20), [&] { return commits_ != seen; });
    --waiting_;
  }
  void commit() {
    std::lock_guard lock(mutex_);
    ++commits_;
    if (waiting_ > 1) ++commits_beside_several_;
    changed_.notify_all();
  }
  uint64_t commits_beside_several() const { return commits_beside_several_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0, most_ = 0;
  uint64_t commits_ = 0, commits_beside_several_ = 0;
};

Run record_run(uint64_t seed, int steps, const RunOptions& how = {}) {
  auto mem = std::make_shared<MemFs>();
  mem->make_dir("/d");
  auto fs = std::make_shared<RecordFs>(mem);
  auto hooked = std::make_shared<FaultFs>(fs);
  Run run;
  run.options = DriverOptions(seed);
  DriverOptions recorded = run.options;
  if (how.merging != Merging::kOne) {
    recorded.store.merge_threads = how.merging == Merging::kInTurn ? 3 : 4;
    recorded.store.partition_bytes = 16u << 10;
    recorded.store.background_merge = how.merging == Merging::kThreads;
  }
  StoreDriver driver(hooked, kPath, recorded);
  bool committing = false, first_of_two = false;
  MergeDelay delay;
  driver.on_event = [&](const std::string& text) {
    fs->marker(text);
    committing = text.starts_with("begin");
  };
  if (how.merging == Merging::kThreads) {
    hooked->on_point([&](std::string_view point) {
      if (point == "merge.written") delay.written();
      if (point == "commit.flushed") delay.commit();
    });
  }
  if (how.put_in_commits) {
    hooked->on_point([&](std::string_view point) {
      const bool after_snapshot = point == "commit.file_synced" || point == "commit.synced" ||
                                  point == "publish.written" || point == "commit.published";
      if (!committing || !after_snapshot || (first_of_two && point != "commit.file_synced")) return;
      committing = false;  // the hook does not run inside itself
      std::thread([&] {    // this one has the lock of its commit(), which is not taken twice
        driver.put(point == "publish.written" ? 20 : 400);
        driver.erase(5);
      })
          .join();
      committing = true;
    });
  }
  driver.open();
  for (int i = 0; i < steps; ++i) {
    driver.step();
    if (!how.put_in_commits || i % 10 != 0) continue;
    first_of_two = true;  // the second commit has only the rows put during the first one's syncs
    driver.commit();
    first_of_two = false;
    driver.commit();
  }
  driver.close();
  run.commits_beside_merges = delay.commits_beside_several();
  run.recording = fs->recording();
  run.attempts = driver.attempts();
  run.checkpoints = driver.checkpoints();
  return run;
}

// The commits that the caller of the store had seen at the crash.
struct Known {
  std::vector<StoreDriver::Attempt> attempts;
  std::vector<StoreDriver::Checkpoint> checkpoints;
};

Known known_at(const Run& run, size_t prefix, std::vector<StoreDriver::Attempt> before = {}) {
  Known known{std::move(before), {}};
  for (size_t i = 0; i < prefix; ++i) {
    const RecordedOp& op = run.recording.ops[i];
    if (op.kind != OpKind::kMarker) continue;
    std::istringstream in(op.path);
    std::string what;
    size_t n = 0;
    in >> what >> n;
    if (what == "begin") known.attempts.push_back({run.attempts[n].state, 0, false});
    if (what == "end") known.attempts[n].epoch = run.attempts[n].epoch;
    if (what == "release") known.attempts[n].releasing = true;
    if (what == "link") known.checkpoints.push_back({run.checkpoints[n].path, run.checkpoints[n].attempt, false});
    if (what == "linked") known.checkpoints[n].done = true;
  }
  return known;
}

int verify_all(std::shared_ptr<FileSystem> fs, const Run& run, const Known& known, const std::string& context) {
  for (const auto& checkpoint : known.checkpoints) {
    verify_checkpoint(fs, run.options, checkpoint, run.attempts[checkpoint.attempt].state, context);
  }
  return verify_recovered(fs, kPath, run.options, known.attempts, context);
}

// The number of base files that were begun while another one was being written.
uint64_t interleaved_bases(const Recording& recording) {
  std::map<uint32_t, size_t> last_write;  // by file
  for (size_t i = 0; i < recording.ops.size(); ++i) {
    const RecordedOp& op = recording.ops[i];
    if (op.kind == OpKind::kWrite && op.path.find("/base-") != std::string::npos) last_write[op.file] = i;
  }
  uint64_t count = 0;
  std::set<size_t> open;  // last writes of the files begun so far
  for (size_t i = 0; i < recording.ops.size(); ++i) {
    const RecordedOp& op = recording.ops[i];
    if (op.kind != OpKind::kCreate || !last_write.contains(op.file)) continue;
    open.erase(open.begin(), open.lower_bound(i));
    count += !open.empty();
    open.insert(last_write[op.file]);
  }
  return count;
}

// Continues after recovery, with a second crash if `again`.
void use_recovered(std::shared_ptr<MemFs> mem, const Run& run, std::vector<StoreDriver::Attempt> known, bool again,
                   const std::string& context) {
  DriverOptions options = run.options;
  options.seed = run.options.seed * 31 + known.size();
  auto fs = std::make_shared<RecordFs>(mem);
  StoreDriver driver(fs, kPath, options);
  driver.on_event = [&](const std::string& text) { fs->marker(text); };
  driver.resume(std::move(known));
  driver.open();
  const std::vector<StoreDriver::Attempt> before = driver.attempts();
  for (int i = 0; i < 4; ++i) {
    driver.put(200);
    driver.commit();
  }
  driver.release_one();
  driver.check_all();
  driver.close();
  driver.open();
  driver.check_all();
  driver.close();
  if (!again) return;
  Run second{fs->recording(), driver.attempts(), driver.checkpoints(), options};
  for_each_crash(second.recording, options.seed, 12, [&](CrashState& state) {
    verify_all(state.fs, second, known_at(second, state.prefix, before), context + "; then again " + state.what);
  });
}

void replay(uint64_t runs, uint64_t states_per_run, int steps, const RunOptions& how = {}) {
  uint64_t done = 0, states = 0, in_flight = 0, commits = 0, operations = 0, interleaved = 0, beside_merges = 0;
  for (uint64_t seed = 1; seed <= runs; ++seed) {
    if (!in_part(seed)) continue;
    ++done;
    const Run run = record_run(seed, steps, how);
    interleaved += interleaved_bases(run.recording);
    beside_merges += run.commits_beside_merges;
    operations += run.recording.ops.size();
    commits += run.attempts.size();
    for_each_crash(run.recording, seed, states_per_run, [&](CrashState& state) {
      const std::string context = "seed " + std::to_string(seed) + ": crash " + state.what;
      const Known known = known_at(run, state.prefix);
      try {
        const int found = verify_all(state.fs, run, known, context);
        in_flight += found >= 0 && known.attempts[found].epoch == 0;
        if (++states % 4 == 0) use_recovered(state.fs, run, known.attempts, states % 40 == 0, context);
      } catch (const std::runtime_error& e) {
        throw Failure(context + ": " + e.what());
      }
    });
  }
  std::printf("[%llu crash states of %llu operations, %llu commits; %llu found a commit in progress] ",
              (unsigned long long)states, (unsigned long long)operations, (unsigned long long)commits,
              (unsigned long long)in_flight);
  if (how.merging == Merging::kOne) return;
  std::printf("[%llu base files were written while another was open, %llu commits beside several merges] ",
              (unsigned long long)interleaved, (unsigned long long)beside_merges);
  if (how.merging == Merging::kInTurn) CHECK(interleaved > 4 * done);
  if (how.merging == Merging::kThreads) CHECK(beside_merges > 0);
}

TEST(StoreCrash, SomeStatesOfAPowerLoss) { replay(2, 100, 120); }
TEST(StoreCrash, SomeStatesWithPutsBetweenTheSyncsOfACommit) { replay(2, 100, 100, {.put_in_commits = true}); }
TEST(StoreCrash, SomeStatesWithMergesInTurn) { replay(2, 100, 80, {.merging = Merging::kInTurn}); }
TEST(StoreCrash, SomeStatesWithMergeThreads) { replay(2, 100, 80, {.merging = Merging::kThreads}); }
TEST(FaultsCrash, ReplayOfRecordedOperations) { replay(scaled(10, 50), scaled(200, 400), 150); }
TEST(FaultsCrash, ReplayWithPutsBetweenTheSyncsOfACommit) {
  replay(scaled(10, 50), scaled(100, 400), 120, {.put_in_commits = true});
}
TEST(FaultsCrash, ReplayWithMergesInTurn) {
  replay(scaled(10, 50), scaled(200, 400), 120, {.merging = Merging::kInTurn});
}
TEST(FaultsCrash, ReplayWithMergeThreads) {
  replay(scaled(10, 50), scaled(200, 400), 120, {.merging = Merging::kThreads});
}

// After a process is killed, its operations are in the page cache: open may find the commit in progress. A later power
// loss must not lose a commit that open returned.
void kill_then_power_loss(uint64_t runs, size_t stride) {
  uint64_t states = 0;
  for (uint64_t seed = 1; seed <= runs; ++seed) {
    if (!in_part(seed)) continue;
    const Run run = record_run(seed, 100);
    for (size_t prefix = seed % stride; prefix <= run.recording.ops.size(); prefix += stride) {
      auto mem = run.recording.start->clone();
      auto fs = std::make_shared<RecordFs>(mem);
      fs->repeat(run.recording, prefix);
      const std::string context =
          "seed " + std::to_string(seed) + ": killed after " + std::to_string(prefix) + " operations";
      StoreDriver driver(fs, kPath, run.options);
      driver.resume(known_at(run, prefix).attempts);
      try {
        driver.open();  // records the commit found as one that returned
        driver.close();
        for_each_crash(
            fs->recording(), prefix, 14,
            [&](CrashState& state) {
              verify_recovered(state.fs, kPath, run.options, driver.attempts(),
                               context + ", opened, then " + state.what);
              ++states;
            },
            fs->size());
      } catch (const std::runtime_error& e) {
        throw Failure(context + ": " + e.what());
      }
    }
  }
  std::printf("[%llu states] ", (unsigned long long)states);
}

TEST(StoreCrash, KilledThenPowerLoss) { kill_then_power_loss(1, 5); }
TEST(FaultsCrash, KilledThenPowerLoss) { kill_then_power_loss(scaled(6, 20), scaled(3, 1)); }

// The replay covers processes killed at a failpoint. Here every failpoint must be called, and an exception at each must
// not damage the running store.
TEST(FaultsCrash, FailpointsAreCalledAndMayThrow) {
  auto run = [&](const std::string& stop_at, uint64_t nth, std::map<std::string, uint64_t>* points) {
    auto mem = std::make_shared<MemFs>();
    mem->make_dir("/d");
    auto fs = std::make_shared<FaultFs>(mem);
    const DriverOptions options(7);
    StoreDriver driver(fs, kPath, options);
    uint64_t seen = 0;
    fs->on_point([&](std::string_view point) {
      if (point == stop_at && ++seen == nth) throw IoError("stopped at " + std::string(point), 5);
    });
    for (int i = 0; i < 150; ++i) {
      try {
        if (!driver.is_open()) driver.open();
        driver.step();
      } catch (const ReadOnlyError&) {
        driver.close();  // the store is read-only: open it again
      } catch (const IoError&) {
      }
    }
    fs->on_point(nullptr);
    driver.close();
    verify_recovered(mem, kPath, options, driver.attempts(), "stopped at " + stop_at + " " + std::to_string(nth));
    if (points) *points = fs->points();
  };
  std::map<std::string, uint64_t> points;
  run("", 0, &points);
  std::printf("[%zu points] ", points.size());
  CHECK(points.size() >= 20);
  for (const auto& [point, count] : points) {
    for (uint64_t nth : {uint64_t{1}, count / 2 + 1, count}) run(point, nth, nullptr);
  }
}

}  // namespace
}  // namespace thermocline::testing
