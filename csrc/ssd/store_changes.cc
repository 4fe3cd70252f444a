// Changes of SsdStore since a position: the extents of the log after it.
#include <algorithm>
#include <limits>

#include "ssd/impl.h"

namespace thermocline {

using namespace ssd;

StorePosition SsdStore::Impl::position() {
  auto life = alive();
  const auto write = begin_write();
  flush_for_reading();
  std::shared_lock lock(index_mutex_);
  StorePosition p;
  std::copy(std::begin(ctx.id.store_id), std::end(ctx.id.store_id), p.store_id);
  p.seq = index_.last_seq();
  if (const auto newest = index_.extents_from(p.seq); p.seq != 0 && !newest.empty()) {
    p.nonce = newest.back()->segment->nonce;
    p.first_page = newest.back()->first_page;
  }
  return p;
}

// Returns the extents after `since`. An extent has the rows of all partitions, merged ones too, so that these extents
// together have every change, if none of them is missing and the one before them is the one of `since`.
std::vector<std::shared_ptr<const Extent>> SsdStore::Impl::extents_since(const StorePosition& since,
                                                                         std::string* cause) {
  auto life = alive();
  const auto write = begin_write();
  flush_for_reading();
  std::shared_lock lock(index_mutex_);
  if (!std::equal(std::begin(since.store_id), std::end(since.store_id), std::begin(ctx.id.store_id))) {
    *cause = ctx.path + " is another store";
    return {};
  }
  if (since.first_page == 0) {
    *cause = "the log of " + ctx.path + " was empty at that version";
    return {};
  }
  auto found = index_.extents_from(since.seq);
  if (since.seq > index_.last_seq() ||
      (!found.empty() && found.front()->seq == since.seq &&
       (found.front()->segment->nonce != since.nonce || found.front()->first_page != since.first_page))) {
    *cause = ctx.path + " was restored from an earlier commit";
    return {};
  }
  const uint64_t needed = index_.last_seq() - since.seq + 1;
  if (found.size() != needed) {
    *cause = "the log of " + ctx.path + " was merged, or rows were loaded without it";
    return {};
  }
  return found;
}

void SsdStore::Impl::keep_log(const StorePosition& since, bool replace) {
  auto life = alive();
  if (options_.read_only) return;  // nothing is merged here, and the files belong to the process that writes
  {
    std::unique_lock lock(index_mutex_);
    if (since.first_page == 0 || (!replace && index_.keeps_log())) return;
    index_.keep_log(since.seq, 4 * options_.min_log_bytes);
  }
  catalog_.collect();
}

namespace {

class LogChanges : public SsdStore::Changes {
 public:
  LogChanges(std::shared_ptr<SsdStore::Impl> impl, std::vector<std::shared_ptr<const Extent>> extents)
      : impl_(std::move(impl)) {
    for (auto& extent : extents) rows_ += extent->rows;
    PartitionView view{0, std::numeric_limits<uint64_t>::max(), nullptr, std::move(extents)};
    cursor_ = std::make_unique<PartitionCursor>(impl_->ctx, std::move(view), impl_->ctx.sizes.merge_bytes, true);
  }

  size_t next(size_t max_rows, uint64_t* keys, uint8_t* rows, uint8_t* deleted) override {
    const size_t row_bytes = impl_->ctx.g.row_bytes;
    size_t n = 0;
    for (; n < max_rows && cursor_->next(); ++n) {
      keys[n] = cursor_->key();
      deleted[n] = cursor_->row() == nullptr;
      if (!deleted[n]) std::memcpy(rows + n * row_bytes, cursor_->row(), row_bytes);
    }
    return n;
  }

  uint64_t rows() const override { return rows_; }

 private:
  std::shared_ptr<SsdStore::Impl> impl_;
  std::unique_ptr<PartitionCursor> cursor_;
  uint64_t rows_ = 0;
};

}  // namespace

StorePosition SsdStore::position() { return impl_->position(); }

void SsdStore::keep_log(const StorePosition& since, bool replace) { impl_->keep_log(since, replace); }

std::unique_ptr<SsdStore::Changes> SsdStore::changes_since(const StorePosition& since, std::string* cause) {
  auto extents = impl_->extents_since(since, cause);
  if (extents.empty()) return nullptr;
  extents.erase(extents.begin());  // that of `since`
  return std::make_unique<LogChanges>(impl_, std::move(extents));
}

}  // namespace thermocline
