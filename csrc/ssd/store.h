// The SSD tier: rows by 64-bit key in files, larger than memory, crash-safe. Start here; docs/formats.md has the bytes.
//
// A store is hash-ordered immutable base files plus a log of newer rows (the delta). put() appends to the log and
// notes the page of each row in DRAM; get() reads the one page of each key, from the log or from a base; a background
// thread merges the log into the bases, oldest first. commit() syncs and publishes one manifest: the durable point.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "util/fs.h"
#include "util/row_store.h"

namespace thermocline {

struct StoreOptions {
  // Behaviour.
  size_t row_bytes = 0;           // 0: whatever the store has (not with create)
  bool create = false;            // make an empty store where there is none
  bool read_only = false;         // takes no lock, changes nothing
  std::optional<uint64_t> epoch;  // default: the newest
  // Performance.
  size_t mem_budget = 256u << 20;
  double max_log_ratio = 0.2;  // log bytes kept, as a share of base bytes, before merging starts
  uint32_t filter_bits = 0;    // DRAM bits per row that spare reads of keys never put: 10 spare 99 in 100; 0: none
  size_t write_buffer = 0;     // 0: from mem_budget
  size_t segment_bytes = 64u << 20;
  size_t partition_bytes = 32u << 20;  // a base file splits above this
  size_t min_log_bytes = 64u << 20;    // no merging below this much log
  bool background_merge = true;        // false: merging happens inside put() and commit(), deterministic (tests)
};

struct StoreStats {
  uint64_t epoch = 0, rows_in_base = 0, rows_in_log = 0;  // the log counts every version of a row
  uint64_t disk_bytes = 0, live_files = 0, partitions = 0, log_bytes = 0, base_bytes = 0;
  uint64_t mem_index = 0, mem_buffers = 0, mem_total = 0, mem_budget = 0;
  uint64_t keys_read = 0, pages_read = 0, reads = 0, bytes_read = 0, false_pages = 0;
  uint64_t bytes_put = 0, bytes_written = 0;  // put: rows and keys given by the user; written: everything to disk
  uint64_t merges = 0, merge_bytes_read = 0, merge_bytes_written = 0;
  double stall_seconds = 0;                   // put() waiting for the merger
  double read_cost_us = 0, page_cost_us = 0;  // the device, as measured
  std::string engine;
  std::string damage;  // a bad page met while merging; empty: none
};

class SsdStore : public RowStore {
 public:
  static std::unique_ptr<SsdStore> open(std::shared_ptr<FileSystem> fs, const std::string& path,
                                        const StoreOptions& options);
  ~SsdStore() override;  // closes; what was not committed is gone at the next open

  size_t row_bytes() const override;
  void get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) override;
  void put(const uint64_t* keys, size_t n, RowsIn rows) override;
  void erase(const uint64_t* keys, size_t n);
  // As put(), for bulk: where the store has no row between the least and the greatest hash of these keys, they become
  // base files at once, with no log and no merging after. Pieces of ascending hash ranges fill a store that way.
  void load(const uint64_t* keys, size_t n, RowsIn rows);

  // Everything put so far becomes durable, together with the note. Returns the new epoch.
  uint64_t commit(const std::string& note);
  uint64_t epoch() const;                // 0: nothing committed yet
  std::string note() const;              // of epoch()
  std::vector<uint64_t> epochs() const;  // retained, oldest first
  void release(uint64_t epoch);          // not the newest

  // Every live row once, in hash order, in bounded memory. Sees the store as it was when the scan began.
  class Scan {
   public:
    virtual ~Scan() = default;
    virtual size_t next(size_t max_rows, uint64_t* keys, uint8_t* rows) = 0;  // 0: done
  };
  std::unique_ptr<Scan> scan();

  uint64_t count();  // live rows, exact; reads what the log has overwritten
  StoreStats stats() const;
  void check();                                   // verifies every byte and every book; throws CorruptionError or Error
  void merge_all();                               // merges the whole log into the bases now
  void link_checkpoint(const std::string& path);  // the commit epoch() as hard links in a new folder
  void close();
  // Benchmarks: seconds that the page reads of such a get() take by themselves.
  double read_floor(const uint64_t* keys, size_t n);

  class Impl;

 private:
  explicit SsdStore(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;  // shared with scans under way
};

}  // namespace thermocline
