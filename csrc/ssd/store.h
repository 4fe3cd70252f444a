// The SSD tier: a crash-safe store of rows by 64-bit key, larger than memory. Start here; docs/formats.md describes the
// files.
//
// A store is a set of hash-ordered immutable base files and a log of newer rows (the delta). put() appends to the log
// and keeps the page of each row in DRAM. get() reads one page per key, from the log or from a base file. Background
// threads merge the log into the base files. commit() syncs the files and publishes one manifest: this makes rows
// durable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "util/fs.h"
#include "util/hash.h"
#include "util/row_store.h"

namespace thermocline {

struct StoreOptions {
  // Behaviour.
  size_t row_bytes = 0;           // 0: that of the existing store (not with create)
  bool create = false;            // create an empty store if there is none
  bool read_only = false;         // no lock, no changes
  std::optional<uint64_t> epoch;  // default: the newest
  // Performance.
  size_t mem_budget = 256u << 20;
  uint64_t expected_rows = 0;  // refuse to open if mem_budget cannot hold the index of this number; 0: unknown
  double max_log_ratio = 0.2;  // maximum of log bytes / base bytes
  // DRAM bits per row of a filter that avoids reads of absent keys: 10 avoid 99 %; 0: none. Given up, with a warning,
  // when mem_budget is short.
  uint32_t filter_bits = 0;
  size_t write_buffer = 0;  // 0: derived from mem_budget
  size_t segment_bytes = 64u << 20;
  size_t partition_bytes = 32u << 20;  // a base file splits above this
  size_t min_log_bytes = 64u << 20;    // no merging while the log is shorter
  bool background_merge = true;        // false: put() and commit() merge inline, which is deterministic (tests)
  int merge_threads = 0;               // partitions merged at once; 0: the number of cores, 2 to 8; 1 if inline
};

struct StoreStats {
  uint64_t epoch = 0, rows_in_base = 0, rows_in_log = 0;  // rows_in_log counts every version of a row
  uint64_t waiting_deletions = 0;                         // of rows_in_log: not in the write buffer yet
  uint64_t disk_bytes = 0, live_files = 0, partitions = 0, log_bytes = 0, base_bytes = 0;
  uint64_t mem_index = 0, mem_buffers = 0, mem_total = 0, mem_budget = 0;
  uint64_t mem_spare = 0;  // what the log and merges leave of the budget
  uint64_t keys_read = 0, pages_read = 0, reads = 0, bytes_read = 0, false_pages = 0;
  uint64_t get_scratch_peak = 0;              // working memory of one get(), the largest so far; not part of mem_total
  uint64_t bytes_put = 0, bytes_written = 0;  // bytes_put: keys and rows of put(); bytes_written: all writes to disk
  uint64_t merges = 0, merge_bytes_read = 0, merge_bytes_written = 0;
  uint64_t merge_threads = 0, merges_running = 0;
  double merge_seconds = 0;                   // of all merging threads together, without pauses
  double stall_seconds = 0;                   // time that put() was blocked by the merger
  double read_cost_us = 0, page_cost_us = 0;  // measured on the device
  std::string engine;
  // Partitions that a merge could not read are set aside: not merged any more, while the others are. `damage` is the
  // error of the first one, with the repair command; empty: none. Their log is copied forward and bounded; above the
  // bound put() throws.
  std::string damage;
  uint64_t damaged_partitions = 0;
  uint64_t set_aside_log_bytes = 0;  // log that only they need
  uint64_t set_aside_log_bound = 0;
  bool filter_given_up = false;
};

// Identifies the rows of a store at one moment. Rows that differ belong to different positions, over reopening at
// earlier epochs too: every process writes segments of its own, and their nonces are random.
struct StorePosition {
  uint64_t store_id[2] = {0, 0};
  uint64_t seq = 0;         // of the newest extent
  uint64_t nonce = 0;       // of its segment
  uint64_t first_page = 0;  // of the extent; 0: it is not in the log, so that changes_since() cannot start here
};

// Thread safety: all calls may run concurrently. Writes (put, load, merge_all, check) run one at a time; get(), erase()
// and scans run beside them and are never blocked by their I/O. commit() blocks writes only while it appends buffered
// rows to the log; writes and reads run beside its syncs. Invariants: 1. A get() that starts after a put() returned
// sees its rows. 2. After a crash the store opens at the last commit that returned, or at a later one that had started.
// 3. Memory stays within mem_budget.
class SsdStore : public RowStore {
 public:
  static std::unique_ptr<SsdStore> open(std::shared_ptr<FileSystem> fs, const std::string& path,
                                        const StoreOptions& options);
  ~SsdStore() override;  // closes; rows that are not committed are lost

