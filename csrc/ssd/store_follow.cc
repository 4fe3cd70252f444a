// Rows of a range that change after a scan of it began: SsdStore::Scan::changed().
#include <algorithm>
#include <cstring>

#include "ssd/impl.h"

namespace thermocline {

using namespace ssd;

namespace {

constexpr size_t kMostBytes = 32u << 20;
constexpr size_t kEntryBytes = 80;  // of the map and the allocator, per row
constexpr int kReads = 8;           // in flight, of all scans: lookups beside them have dozens

}  // namespace

PreadPool& SsdStore::Impl::scan_io() {
  std::call_once(scan_io_once_, [this] { scan_io_ = std::make_unique<PreadPool>(kReads); });
  return *scan_io_;
}

SsdStore::Impl::RangeView SsdStore::Impl::view(const std::shared_ptr<Followed>& followed) {
  auto life = alive();
  std::unique_lock lock(index_mutex_);
  RangeView out = view_locked(followed->range);
  uint64_t cursor = 0;
  for (auto& view : out.partitions) {
    cursor = std::max(cursor, PartitionCursor::memory(ctx.g, view, ctx.sizes.merge_bytes));
  }
  followed->set_memory(followed->scan_memory + cursor, 0);
  followed->most = std::min<uint64_t>(kMostBytes, merger_->spare());
  followed->rows.swap(out.buffered);  // the first changes: so the rows of the scan are in hash order
  count_changes(*followed);
  std::erase_if(followed_, [](auto& each) { return each.expired(); });
  followed_.push_back(followed);
  return out;
}

void SsdStore::Impl::count_changes(Followed& followed) const {
  const uint64_t bytes = followed.rows.size() * (ctx.g.row_bytes + kEntryBytes);
  if (bytes > followed.most) {
    followed.lost = true;
    followed.rows.clear();
  }
  followed.set_memory(followed.scan_memory, followed.lost ? 0 : bytes);
}

void SsdStore::Impl::follow(Followed& followed, uint64_t key, const uint8_t* row) const {
  if (followed.lost || !followed.range.contains(key)) return;
  if (row && deletions_.find(key) >= 0) return;  // deleted while its put() was in progress: that is kept
  auto& kept = followed.rows[key];
  if (!row) {
    kept.reset();
  } else {
    if (!kept) kept = std::make_unique<uint8_t[]>(ctx.g.row_bytes);
    std::memcpy(kept.get(), row, ctx.g.row_bytes);
  }
  count_changes(followed);
}

void SsdStore::Impl::follow(const uint64_t* keys, size_t n, const RowsIn* rows) {
  for (auto& each : followed_) {
    const auto followed = each.lock();
    for (size_t i = 0; followed && i < n; ++i) follow(*followed, keys[i], rows ? rows->at(i) : nullptr);
  }
}

void SsdStore::Impl::follow(const std::vector<Item>& by_hash, const uint64_t* keys, const RowsIn* rows) {
  for (auto& each : followed_) {
    const auto followed = each.lock();
    if (!followed) continue;
    auto item = std::lower_bound(by_hash.begin(), by_hash.end(), followed->range.lo,
                                 [](const Item& a, uint64_t lo) { return a.hash < lo; });
    for (; item != by_hash.end() && item->hash <= followed->range.hi; ++item) {
      follow(*followed, keys[item->index], rows ? rows->at(item->index) : nullptr);
    }
  }
}

std::optional<size_t> SsdStore::Impl::changed(const Followed& followed, KeyRange part, size_t max, uint64_t* keys,
                                              uint8_t* rows, uint8_t* deleted) {
  auto life = alive();
  std::shared_lock lock(index_mutex_);
  if (followed.lost) return std::nullopt;
  size_t n = 0;
  for (const auto& [key, row] : followed.rows) n += part.contains(key);
  if (n > max) return n;
  size_t i = 0;
  for (const auto& [key, row] : followed.rows) {
    if (!part.contains(key)) continue;
    keys[i] = key;
    deleted[i] = row == nullptr;
    if (row) std::memcpy(rows + i * ctx.g.row_bytes, row.get(), ctx.g.row_bytes);
    ++i;
  }
  return n;
}

}  // namespace thermocline
