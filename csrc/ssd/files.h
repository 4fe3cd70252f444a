// Data files: log segments, which contain extents, and base files. Both are written once, front to back, and never
// overwritten; page 0 is a header (format.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "ssd/filter.h"
#include "ssd/format.h"
#include "ssd/manifest.h"
#include "util/aligned.h"
#include "util/fs.h"
#include "util/pread_queue.h"
#include "util/warnings.h"

namespace thermocline::ssd {

// Buffer sizes of one open store: full size with a budget of 64 MB or more, else smaller; at least one page each.
struct BufferSizes {
  static constexpr int kMaxReadSlots = 64;  // bits of the mask of free slots
  int read_workers;                         // threads of one large lookup
  int read_channels;                        // one per worker, and two that lookups beside a large one find free
  int read_slots;                           // of each channel: the most reads in flight
  uint32_t slot_pages;                      // a longer read takes several slots
  uint32_t read_pages;                      // of the longest read
  uint32_t append_pages;                    // of one sequential write or read
  size_t merge_bytes;                       // input buffers of a merge; more if there are many extents
  size_t merge_memory;                      // all buffers of a merge of max_extents extents
  size_t more_merges;                       // buffers of the merges beside it; used only if memory is left (Merger)
  size_t max_extents;  // live extents: each needs a page of a merge's memory, and an entry in every manifest
  size_t write_buffer;

  static BufferSizes of(size_t mem_budget, size_t write_buffer, const Geometry& g, FileSystem::Concurrency reads,
                        int merge_threads);
  uint64_t total(const Geometry& g) const;  // if all buffers but more_merges are allocated
};

// Shared by all parts of one open store. Constant after construction, except the counters and the warnings.
struct Context {
  Context(std::shared_ptr<FileSystem> fs, std::string path, const Identity& id, size_t mem_budget, size_t write_buffer,
          int merge_threads = 1)
      : fs(std::move(fs)),
        path(std::move(path)),
        id(id),
        g(id.geometry),
        sizes(BufferSizes::of(mem_budget, write_buffer, g, this->fs->read_concurrency(), merge_threads)) {}

  std::shared_ptr<FileSystem> fs;
  std::string path;
  Identity id;
  Geometry g;
  BufferSizes sizes;
  std::atomic<uint64_t> bytes_written{0};
  std::atomic<uint64_t> scan_memory{0};  // of scans that follow their range
  Warnings warnings;                     // for the user

  std::string file_path(FileKind kind, uint64_t number) const { return path + "/" + file_name(kind, number); }
};

// An open data file. `synced` is false from creation or the end of the last append until a commit starts to sync it.
struct DataFile {
  FileKind kind;
  uint64_t number;
  uint64_t nonce;
  std::unique_ptr<File> file;
  std::atomic<bool> synced{false};
  std::atomic<uint64_t> pages{0};
};

std::shared_ptr<DataFile> create_data_file(Context& ctx, FileKind kind, uint64_t number);
// Creates the file `path` with a given nonce: a replacement of a damaged file, to be renamed to its name.
std::shared_ptr<DataFile> create_data_file(Context& ctx, FileKind kind, uint64_t number, uint64_t nonce,
                                           const std::string& path);
// Verifies the header and that the file has at least `pages` pages.
std::shared_ptr<DataFile> open_data_file(Context& ctx, FileKind kind, uint64_t number, uint64_t nonce, uint64_t pages);

// Appends pages to a new file through one buffer. With a pool, the buffer has two halves, and one is written while the
// other is filled. Not thread-safe.
class PageAppender {
 public:
  PageAppender(Context& ctx, DataFile& file, PreadPool* write_behind = nullptr);
  ~PageAppender();
  uint8_t* next();                                      // zeroed memory of the next page; valid until the next call
  uint64_t page() const { return first_ + used_ - 1; }  // number of the page that next() returned last
  void flush();                                         // returns when all pages are written

