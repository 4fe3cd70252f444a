// Runs random operations on an SsdStore and compares every result with an oracle.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "ssd/store.h"
#include "util/fs.h"

namespace thermocline::testing {

// A row is a function of (key, version): the oracle has versions instead of bytes. Version 0: no row.
void make_row(uint64_t key, uint32_t version, uint8_t* row, size_t bytes);

// Key i of a small universe of keys: 64-bit keys, including the smallest and the largest.
uint64_t test_key(uint32_t i);

// Content of a store: a version per key. After a failed put either version is allowed.
struct Snapshot {
  std::vector<uint32_t> version;
  std::map<uint32_t, std::set<uint32_t>> also;  // other versions that are allowed
  std::string note;
  uint64_t live() const;
};

// Small files, so that merges and splits are frequent. No background thread: operations depend on the seed only.
StoreOptions small_store();

struct DriverOptions {
  uint32_t keys = 4000;  // size of the universe
  uint32_t max_batch = 600;
  size_t row_bytes = 64;
  uint64_t seed = 1;
  bool reopen = true;  // reopening is one of the operations
  StoreOptions store = small_store();

  DriverOptions() = default;
  // The seed also selects the sizes of rows, write buffer and log, so that some seed covers every path.
  explicit DriverOptions(uint64_t seed);
};

// Thread safety: none.
class StoreDriver {
 public:
  StoreDriver(std::shared_ptr<FileSystem> fs, std::string path, const DriverOptions& options);

  void open();   // creates, or opens the last commit
  void close();  // uncommitted rows are lost
  void step();   // one random operation, its result checked; errors of the store are not caught

  // Single operations.
  void put(uint32_t n);
  void erase(uint32_t n);
  void get(uint32_t n);
  void commit();
  void release_one();
  void checkpoint();
  void check_all();  // every key, scan, count and check()

  SsdStore& store() { return *store_; }
  bool is_open() const { return store_ != nullptr; }
  const Snapshot& live() const { return live_; }
  uint64_t key_ops() const { return key_ops_; }

  // Every commit() call, identified by its unique note.
  struct Attempt {
    Snapshot state;
    uint64_t epoch = 0;      // 0: commit() did not return
    bool releasing = false;  // release() was called
  };
  const std::vector<Attempt>& attempts() const { return attempts_; }
  // Every link_checkpoint() call.
  struct Checkpoint {
    std::string path;
    size_t attempt;  // the commit that it copies
    bool done = false;
  };
  const std::vector<Checkpoint>& checkpoints() const { return checkpoints_; }
  // Continues with the store of another driver. Call before open().
  void resume(std::vector<Attempt> attempts);

  // "begin N", "end N", "release N" with the attempt's index, "link N", "linked N" with the checkpoint's.
  std::function<void(const std::string&)> on_event;

 private:
  std::vector<uint32_t> pick(uint32_t n);
  void event(const char* what, size_t attempt);

  const std::shared_ptr<FileSystem> fs_;
  const std::string path_;
  const DriverOptions options_;
  std::mt19937_64 rng_;
  std::unique_ptr<SsdStore> store_;
  Snapshot live_;
  std::vector<Attempt> attempts_;
  std::vector<Checkpoint> checkpoints_;
  uint32_t next_version_ = 1;
  uint64_t key_ops_ = 0;
};

// Throws Failure unless the store has the rows of the snapshot (also by scan and count, if `thorough`). Errors of the
// store are not caught.
void verify(SsdStore& store, const Snapshot& want, const std::string& context, bool thorough = true);

// Opens the store after a crash and checks all of it: it must be at the last commit that returned, or at a later one
// that had started; all commits that were not being released must open. Returns the index of the commit found, or -1.
int verify_recovered(std::shared_ptr<FileSystem> fs, const std::string& path, const DriverOptions& options,
                     const std::vector<StoreDriver::Attempt>& attempts, const std::string& context);

// A finished checkpoint must exist; an unfinished one must be complete, or not be a store.
void verify_checkpoint(std::shared_ptr<FileSystem> fs, const DriverOptions& options,
                       const StoreDriver::Checkpoint& checkpoint, const Snapshot& want, const std::string& context);

}  // namespace thermocline::testing
