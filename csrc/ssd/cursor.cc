#include "ssd/cursor.h"

#include <algorithm>

#include "ssd/async_io.h"

namespace thermocline::ssd {

namespace {

// Division of the buffer: at most half for the base, the rest in equal parts for the extents.
struct BufferShares {
  size_t base, extent;
};
BufferShares shares_of(const Geometry& g, size_t extents, size_t buffer_bytes) {
  return {std::max<size_t>(g.page_bytes, std::min<size_t>(buffer_bytes / 2, 1u << 20)),
          std::clamp<size_t>(buffer_bytes / (2 * (extents + 1)), g.page_bytes, 256u << 10)};
}

}  // namespace

// One sorted source: a range of row or tombstone pages of one file. The buffer has two halves: one is read while the
// rows of the other are consumed. It is undivided without a pool, or if one read brings all pages.
class PartitionCursor::Run {
 public:
  Run(Context& ctx, DataFile& file, uint64_t seq, uint64_t first_page, uint64_t pages, bool tombstones, uint64_t hi,
      size_t buffer_bytes, PreadPool* read_ahead)
      : ctx_(ctx),
        file_(file),
        seq_(seq),
        next_page_(first_page),
        unread_page_(first_page),
        end_page_(first_page + pages),
        tombstones_(tombstones),
        hi_(hi),
        read_ahead_(read_ahead),
        parts_(read_ahead && pages > buffer_pages(ctx, buffer_bytes) && buffer_pages(ctx, buffer_bytes) > 1 ? 2 : 1) {
    const uint64_t part_pages = std::min(buffer_pages(ctx, buffer_bytes) / parts_.size(), pages);
    for (Part& part : parts_) {
      part.buffer = AlignedBuffer(part_pages * ctx.g.page_bytes);
      start_read(part);
    }
  }

  // Moves to the first row with a hash of at least `lo`. Called once, before the other methods.
  void start(uint64_t lo) {
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
  struct Part {
    Part() = default;
    ~Part() {
      if (read.valid()) read.wait();
    }
    Part(const Part&) = delete;
    AlignedBuffer buffer;
    uint64_t pages = 0;  // read or being read; 0: the range ended before
    std::future<void> read;
  };

  static uint64_t buffer_pages(const Context& ctx, size_t bytes) {
    return std::max<uint64_t>(1, bytes / ctx.g.page_bytes);
  }

  PageKind kind() const { return tombstones_ ? PageKind::kTombstones : PageKind::kRows; }

  void start_read(Part& part) {
    const uint32_t bytes = ctx_.g.page_bytes;
    part.pages = std::min<uint64_t>(part.buffer.size() / bytes, end_page_ - unread_page_);
    if (part.pages == 0) return;
    const auto read = [file = file_.file.get(), to = part.buffer.data(), n = part.pages * bytes,
                       offset = unread_page_ * bytes] {
      for (int attempt = 0;; ++attempt) {
        try {
          file->pread(to, n, offset);
          return;
        } catch (const IoError& e) {
          if (attempt > 0) throw UnreadableError(e.what(), e.code);
        }
      }
    };
    part.read = start_io(read_ahead_, read);
    unread_page_ += part.pages;
    bytes_read_ += part.pages * bytes;
  }

  // Frees the consumed part for the next read and moves to the other part. False: no more pages.
  bool next_part() {
    if (page_) {
      start_read(parts_[current_]);
      current_ = (current_ + 1) % parts_.size();
    }
    Part& part = parts_[current_];
    if (part.pages == 0) return false;
    part.read.get();
    buffered_ = part.pages;
    page_ = part.buffer.data();
    return true;
  }

  bool next_page() {
    if (buffered_ == 0) {
      if (!next_part()) return false;
    } else {
      page_ += ctx_.g.page_bytes;
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
  uint64_t next_page_;    // to be consumed
  uint64_t unread_page_;  // to be read
  const uint64_t end_page_;
  const bool tombstones_;
  const uint64_t hi_;
  PreadPool* const read_ahead_;
  std::vector<Part> parts_;
  size_t current_ = 0;
  uint64_t buffered_ = 0;  // pages of the current part after page_
  const uint8_t* page_ = nullptr;
  uint32_t on_page_ = 0, at_ = 0;
  uint64_t key_ = 0, hash_ = 0, bytes_read_ = 0;
  bool done_ = false;
};

PartitionCursor::PartitionCursor(Context& ctx, PartitionView view, size_t buffer_bytes, bool with_deleted,
                                 PreadPool* read_ahead)
    : view_(std::move(view)), with_deleted_(with_deleted) {
  const BufferShares shares = shares_of(ctx.g, view_.extents.size(), buffer_bytes);
  const auto add = [&](DataFile& file, uint64_t seq, uint64_t data_page, const std::vector<uint64_t>& fences,
                       bool tombstones, size_t share) {
    // Pages whose rows can reach into [lo, hi].
    auto first = std::upper_bound(fences.begin(), fences.end(), view_.lo);
    if (first != fences.begin()) --first;
    const auto last = std::upper_bound(fences.begin(), fences.end(), view_.hi);
    if (first >= last) return;
    runs_.push_back(std::make_unique<Run>(ctx, file, seq, data_page + static_cast<uint64_t>(first - fences.begin()),
                                          static_cast<uint64_t>(last - first), tombstones, view_.hi, share,
                                          read_ahead));
  };
  if (view_.base) add(*view_.base->data, 0, 1, view_.base->fences, false, shares.base);
  for (auto& extent : view_.extents) {
    add(*extent->segment, extent->seq, extent->data_page(ctx.g), extent->fences, extent->tombstones, shares.extent);
  }
  for (auto& run : runs_) {  // after all first reads were started
    run->start(view_.lo);
    if (run->done()) continue;
    if (run->seq() == 0 && view_.base) base_ = run.get();
    else heap_.push_back(run.get());
  }
  std::make_heap(heap_.begin(), heap_.end(), [this](Run* a, Run* b) { return later(a, b); });
}

uint64_t PartitionCursor::memory(const Geometry& g, const PartitionView& view, size_t buffer_bytes) {
  const BufferShares shares = shares_of(g, view.extents.size(), buffer_bytes);
  const uint64_t base = view.base ? std::min<uint64_t>(shares.base, view.base->pages() * uint64_t{g.page_bytes}) : 0;
  return base + view.extents.size() * shares.extent;
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