 private:
  void start_write();
  void finish_write();

  Context& ctx_;
  DataFile& file_;
  PreadPool* const write_behind_;
  const size_t part_pages_;
  AlignedBuffer buffer_;
  uint8_t* part_;   // being filled
  uint64_t first_;  // page number of its first page
  size_t used_ = 0;
  std::future<void> write_;  // of the other part
  size_t writing_ = 0;       // its pages
};

// Immutable rows of one partition, in hash order. Row page i is page 1 + i of the file; fence pages follow, then filter
// pages, if there is a filter.
struct BaseFile {
  std::shared_ptr<DataFile> data;
  uint64_t rows = 0;
  std::vector<uint64_t> fences;  // first hash of each row page
  uint64_t filter_bytes = 0;     // in the file
  mutable Filter filter;         // empty if not loaded or given up; the store's index lock protects it

  uint32_t pages() const { return static_cast<uint32_t>(fences.size()); }
  uint64_t bytes(const Geometry& g) const { return file_pages(g, pages(), filter_bytes) * g.page_bytes; }
  static uint64_t file_pages(const Geometry& g, uint64_t row_pages, uint64_t filter_bytes) {
    return 1 + row_pages + g.fence_pages(row_pages) + g.filter_pages(filter_bytes);
  }
};

std::shared_ptr<const BaseFile> open_base(Context& ctx, const PartitionRecord& record, bool with_filter);

// Writes a base file from rows in strictly ascending hash order. Not thread-safe.
class BaseWriter {
 public:
  // `filter_bits`: bits per row of a filter for at most `rows` rows; 0: no filter.
  BaseWriter(Context& ctx, std::shared_ptr<DataFile> file, uint64_t rows, uint32_t filter_bits,
             PreadPool* write_behind = nullptr);
  // `filter` is empty; the size is its own.
  BaseWriter(Context& ctx, std::shared_ptr<DataFile> file, Filter filter, PreadPool* write_behind = nullptr);
  void add(uint64_t key, const uint8_t* row);
  uint64_t rows() const { return rows_; }
  uint64_t bytes() const { return fences_.size() * uint64_t{ctx_.g.page_bytes}; }
  std::shared_ptr<const BaseFile> finish();  // not synced

 private:
  void seal();
  Context& ctx_;
  std::shared_ptr<DataFile> file_;
  PageAppender out_;
  uint8_t* page_ = nullptr;
  uint32_t on_page_ = 0;
  uint64_t rows_ = 0;
  uint64_t last_hash_ = 0;
  std::vector<uint64_t> fences_;
  Filter filter_;
};

// One flush of the log: `rows` keys in strictly ascending hash order; key pages, then row pages (none for deletions).
struct Extent {
  uint64_t seq = 0;
  std::shared_ptr<DataFile> segment;
  uint32_t first_page = 0;
  uint32_t vbase = 0;  // page p of the segment is page vbase + p of the whole log, modulo 2^32
  uint64_t rows = 0;
  bool tombstones = false;
  std::vector<uint64_t> fences;  // first hash of each data page

  // First data page. Lookups read data pages: row pages, or the key pages of deletions.
  uint32_t data_page(const Geometry& g) const {
    return tombstones ? first_page : first_page + static_cast<uint32_t>(g.key_pages(rows));
  }
  uint32_t per_page(const Geometry& g) const { return tombstones ? g.keys_per_page() : g.rows_per_page(); }
  uint64_t pages(const Geometry& g) const { return g.key_pages(rows) + (tombstones ? 0 : g.row_pages(rows)); }
  uint64_t bytes(const Geometry& g) const { return pages(g) * g.page_bytes; }
};

// Reads the key pages, calls fn(hash, number of the data page in the segment) in order, and fills extent.fences.
void read_extent_keys(Context& ctx, Extent& extent, const std::function<void(uint64_t, uint32_t)>& fn);

}  // namespace thermocline::ssd
