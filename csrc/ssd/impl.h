// Implementation of SsdStore: store.cc (open, commit, close), store_read.cc, store_write.cc, store_scan.cc,
// store_follow.cc, store_changes.cc, check.cc.
//
// Locks, in the order in which they are taken:
//   life_         shared by every call, exclusive by close()
//   commit_mutex_ serialises commits, releases, links and checks; held during their I/O
//   write_mutex_  serialises puts, loads, checks and the flush at the start of a commit; not held during syncs. Taken
//   by
//                 begin_write(). A deletion does not wait for it: see deletions_
//   merge lock    of Merger: shared by every running merge, exclusive by those that need partitions to stay
//   index_mutex_  the index and the write buffer: shared to plan reads, exclusive to change them; never held during I/O
// The mutexes of Catalog, Reader and MergeScheduler are innermost: no other lock is taken while one is held.
//
// Invariants:
//  1. A committed file is not changed and not deleted while a retained epoch needs it.
//  2. A row is in the write buffer or in the index from the return of put() on; a failed flush leaves it in the buffer.
//  3. After a failed sync the store accepts no more writes (failed_).
//  4. A key in deletions_ has no row, whatever the buffer and the index have; a later put() moves it to the buffer
//  first.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "ssd/catalog.h"
#include "ssd/index.h"
#include "ssd/log_writer.h"
#include "ssd/merger.h"
#include "ssd/reader.h"
#include "ssd/store.h"
#include "ssd/write_buffer.h"
#include "util/fair_mutex.h"
#include "util/thread_pool.h"

namespace thermocline {

class SsdStore::Impl {
 public:
  // Opens an existing store. The caller has read its identity and, for writing, holds its lock.
  Impl(std::shared_ptr<FileSystem> fs, const std::string& path, const ssd::Identity& id, const StoreOptions& options,
       std::unique_ptr<FileLock> lock);
  ~Impl();

  void get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows);
  void put(const uint64_t* keys, size_t n, const RowsIn* rows);  // rows null: deletions
  void erase(const uint64_t* keys, size_t n);
  void load(const uint64_t* keys, size_t n, RowsIn rows);
  uint64_t commit(const std::string& note);
  void release(uint64_t epoch);
  std::vector<ssd::PartitionView> views();
  // The parts of the partitions in `range`, and the entries of the write buffer there: null for a deletion. Nothing is
  // written.
  struct RangeView {
    std::vector<ssd::PartitionView> partitions;
    std::unordered_map<uint64_t, std::unique_ptr<uint8_t[]>> buffered;
  };
  // The rows of a range that were put or deleted since a scan of it began: the newest one of each key, null for a
  // deletion. Protected by index_mutex_.
  struct Followed {
    using Rows = std::unordered_map<uint64_t, std::unique_ptr<uint8_t[]>>;

    Followed(ssd::Context& ctx, KeyRange range);
    ~Followed() { release(memory_); }
    Followed(const Followed&) = delete;

    // Bytes of the scan, with what its caller keeps, and of `rows`: counted in the context.
    void reserve(uint64_t bytes) {
      ctx_.scan_memory += bytes;
      memory_ += bytes;
    }
    void release(uint64_t bytes) {
      ctx_.scan_memory -= bytes;
      memory_ -= bytes;
    }

    // The index in `rows` of a hash of the range.
    size_t piece(uint64_t hash) const { return (hash - range.lo) >> shift_; }

    const KeyRange range;
    std::vector<Rows> rows;         // of pieces of the range, in hash order: changed() looks at a few of them
    std::atomic<bool> lost{false};  // they took too much memory, and are no longer kept
    uint64_t buffers = 0;           // bytes that are reserved until the last row was read

   private:
    ssd::Context& ctx_;
    int shift_ = 0;
    uint64_t memory_ = 0;
  };
  RangeView view(KeyRange range);
  // View of the range of `followed`; `buffered` is in followed->rows. nullopt: see SsdStore::follow(), with `kept` and
  // `buffers`.
  std::optional<RangeView> view(const std::shared_ptr<Followed>& followed, uint64_t kept, uint64_t buffers);
  void end_reading(Followed& followed);  // the scan has returned its last row
  // SsdStore::Scan::changed() of `part`, a part of the range of `followed`.
  std::optional<size_t> changed(const Followed& followed, KeyRange part, size_t max, uint64_t* keys, uint8_t* rows,
                                uint8_t* deleted);
  PreadPool& scan_io();  // threads that read for scans that follow their range
  StorePosition position();
  void keep_log(const StorePosition& since, bool replace);
  std::vector<std::shared_ptr<const ssd::Extent>> extents_since(const StorePosition& since, std::string* cause);
  uint64_t count();
  StoreStats stats() const;
  std::string damage() const;
  std::vector<std::string> take_warnings();
  std::vector<std::string> find_damage(std::exception_ptr* first = nullptr);  // `first`: the first error
  void merge_all();
  void link_checkpoint(const std::string& path);
  void close();
  double read_floor(const uint64_t* keys, size_t n);

