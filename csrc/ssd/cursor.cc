#include "ssd/cursor.h"

#include <algorithm>

namespace thermocline::ssd {

// One sorted source: a range of row or tombstone pages of one file.
class PartitionCursor::Run {
 public:
  Run(Context& ctx, DataFile& file, uint64_t seq, uint64_t first_page, uint64_t pages, bool tombstones, uint64_t lo,
      uint64_t hi, size_t buffer_bytes)
      : ctx_(ctx),
        file_(file),
        seq_(seq),
        next_page_(first_page),
        end_page_(first_page + pages),
        tombstones_(tombstones),
        hi_(hi),
        buffer_(std::max<size_t>(1, std::min<uint64_t>(buffer_bytes / ctx.g.page_bytes, pages)) * ctx.g.page_bytes) {
    do advance();
    while (!done_ && hash_ < lo);
  }

  void advance() {
    if (++at_ >= on_page_ && !next_page()) {
      done_ = true;
      return;
    }
    key_ = page_key(page_, kind(), at_);
    hash_ = hash_key(key_);
    if (hash_ > hi_) done_ = true;
  }

  bool done() const { return done_; }
  uint64_t hash() const { return hash_; }
  uint64_t key() const { return key_; }
  uint64_t seq() const { return seq_; }
  bool tombstone() const { return tombstones_; }
  const uint8_t* row() const { return page_row(page_, ctx_.g, at_); }
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  PageKind kind() const { return tombstones_ ? PageKind::kTombstones : PageKind::kRows; }

  void read(uint64_t pages) {
    const uint32_t bytes = ctx_.g.page_bytes;
    for (int attempt = 0;; ++attempt) {
      try {
        file_.file->pread(buffer_.data(), pages * bytes, next_page_ * bytes);
        return;
      } catch (const IoError& e) {
        if (attempt > 0) throw UnreadableError(e.what(), e.code);
      }
    }
  }

  bool next_page() {
    const uint32_t bytes = ctx_.g.page_bytes;
    if (buffered_ == 0) {
      if (next_page_ == end_page_) return false;
      uint64_t n = std::min<uint64_t>(buffer_.size() / bytes, end_page_ - next_page_);
      read(n);
      bytes_read_ += n * bytes;
      buffered_ = n;
      page_ = buffer_.data();
    } else {
      page_ += bytes;
    }
    verify_page(page_, ctx_.g, file_.nonce, next_page_, kind(), file_.file->path());
    ++next_page_;
    --buffered_;
    on_page_ = page_header(page_).count;
    at_ = 0;
    return on_page_ > 0 || next_page();
  }

  Context& ctx_;
  DataFile& file_;
  const uint64_t seq_;
  uint64_t next_page_;
  const uint64_t end_page_;
  const bool tombstones_;
  const uint64_t hi_;
  AlignedBuffer buffer_;
  uint64_t buffered_ = 0;  // pages in the buffer after page_
  const uint8_t* page_ = nullptr;
  uint32_t on_page_ = 0, at_ = 0;
  uint64_t key_ = 0, hash_ = 0, bytes_read_ = 0;
  bool done_ = false;
};

PartitionCursor::PartitionCursor(Context& ctx, PartitionView view, size_t buffer_bytes, bool with_deleted)
    : view_(std::move(view)), with_deleted_(with_deleted) {
  size_t sources = view_.extents.size() + 1;
  size_t each = std::clamp<size_t>(buffer_bytes / (2 * sources), ctx.g.page_bytes, 256u << 10);
  if (view_.base) {
    size_t base_bytes = std::max<size_t>(ctx.g.page_bytes, std::min<size_t>(buffer_bytes / 2, 1u << 20));
    runs_.push_back(std::make_unique<Run>(ctx, *view_.base->data, 0, 1, view_.base->pages(), false, view_.lo, view_.hi,
                                          base_bytes));
    if (!runs_.back()->done()) base_ = runs_.back().get();
  }
  for (auto& extent : view_.extents) {
    auto& f = extent->fences;
    // Pages whose rows can reach into [lo, hi].
    auto first = std::upper_bound(f.begin(), f.end(), view_.lo);
    if (first != f.begin()) --first;
    auto last = std::upper_bound(f.begin(), f.end(), view_.hi);
    if (first >= last) continue;
    runs_.push_back(
        std::make_unique<Run>(ctx, *extent->segment, extent->seq, extent->data_page(ctx.g) + (first - f.begin()),
                              static_cast<uint64_t>(last - first), extent->tombstones, view_.lo, view_.hi, each));
    if (!runs_.back()->done()) heap_.push_back(runs_.back().get());
  }
  std::make_heap(heap_.begin(), heap_.end(), [this](Run* a, Run* b) { return later(a, b); });
}

PartitionCursor::~PartitionCursor() = default;

bool PartitionCursor::later(const Run* a, const Run* b) const {
  return a->hash() != b->hash() ? a->hash() > b->hash() : a->seq() < b->seq();
}

bool PartitionCursor::next() {
  auto order = [this](Run* a, Run* b) { return later(a, b); };
  for (;;) {
    for (Run* run : to_advance_) {
      run->advance();
      if (run == base_) {
        if (run->done()) base_ = nullptr;
      } else if (!run->done()) {
        heap_.push_back(run);
        std::push_heap(heap_.begin(), heap_.end(), order);
      }
    }
    to_advance_.clear();
    if (heap_.empty() && !base_) return false;
    if (base_ && (heap_.empty() || base_->hash() < heap_.front()->hash())) {
      to_advance_.push_back(base_);
      key_ = base_->key();
      row_ = base_->row();
      seq_ = 0;
      return true;
    }
    Run* newest = heap_.front();
    while (!heap_.empty() && heap_.front()->hash() == newest->hash()) {
      std::pop_heap(heap_.begin(), heap_.end(), order);
      to_advance_.push_back(heap_.back());
      heap_.pop_back();
    }
    if (base_ && base_->hash() == newest->hash()) to_advance_.push_back(base_);
    if (newest->tombstone() && !with_deleted_) continue;
    key_ = newest->key();
    row_ = newest->tombstone() ? nullptr : newest->row();
    seq_ = newest->seq();
    return true;
  }
}

uint64_t PartitionCursor::bytes_read() const {
  uint64_t sum = 0;
  for (auto& run : runs_) sum += run->bytes_read();
  return sum;
}

}  // namespace thermocline::ssd
