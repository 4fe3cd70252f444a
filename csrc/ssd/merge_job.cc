#include "ssd/merge_job.h"

#include <algorithm>

namespace thermocline::ssd {

// ---- PieceWriter

void PieceWriter::add(uint64_t key, const uint8_t* row) {
  if (file_ && file_->rows() == rows_per_piece_) close();
  if (!file_) {
    pieces_.emplace_back();
    pieces_.back().lo = hash_key(key);
    file_ = std::make_unique<BaseWriter>(ctx_, catalog_.create(FileKind::kBase), rows_per_piece_, filter_bits_, io_);
  }
  file_->add(key, row);
}

std::vector<Partition> PieceWriter::finish(uint64_t lo, uint64_t hi) {
  if (file_) close();
  if (pieces_.empty()) pieces_.emplace_back();
  pieces_.front().lo = lo;
  for (size_t i = 0; i < pieces_.size(); ++i) pieces_[i].hi = i + 1 < pieces_.size() ? pieces_[i + 1].lo - 1 : hi;
  return std::move(pieces_);
}

void PieceWriter::close() {
  pieces_.back().base = file_->finish();
  counters_.bytes_written += pieces_.back().base->bytes(ctx_.g);
  file_.reset();
  ctx_.fs->failpoint("merge.piece");
}

// ---- MergeJob

MergeJob::MergeJob(Context& ctx, Catalog& catalog, MergeCounters& counters, uint32_t filter_bits,
                   const Index::Merge& merge, uint64_t target, PreadPool* io)
    : ctx_(ctx),
      counters_(counters),
      lo_(merge.view.lo),
      hi_(merge.view.hi),
      rows_(ctx, merge.view, ctx.sizes.merge_bytes, false, io),
      writer_(ctx, catalog, counters, filter_bits, rows_per_piece(ctx, merge, target), io) {}

bool MergeJob::step(uint64_t bytes) {
  for (uint64_t done = 0; done < bytes; done += ctx_.g.entry_bytes()) {
    if (!rows_.next()) return false;
    writer_.add(rows_.key(), rows_.row());
  }
  return true;
}

std::vector<Partition> MergeJob::finish() {
  std::vector<Partition> pieces = writer_.finish(lo_, hi_);
  counters_.bytes_read += rows_.bytes_read();
  return pieces;
}

uint64_t MergeJob::rows_per_piece(const Context& ctx, const Index::Merge& merge, uint64_t target) {
  const auto ceil_div = [](uint64_t a, uint64_t b) { return (a + b - 1) / b; };
  const uint64_t bytes = merge.rows * ctx.g.entry_bytes();
  const uint64_t pieces = bytes > target ? ceil_div(bytes, target * 3 / 4 + 1) : 1;
  return std::max<uint64_t>(1, ceil_div(merge.rows, pieces));
}

uint64_t MergeJob::memory(const Context& ctx, const Index::Merge& merge, uint64_t target, uint32_t filter_bits) {
  const uint64_t rows = rows_per_piece(ctx, merge, target);
  const uint64_t index = ctx.g.row_pages(rows) * 8 + rows * filter_bits / 8;
  return PartitionCursor::memory(ctx.g, merge.view, ctx.sizes.merge_bytes) +
         uint64_t{ctx.sizes.append_pages} * ctx.g.page_bytes + index;
}

}  // namespace thermocline::ssd
