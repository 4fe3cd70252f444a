#include "serving/snapshot_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "serving/snapshot_format.h"
#include "util/error.h"
#include "util/hash.h"

namespace thermocline::serving {
namespace {

constexpr size_t kWriteBytes = 4u << 20;

}  // namespace

SnapshotWriter::SnapshotWriter(std::shared_ptr<FileSystem> fs, const std::string& path, uint32_t row_bytes)
    : fs_(std::move(fs)), path_(path), geometry_(ssd::Geometry::of(row_bytes)), nonce_(ssd::random_nonce()) {
  file_ = fs_->open(path_, OpenMode::kCreate);
  buffer_ = AlignedBuffer(std::max<size_t>(kWriteBytes, geometry_.page_bytes));
  page_keys_.resize(geometry_.rows_per_page());
  page_rows_.resize(size_t{geometry_.rows_per_page()} * row_bytes);
  next_page();  // the header, written by finish()
}

SnapshotWriter::~SnapshotWriter() {
  if (finished_) return;
  file_.reset();
  try {
    fs_->unlink(path_);
  } catch (const Error&) {  // the folder is removed by its owner
  }
}

void SnapshotWriter::append(const uint64_t* keys, size_t n, RowsIn rows) {
  if (finished_ || !deleted_.empty()) throw Error("append() after erase() or finish()");
  for (size_t i = 0; i < n; ++i) {
    uint64_t hash = hash_key(keys[i]);
    if (rows_ + on_page_ > 0 && hash <= last_hash_)
      throw Error("the keys of a snapshot must ascend by hash, each once");
    last_hash_ = hash;
    if (on_page_ == 0) fences_.push_back(hash);
    page_keys_[on_page_] = keys[i];
    std::memcpy(&page_rows_[size_t{on_page_} * geometry_.row_bytes], rows.at(i), geometry_.row_bytes);
    if (++on_page_ == geometry_.rows_per_page()) close_page();
  }
}

void SnapshotWriter::erase(const uint64_t* keys, size_t n) {
  if (finished_) throw Error("erase() after finish()");
  if (n > 0 && deleted_.empty()) {
    close_page();
    last_hash_ = 0;
  }
  for (size_t i = 0; i < n; ++i) {
    uint64_t hash = hash_key(keys[i]);
    if (!deleted_.empty() && hash <= last_hash_) throw Error("deleted keys must ascend by hash, each once");
    last_hash_ = hash;
    deleted_.push_back(keys[i]);
  }
}

void SnapshotWriter::finish() {
  if (finished_) throw Error("finish() was called before");
  close_page();
  write_column(fences_, geometry_.fences_per_page(), ssd::PageKind::kFences);
  write_column(deleted_, geometry_.keys_per_page(), ssd::PageKind::kTombstones);
  flush();
  AlignedBuffer page(geometry_.page_bytes);
  std::memset(page.data(), 0, geometry_.page_bytes);
  SnapshotHeader header{.magic = {},
                        .version = kSnapshotVersion,
                        .row_bytes = geometry_.row_bytes,
                        .page_bytes = geometry_.page_bytes,
                        .reserved32 = 0,
                        .nonce = nonce_,
                        .rows = rows_,
                        .deleted = deleted_.size()};
  std::memcpy(header.magic, kSnapshotMagic, sizeof(kSnapshotMagic));
  std::memcpy(page.data() + sizeof(ssd::PageHeader), &header, sizeof(header));
  ssd::seal_page(page.data(), geometry_, nonce_, 0, ssd::PageKind::kHeader, 0);
  file_->pwrite(page.data(), geometry_.page_bytes, 0);
  file_->report_write_errors();  // not datasync(), nor an open file until sync_files(): a version may have many files
  file_.reset();
  finished_ = true;
}

// Ends a row page, full or not.
void SnapshotWriter::close_page() {
  if (on_page_ == 0) return;
  uint64_t number = pages_;
  uint8_t* page = next_page();
  uint8_t* at = page + sizeof(ssd::PageHeader);
  std::memcpy(at, page_keys_.data(), 8ull * on_page_);
  std::memcpy(at + 8ull * on_page_, page_rows_.data(), size_t{on_page_} * geometry_.row_bytes);
  ssd::seal_page(page, geometry_, nonce_, number, ssd::PageKind::kRows, on_page_);
  rows_ += on_page_;
  on_page_ = 0;
}

void SnapshotWriter::write_column(const std::vector<uint64_t>& values, uint32_t per_page, ssd::PageKind kind) {
  for (size_t first = 0; first < values.size(); first += per_page) {
    size_t count = std::min<size_t>(per_page, values.size() - first);
    uint64_t number = pages_;
    uint8_t* page = next_page();
    std::memcpy(page + ssd::keys_offset(kind == ssd::PageKind::kFences ? ssd::PageKind::kRows : kind), &values[first],
                8 * count);
    ssd::seal_page(page, geometry_, nonce_, number, kind, static_cast<uint32_t>(count));
  }
}

// Returns the next page of the file, zeroed; valid until the next call.
uint8_t* SnapshotWriter::next_page() {
  if ((buffered_ + 1) * geometry_.page_bytes > buffer_.size()) flush();
  uint8_t* page = buffer_.data() + buffered_ * geometry_.page_bytes;
  std::memset(page, 0, geometry_.page_bytes);
  ++buffered_;
  ++pages_;
  return page;
}

void SnapshotWriter::flush() {
  if (buffered_ == 0) return;
  file_->pwrite(buffer_.data(), buffered_ * geometry_.page_bytes, (pages_ - buffered_) * geometry_.page_bytes);
  buffered_ = 0;
}

}  // namespace thermocline::serving
