// The i-th disk operation fails: the error is reported, no later result is wrong, and the store reopens at the last
// commit that returned, or at the one in progress.
#include <cstdio>

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

struct Kind {
  const char* name;
  Fault fault;
  unsigned ops;
};
constexpr Kind kKinds[] = {
    {"EIO anywhere", Fault::kIoError, kAllOps},        {"EIO in a read", Fault::kIoError, kReads},
    {"EIO in a sync", Fault::kIoError, kSyncs},        {"full disk", Fault::kDiskFull, kWrites | kNames},
    {"short read", Fault::kShortRead, kReads},         {"torn write", Fault::kTornWrite, kWrites},
    {"name operation fails", Fault::kIoError, kNames}, {"full disk at sync", Fault::kDiskFull, kSyncs},
};

std::shared_ptr<MemFs> new_mem_fs() {
  auto mem = std::make_shared<MemFs>();
  mem->make_dir("/d");
  return mem;
}

struct Bench {
  std::shared_ptr<MemFs> mem = new_mem_fs();
  std::shared_ptr<RecordFs> record = std::make_shared<RecordFs>(mem);
  std::shared_ptr<FaultFs> fs = std::make_shared<FaultFs>(record);
};

constexpr int kSteps = 100;

// Number of operations of these classes in the workload without a fault.
uint64_t count_ops(unsigned ops, uint64_t seed) {
  Bench b;
  const DriverOptions options(seed);
  b.fs->arm({.ops = ops, .at = UINT64_MAX});
  StoreDriver driver(b.fs, kPath, options);
  driver.open();
  for (int i = 0; i < kSteps; ++i) driver.step();
  driver.close();
  return b.fs->seen();
}

// Runs one case. Returns the number of exceptions.
int run_case(const Kind& kind, uint64_t at, bool for_good, bool background, uint64_t seed) {
  const std::string context = std::string(kind.name) + ", operation " + std::to_string(at) +
                              (for_good ? " and all after" : "") + (background ? ", merging in the background" : "") +
                              ", seed " + std::to_string(seed);
  Bench b;
  DriverOptions options(seed);
  options.store.background_merge = background;
  b.fs->arm({.fault = kind.fault, .ops = kind.ops, .at = at, .for_good = for_good});
  StoreDriver driver(b.fs, kPath, options);
  driver.on_event = [&](const std::string& text) { b.record->marker(text); };
  int errors = 0;
  bool read_only = false;
  try {
    for (int i = 0; i < kSteps; ++i) {
      const uint64_t fired = b.fs->fired();
      try {
        if (!driver.is_open()) {
          driver.open();
          read_only = false;
        }
        driver.step();
      } catch (const ReadOnlyError&) {
        if (b.fs->fired() == 0) throw;
        read_only = true;
        ++errors;
      } catch (const Error& e) {
        if (b.fs->fired() == 0) throw;  // not injected
        ++errors;
        if (dynamic_cast<const CorruptionError*>(&e) && kind.fault != Fault::kShortRead) {
          throw Failure(context + ": an I/O error was reported as corruption: " + e.what());
        }
      }
      // A read-only store still reads, without wrong rows.
      if (read_only && driver.is_open() && b.fs->fired() == fired && !for_good) driver.get(100);
      if (read_only && i % 10 == 9) driver.close();
      if (for_good && b.fs->fired() > 20) b.fs->disarm();  // as if the disk was replaced or space was freed
    }
    b.fs->disarm();
    driver.close();
    // With the current files, and after a power loss that drops unsynced changes.
    verify_recovered(b.mem->clone(), kPath, options, driver.attempts(), context);
    const Recording recording = b.record->recording();
    auto check = [&](CrashState& state) {
      verify_recovered(state.fs, kPath, options, driver.attempts(), context + "; then power loss " + state.what);
    };
    for_each_crash(recording, seed + at, 14, check, recording.ops.size());
  } catch (const std::runtime_error& e) {
    throw Failure(context + ": " + e.what());
  }
  return errors;
}