  ssd::Context ctx;
  std::vector<uint64_t> epochs() const { return catalog_.epochs(); }
  uint64_t epoch() const;
  std::string note() const;

  // Every call holds the result. Throws Error if the store is closed or was opened by another process.
  std::shared_lock<FairMutex> alive() const;
  bool foreign() const;  // this process was forked from the one that opened the store

 private:
  void load(const ssd::Manifest& manifest);
  void load_extents(const std::vector<std::shared_ptr<ssd::Extent>>& extents, ThreadPool& threads);
  bool filters_fit(const ssd::Manifest& manifest);
  void require_writable() const;
  std::unique_lock<std::mutex> begin_write();  // takes write_mutex_; deletions_ are in the buffer then
  // Moves deletions_ to the buffer on a thread, soon: while there is no put() they would fill their memory, and erase()
  // would wait for the write lock. Not if merges are inline, which is for tests: the order of writes is then fixed.
  void buffer_deletions();
  // Called when rows become visible, with the index lock held exclusively. Row i has key keys[i], or keys[item.index].
  void follow(const uint64_t* keys, size_t n, const RowsIn* rows);
  void follow(const std::vector<ssd::Item>& by_hash, const uint64_t* keys, const RowsIn* rows);
  // `room`: bytes of the budget that are left, for all scans together.
  void follow(Followed& followed, uint64_t key, const uint8_t* row, uint64_t& room) const;
  uint64_t change_bytes() const;                // of one row of Followed::rows
  RangeView view_locked(KeyRange range) const;  // the caller holds the index lock
  // The caller of the following holds write_mutex_.
  void flush_for_reading();  // flush_buffer() if there is something to flush; also of a read-only store
  void flush_buffer();       // moves all rows to the index, or throws and leaves all in the buffer
  uint64_t append_buffer();  // the same without merging; returns the bytes written
  void admit();              // before rows are added: see Merger::admit
  void copy_set_aside_log();
  template <class Fn>
  auto collecting(Fn&& fn);
  void add(const uint64_t* keys, size_t n, const RowsIn* rows);  // small batches: to the buffer; large: to the log
  uint64_t index_bytes(uint64_t rows) const;
  std::vector<ssd::Partition> write_bases(const std::vector<ssd::Item>& items, const uint64_t* keys, RowsIn rows);
  void write_batch(std::vector<ssd::Item>& items, const uint64_t* keys, const RowsIn* rows);
  void sync_files(const std::vector<std::shared_ptr<ssd::DataFile>>& files);
  [[noreturn]] void fail(const std::string& cause);  // makes the store read-only
  uint64_t buffer_memory() const;
  uint64_t base_bytes() const;
  class GetPlans;
  size_t prepare_lookup(size_t n);      // returns the number of threads of a lookup of n keys
  uint64_t piece_span(size_t n) const;  // KeyPieces: `span` of a lookup of n keys
  // Copies the rows that are in the buffer and removes their items. The caller holds the index lock.
  void take_from_buffer(ssd::ReadPlan& plan, const ssd::RowsWanted& wanted) const;
  void check_invariants();
  void check_base(const ssd::PartitionRecord& record, uint64_t lo, uint64_t hi);
  void check_extent(const ssd::Extent& extent);

  const StoreOptions options_;
  std::unique_ptr<FileLock> lock_;
  ThreadPool pool_;
  ssd::Catalog catalog_;
  const pid_t owner_;  // a forked child must not change the parent's files

  mutable FairMutex life_;
  std::atomic<bool> closed_{false};

  std::mutex commit_mutex_;  // a writer of epoch_ and note_ holds it
  std::mutex write_mutex_;   // protects log_
  ssd::LogWriter log_;

  mutable FairMutex index_mutex_;  // protects the members up to failed_
  ssd::Index index_;
  ssd::WriteBuffer buffer_;
  ssd::WriteBuffer deletions_;  // newer than buffer_
  std::vector<std::weak_ptr<Followed>> followed_;
  uint64_t epoch_ = 0;
  std::string note_;
  std::string failed_;  // why the store accepts no more writes; empty: it accepts them

  std::once_flag scan_io_once_;
  std::unique_ptr<PreadPool> scan_io_;
  ssd::Reader reader_;
  std::atomic<uint64_t> bytes_put_{0};
  std::unique_ptr<ssd::Merger> merger_;  // its threads use all members above
  std::once_flag deletions_io_once_;
  std::atomic<bool> buffering_{false};
  std::unique_ptr<PreadPool> deletions_io_;  // last: its thread uses all members above
};

}  // namespace thermocline