  size_t row_bytes() const override;
  // Reads up to 2^32 keys, streamed in hash order. Working memory: 4 bytes per key, and a fixed amount per thread
  // (StoreStats::get_scratch_peak). A damaged page throws if it may have one of the keys.
  void get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) override;
  void put(const uint64_t* keys, size_t n, RowsIn rows) override;
  // Waits for no put(), unless many deletions wait for the next put() or commit().
  void erase(const uint64_t* keys, size_t n);
  // put() for bulk loading: if the store has no row between the least and the greatest hash of the keys, the rows are
  // written to base files directly, without log and merging. Use it for batches of ascending hash ranges.
  void load(const uint64_t* keys, size_t n, RowsIn rows);

  // Makes all rows put so far durable, together with the note. Returns the new epoch.
  uint64_t commit(const std::string& note);
  uint64_t epoch() const;                // 0: no commit yet
  std::string note() const;              // of epoch()
  std::vector<uint64_t> epochs() const;  // retained, oldest first
  void release(uint64_t epoch);          // any but the newest

  // Iterates over the live rows with bounded memory. A scan is a snapshot of the store at its start. Of all rows: in
  // hash order, after buffered rows were appended to the log. Of a range: in any order, writes nothing, copies the
  // buffered rows of the range, and reads only the pages that have rows of it.
  class Scan {
   public:
    virtual ~Scan() = default;
    // Copies rows without their first `skip` bytes. 0: end.
    virtual size_t next(size_t max_rows, uint64_t* keys, uint8_t* rows, size_t skip = 0) = 0;
    // Gives, for a scan that follows its range, the keys of `part`, a part of it, that were put or deleted since the
    // scan began, each once, with its newest row. Returns their number; writes nothing if that is more than `max`. Of a
    // put() that runs meanwhile, some rows may be missing. nullopt: too many rows have changed to be kept.
    virtual std::optional<size_t> changed(KeyRange part, size_t max, uint64_t* keys, uint8_t* rows,
                                          uint8_t* deleted) = 0;
    virtual bool lost() const = 0;  // changed() gives nullopt from now on
  };
  std::unique_ptr<Scan> scan(KeyRange range = {});
  // A scan that keeps a copy of the rows of its range that change until it is deleted. It is in hash order, with
  // several reads in flight; rows that are buffered when it begins count as changed. Its memory is in
  // StoreStats::mem_buffers, with what its caller keeps of it: `kept` bytes, and `buffers` bytes until next() has
  // returned 0. All such scans together take at most StoreStats::mem_spare: null, if one would begin with more than
  // half of what is left of it; lost(), if the changes need more.
  std::unique_ptr<Scan> follow(KeyRange range, uint64_t kept = 0, uint64_t buffers = 0);

  // The position of all rows put so far.
  StorePosition position();
  // Iterates in hash order over the keys that were put or deleted after `since`, each once, with its newest row. Reads
  // only the log. Rows put again with the same bytes are included.
  class Changes {
   public:
    virtual ~Changes() = default;
    // rows[i] is not written if deleted[i] is 1. 0: end.
    virtual size_t next(size_t max_rows, uint64_t* keys, uint8_t* rows, uint8_t* deleted) = 0;
    virtual uint64_t rows() const = 0;  // in the log after `since`; every version of a row counts
  };
  // Null: the log does not reach back to `since`, or `since` is of another store or was undone by reopening at
  // an earlier epoch; `cause` then says which.
  std::unique_ptr<Changes> changes_since(const StorePosition& since, std::string* cause);

  // Keeps the log after `since` on disk also when it is merged, until the store is closed or the next call, so that
  // changes_since(since) finds it. Unless `replace`, does nothing if a log is kept already. A kept log
  // larger than the base files, and than 4 * min_log_bytes, is given up.
  void keep_log(const StorePosition& since, bool replace);

  uint64_t count();  // live rows, exact; reads all partitions that have rows in the log
  StoreStats stats() const;
  std::string damage() const;  // StoreStats::damage; fast if there is none
  // Messages for the user since the last call, one line each; every text is returned once.
  std::vector<std::string> take_warnings();
  void check();  // verifies every page and the invariants; throws CorruptionError or Error
  // Verifies the same and returns the first damage of every file and extent; throws Error if the index is wrong.
  std::vector<std::string> find_damage();
  void merge_all();                               // merges the whole log into the base files
  void link_checkpoint(const std::string& path);  // creates a folder with hard links to the files of epoch()
  void close();
  // For benchmarks: seconds of the page reads of a get() alone.
  double read_floor(const uint64_t* keys, size_t n);

  class Impl;

 private:
  explicit SsdStore(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;  // shared with running scans
};

}  // namespace thermocline