void cases(uint64_t n) {
  uint64_t done = 0, errors = 0;
  std::map<std::pair<unsigned, uint64_t>, uint64_t> totals;
  for (uint64_t i = 0; i < n; ++i) {
    if (!in_part(i / std::size(kKinds))) continue;
    const Kind& kind = kKinds[i % std::size(kKinds)];
    const uint64_t seed = 1 + i / std::size(kKinds) % 5;
    uint64_t& total = totals[{kind.ops, seed}];
    if (total == 0) total = count_ops(kind.ops, seed);
    const uint64_t at = (i / std::size(kKinds)) * 7919 % total;
    errors += uint64_t(run_case(kind, at, i / 3 % 2, i / 5 % 4 == 3, seed) > 0);
    ++done;
  }
  std::printf("[%llu cases, %llu surfaced as errors] ", (unsigned long long)done, (unsigned long long)errors);
}

TEST(StoreIo, SomeOperationsFail) { cases(48); }
TEST(FaultsIo, TheIthOperationFails) { cases(scaled(500, 20000)); }

// A failed sync is not retried: the kernel may have dropped the pages and would report success.
TEST(StoreIo, FailedSyncMakesTheStoreReadOnly) {
  for (uint64_t at = 0;; ++at) {
    Bench b;
    DriverOptions options;
    options.reopen = false;
    StoreDriver driver(b.fs, kPath, options);
    driver.open();
    driver.put(300);
    driver.commit();
    driver.put(300);
    b.fs->arm({.fault = Fault::kIoError, .ops = kSyncs, .at = at});
    try {
      driver.commit();
    } catch (const ReadOnlyError&) {
    }
    if (b.fs->fired() == 0) {
      CHECK(at >= 3);  // data, folder, manifest and folder again were synced
      break;
    }
    CHECK(driver.attempts().back().epoch == 0);  // commit() did not return
    b.fs->disarm();
    CHECK_THROWS(ReadOnlyError, driver.put(1));
    CHECK_THROWS(ReadOnlyError, driver.erase(1));
    CHECK_THROWS(ReadOnlyError, driver.commit());
    driver.get(300);
    verify(driver.store(), driver.live(), "read-only after a failed sync");
    driver.close();
    driver.open();  // the last commit that returned
    driver.check_all();
    driver.put(100);
    driver.commit();
  }
}

// With a full disk all rows stay readable; after space is freed the same store continues.
TEST(StoreIo, FullDiskRecoversInPlace) {
  for (uint64_t at = 0; at < 12; ++at) {
    Bench b;
    DriverOptions options(at);
    options.reopen = false;
    StoreDriver driver(b.fs, kPath, options);
    driver.open();
    for (int i = 0; i < 10; ++i) driver.put(300);
    driver.commit();
    b.fs->arm({.fault = Fault::kDiskFull, .ops = kWrites | kNames, .at = at, .for_good = true});
    int full = 0;
    for (int i = 0; i < 30; ++i) {
      try {
        if (i % 3 == 2) driver.commit();
        else driver.put(300);
      } catch (const DiskFullError&) {
        ++full;
      }
      driver.get(300);
    }
    CHECK(full > 0);
    b.fs->disarm();
    driver.put(300);
    driver.commit();
    driver.check_all();
    driver.close();
    driver.open();
    driver.check_all();
  }
}

// A bit that flips during a read is detected.
TEST(StoreIo, FlippedBitsOfReadsAreDetected) {
  Bench b;
  DriverOptions options;
  StoreDriver driver(b.fs, kPath, options);
  driver.open();
  for (int i = 0; i < 20; ++i) driver.put(300);
  driver.commit();
  std::mt19937_64 rng(4);
  uint64_t caught = 0, fired = 0;
  for (uint64_t i = 0; i < scaled(300, 20000); ++i) {
    b.fs->arm({.fault = Fault::kFlip, .ops = kReads, .at = rng() % 4, .bit = rng()});
    try {
      driver.get(200);
    } catch (const CorruptionError&) {
      ++caught;
    }
    fired += b.fs->fired();
    b.fs->disarm();
  }
  driver.check_all();  // no lasting effect
  CHECK(fired > 100);
  std::printf("[%llu flips, %llu caught, the rest in bytes that were read along] ", (unsigned long long)fired,
              (unsigned long long)caught);
}

}  // namespace
}  // namespace thermocline::testing
