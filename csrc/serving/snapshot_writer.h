// Writes a snapshot file (snapshot_format.h), in bounded memory but for 8 bytes per row page.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ssd/format.h"
#include "util/aligned.h"
#include "util/fs.h"
#include "util/row_store.h"

namespace thermocline::serving {

// Not thread-safe. Without finish() the destructor deletes the file.
class SnapshotWriter {
 public:
  // Throws IoError if the file exists.
  SnapshotWriter(std::shared_ptr<FileSystem> fs, const std::string& path, uint32_t row_bytes);
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // Keys of all calls together are in ascending order of hash_key, each once. Throws Error otherwise.
  void append(const uint64_t* keys, size_t n, RowsIn rows);
  // Deleted keys, in the same order, each once, none of them appended too.
  void erase(const uint64_t* keys, size_t n);
  // Writes what is missing; throws the error of any write. The file is not durable yet: see sync_files().
  void finish();

  uint32_t row_bytes() const { return geometry_.row_bytes; }
  uint64_t rows() const { return rows_; }
  uint64_t deleted() const { return deleted_.size(); }
  uint64_t bytes() const { return pages_ * geometry_.page_bytes; }

 private:
  void close_page();
  void write_column(const std::vector<uint64_t>& values, uint32_t per_page, ssd::PageKind kind);
  uint8_t* next_page();
  void flush();

  std::shared_ptr<FileSystem> fs_;
  std::string path_;
  ssd::Geometry geometry_;
  std::unique_ptr<File> file_;
  uint64_t nonce_;
  AlignedBuffer buffer_;
  size_t buffered_ = 0;  // pages
  uint64_t pages_ = 0;   // of the file, buffered ones included
  uint32_t on_page_ = 0;
  std::vector<uint64_t> page_keys_;
  std::vector<uint8_t> page_rows_;
  std::vector<uint64_t> fences_, deleted_;
  uint64_t rows_ = 0, last_hash_ = 0;
  bool finished_ = false;
};

}  // namespace thermocline::serving
