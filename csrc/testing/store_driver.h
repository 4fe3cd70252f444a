// Drives an SsdStore with random operations and knows, at every moment, what it must answer.
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

// A row is a function of (key, version), so that the oracle keeps numbers instead of bytes. Version 0: no row.
void make_row(uint64_t key, uint32_t version, uint8_t* row, size_t bytes);

// Key i of a small universe. Spread over all of 64 bits, with the extremes among them.
uint64_t test_key(uint32_t i);

// What a store holds: a version per key of the universe. A key whose put failed may have either version.
struct Snapshot {
  std::vector<uint32_t> version;
  std::map<uint32_t, std::set<uint32_t>> also;  // other versions that are allowed
  std::string note;
  uint64_t live() const;
};

// Small files, so that merges and splits happen all the time. No background thread: the same seed, the same operations.
StoreOptions small_store();

struct DriverOptions {
  uint32_t keys = 4000;  // size of the universe
  uint32_t max_batch = 600;
  size_t row_bytes = 64;
  uint64_t seed = 1;
  bool reopen = true;  // closing and opening again is one of the operations
  StoreOptions store = small_store();

  DriverOptions() = default;
  // A seed also chooses the size of rows, of the write buffer and of the log, so that every path is taken by some seed.
  explicit DriverOptions(uint64_t seed);
};

// Thread safety: none.
class StoreDriver {
 public:
  StoreDriver(std::shared_ptr<FileSystem> fs, std::string path, const DriverOptions& options);

  void open();   // creates, or goes back to the last commit
  void close();  // what was not committed is gone
  void step();   // one random operation, its answer checked. Errors of the store pass through.

  // The operations, for those who want to choose.
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

  // Every commit that was begun, by its note; notes are unique. An epoch number is known once commit() has returned.
  struct Attempt {
    Snapshot state;
    uint64_t epoch = 0;      // 0: commit() has not returned
    bool releasing = false;  // release() was called
  };
  const std::vector<Attempt>& attempts() const { return attempts_; }
  // Every link_checkpoint that was begun.
  struct Checkpoint {
    std::string path;
    size_t attempt;  // the commit it holds
    bool done = false;
  };
  const std::vector<Checkpoint>& checkpoints() const { return checkpoints_; }
  // Goes on with a store that another driver left. Before open().
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

// Throws Failure unless the store answers every key of the universe as the snapshot says (with scan and count, if
// `thorough`). Errors of the store pass through.
void verify(SsdStore& store, const Snapshot& want, const std::string& context, bool thorough = true);

// Opens the store that a crash left, and checks it whole: it is the last commit that had returned, or a later one that
// had begun; all commits that were not being released can be opened. Returns the index of the commit found, -1: none.
int verify_recovered(std::shared_ptr<FileSystem> fs, const std::string& path, const DriverOptions& options,
                     const std::vector<StoreDriver::Attempt>& attempts, const std::string& context);

// A checkpoint that was finished is there; one that was not is there wholly, or is no store.
void verify_checkpoint(std::shared_ptr<FileSystem> fs, const DriverOptions& options,
                       const StoreDriver::Checkpoint& checkpoint, const Snapshot& want, const std::string& context);

}  // namespace thermocline::testing
