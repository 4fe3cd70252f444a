#include "ssd/log_writer.h"

#include <algorithm>
#include <atomic>

namespace thermocline::ssd {
namespace {
constexpr size_t kWriters = 2;  // BufferSizes::total() counts their buffers
}  // namespace

LogWriter::LogWriter(Context& ctx, ThreadPool& pool, size_t segment_bytes,
                     std::function<std::shared_ptr<DataFile>(FileKind)> new_file)
    : ctx_(ctx), pool_(pool), segment_bytes_(segment_bytes), new_file_(std::move(new_file)) {}

uint64_t LogWriter::max_rows() const {
  return std::clamp<uint64_t>(segment_bytes_ / ctx_.g.entry_bytes(), 1, kMaxExtentRows);
}

void LogWriter::fill(uint8_t* page, uint64_t i, const Extent& extent, const std::vector<Item>& items,
                     const uint64_t* keys, const RowsIn* rows) const {
  const Geometry& g = ctx_.g;
  uint64_t key_pages = g.key_pages(extent.rows);
  bool key_page = i < key_pages;
  uint64_t per_page = key_page ? g.keys_per_page() : g.rows_per_page();
  uint64_t first = (key_page ? i : i - key_pages) * per_page;
  auto count = static_cast<uint32_t>(std::min<uint64_t>(per_page, items.size() - first));
  PageKind kind = !key_page ? PageKind::kRows : extent.tombstones ? PageKind::kTombstones : PageKind::kKeys;
  uint8_t* out = page + keys_offset(kind);
  std::memset(page, 0, keys_offset(kind));
  if (key_page) {
    ExtentInfo info{extent.seq, first, extent.rows};
    std::memcpy(page + sizeof(PageHeader), &info, sizeof info);
  }
  for (uint32_t k = 0; k < count; ++k, out += 8) std::memcpy(out, &keys[items[first + k].index], 8);
  if (!key_page) {
    constexpr uint32_t kAhead = 8;  // prefetch: rows are scattered in the caller's memory
    for (uint32_t k = 0; k < count; ++k, out += g.row_bytes) {
      if (first + k + kAhead < items.size()) __builtin_prefetch(rows->at(items[first + k + kAhead].index));
      std::memcpy(out, rows->at(items[first + k].index), g.row_bytes);
    }
  }
  std::memset(out, 0, static_cast<size_t>(page + g.page_bytes - out));
  seal_page(page, g, extent.segment->nonce, extent.first_page + i, kind, count);
}

std::shared_ptr<Extent> LogWriter::write(const std::vector<Item>& items, const uint64_t* keys, const RowsIn* rows,
                                         uint64_t base_bytes, std::vector<HashAndPage>& entries) {
  const Geometry& g = ctx_.g;
  if (segment_ && segment_->pages * g.page_bytes >= std::max<uint64_t>(segment_bytes_, base_bytes / 1024)) {
    vbase_ += static_cast<uint32_t>(segment_->pages);
    segment_.reset();
  }
  if (!segment_) segment_ = new_file_(FileKind::kSegment);
  auto extent = std::make_shared<Extent>();
  extent->seq = next_seq_++;
  extent->segment = segment_;
  extent->first_page = static_cast<uint32_t>(segment_->pages);
  extent->vbase = vbase_;
  extent->rows = items.size();
  extent->tombstones = rows == nullptr;

  uint64_t pages = extent->pages(g);
  size_t chunk = ctx_.sizes.append_pages;
  size_t chunks = (pages + chunk - 1) / chunk, writers = std::min(kWriters, chunks);
  while (buffers_.size() < writers) {
    buffers_.emplace_back(chunk * g.page_bytes);
    buffer_bytes_ += buffers_.back().size();
  }
  ctx_.fs->failpoint("extent.begin");
  try {
    std::atomic<size_t> next{0};
    pool_.parallel(writers, [&](size_t w) {
      for (size_t c; (c = next.fetch_add(1)) < chunks;) {
        uint64_t first = c * chunk, n = std::min<uint64_t>(chunk, pages - first);
        for (uint64_t i = 0; i < n; ++i)
          fill(buffers_[w].data() + i * g.page_bytes, first + i, *extent, items, keys, rows);
        segment_->file->pwrite(buffers_[w].data(), n * g.page_bytes, (extent->first_page + first) * g.page_bytes);
        ctx_.fs->failpoint("extent.chunk");
      }
    });
  } catch (...) {
    // The content of the pages is unknown: this file is not written again. A full disk needs their space.
    segment_->file->truncate(segment_->pages * g.page_bytes);
    vbase_ += static_cast<uint32_t>(segment_->pages + pages);
    segment_.reset();
    throw;
  }
  // After the writes: a commit in progress may have marked the file before them.
  segment_->synced = false;
  ctx_.bytes_written += pages * g.page_bytes;
  segment_->pages += pages;
  ctx_.fs->failpoint("extent.written");

  uint32_t data_page = extent->data_page(g), per_page = extent->per_page(g);
  entries.resize(items.size());
  extent->fences.reserve((items.size() + per_page - 1) / per_page);
  for (size_t i = 0; i < items.size(); ++i) {
    if (i % per_page == 0) extent->fences.push_back(items[i].hash);
    entries[i] = {items[i].hash, data_page + static_cast<uint32_t>(i / per_page)};
  }
  return extent;
}

}  // namespace thermocline::ssd
