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
  const auto& extents = index_.live_extents();
  if (!extents.empty() && extents.back()->seq == p.seq) {
    p.nonce = extents.back()->segment->nonce;
    p.first_page = extents.back()->first_page;
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
  const auto& live = index_.live_extents();
  auto at = std::lower_bound(live.begin(), live.end(), since.seq, [](auto& e, uint64_t seq) { return e->seq < seq; });
  if (since.seq > index_.last_seq() ||
      (at != live.end() && (*at)->seq == since.seq &&
       ((*at)->segment->nonce != since.nonce || (*at)->first_page != since.first_page))) {
    *cause = ctx.path + " was restored from an earlier commit";
    return {};
  }
  const uint64_t needed = index_.last_seq() - since.seq + 1;
  if (static_cast<uint64_t>(live.end() - at) != needed) {
    *cause = "the log of " + ctx.path + " was merged, or rows were loaded without it";
    return {};
  }
  return {at, live.end()};
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

std::unique_ptr<SsdStore::Changes> SsdStore::changes_since(const StorePosition& since, std::string* cause) {
  auto extents = impl_->extents_since(since, cause);
  if (extents.empty()) return nullptr;
  extents.erase(extents.begin());  // that of `since`
  return std::make_unique<LogChanges>(impl_, std::move(extents));
}

}  // namespace thermocline
