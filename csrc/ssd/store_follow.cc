// Rows of a range that change after a scan of it began: SsdStore::Scan::changed().
#include <algorithm>
#include <cstring>
#include <utility>

#include "ssd/impl.h"

namespace thermocline {

using namespace ssd;

namespace {

constexpr size_t kEntryBytes = 80;    // of the map and the allocator, per row
constexpr uint64_t kShareOfScan = 2;  // a scan begins with one of so many bytes that are left: changes take others
constexpr uint64_t kPieces = 256;     // of a range, each with its changes
constexpr int kReads = 8;             // in flight, of all scans: lookups beside them have dozens

}  // namespace

PreadPool& SsdStore::Impl::scan_io() {
  std::call_once(scan_io_once_, [this] { scan_io_ = std::make_unique<PreadPool>(kReads); });
  return *scan_io_;
}

SsdStore::Impl::Followed::Followed(Context& ctx, KeyRange range) : range(range), ctx_(ctx) {
  while ((range.hi - range.lo) >> shift_ >= kPieces) ++shift_;
  rows.resize(((range.hi - range.lo) >> shift_) + 1);
  reserve(rows.size() * sizeof(Rows));
}

uint64_t SsdStore::Impl::change_bytes() const { return ctx.g.row_bytes + kEntryBytes; }

std::optional<SsdStore::Impl::RangeView> SsdStore::Impl::view(const std::shared_ptr<Followed>& followed, uint64_t kept,
                                                              uint64_t buffers) {
  auto life = alive();
  std::unique_lock lock(index_mutex_);
  const uint64_t room = merger_->spare();
  if (kept + buffers > room / kShareOfScan) return std::nullopt;
  RangeView out = view_locked(followed->range);
  uint64_t cursor = 0;
  for (auto& view : out.partitions) {
    cursor = std::max(cursor, PartitionCursor::memory(ctx.g, view, ctx.sizes.merge_bytes));
  }
  const uint64_t changes = out.buffered.size() * change_bytes();
  if (kept + buffers + cursor > room / kShareOfScan || kept + buffers + cursor + changes > room) return std::nullopt;
  followed->buffers = buffers + cursor;
  followed->reserve(kept + followed->buffers + changes);
  for (auto& [key, row] : out.buffered) {  // the first changes: so the rows of the scan are in hash order
    followed->rows[followed->piece(hash_key(key))].emplace(key, std::move(row));
  }
  out.buffered.clear();
  std::erase_if(followed_, [](auto& each) { return each.expired(); });
  followed_.push_back(followed);
  return out;
}

void SsdStore::Impl::end_reading(Followed& followed) {
  std::unique_lock lock(index_mutex_);
  followed.release(std::exchange(followed.buffers, 0));
}

void SsdStore::Impl::follow(Followed& followed, uint64_t key, const uint8_t* row, uint64_t& room) const {
  if (followed.lost || !followed.range.contains(key)) return;
  if (row && deletions_.find(key) >= 0) return;  // deleted while its put() was in progress: that is kept
  const auto [kept, added] = followed.rows[followed.piece(hash_key(key))].try_emplace(key);
  if (added) {
    if (change_bytes() > room) {
      uint64_t rows = 0;
      for (auto& piece : followed.rows) rows += std::exchange(piece, {}).size();
      followed.lost = true;
      followed.release((rows - 1) * change_bytes());
      room += (rows - 1) * change_bytes();
      return;
    }
    followed.reserve(change_bytes());
    room -= change_bytes();
  }
  auto& to = kept->second;
  if (!row) {
    to.reset();
  } else {
    if (!to) to = std::make_unique<uint8_t[]>(ctx.g.row_bytes);
    std::memcpy(to.get(), row, ctx.g.row_bytes);
  }
}

void SsdStore::Impl::follow(const uint64_t* keys, size_t n, const RowsIn* rows) {
  if (followed_.empty()) return;
  uint64_t room = merger_->spare();
  for (auto& each : followed_) {
    const auto followed = each.lock();
    for (size_t i = 0; followed && i < n; ++i) follow(*followed, keys[i], rows ? rows->at(i) : nullptr, room);
  }
}

void SsdStore::Impl::follow(const std::vector<Item>& by_hash, const uint64_t* keys, const RowsIn* rows) {
  if (followed_.empty()) return;
  uint64_t room = merger_->spare();
  for (auto& each : followed_) {
    const auto followed = each.lock();
    if (!followed) continue;
    auto item = std::lower_bound(by_hash.begin(), by_hash.end(), followed->range.lo,
                                 [](const Item& a, uint64_t lo) { return a.hash < lo; });
    for (; item != by_hash.end() && item->hash <= followed->range.hi; ++item) {
      follow(*followed, keys[item->index], rows ? rows->at(item->index) : nullptr, room);
    }
  }
}

std::optional<size_t> SsdStore::Impl::changed(const Followed& followed, KeyRange part, size_t max, uint64_t* keys,
                                              uint8_t* rows, uint8_t* deleted) {
  auto life = alive();
  std::shared_lock lock(index_mutex_);
  if (followed.lost) return std::nullopt;
  const size_t first = followed.piece(part.lo), last = followed.piece(part.hi);
  const auto each = [&](const auto& f) {
    for (size_t piece = first; piece <= last; ++piece) {
      for (const auto& [key, row] : followed.rows[piece]) {
        if (part.contains(key)) f(key, row.get());
      }
    }
  };
  size_t n = 0;
  each([&](uint64_t, const uint8_t*) { ++n; });
  if (n > max) return n;
  size_t i = 0;
  each([&](uint64_t key, const uint8_t* row) {
    keys[i] = key;
    deleted[i] = row == nullptr;
    if (row) std::memcpy(rows + i * ctx.g.row_bytes, row, ctx.g.row_bytes);
    ++i;
  });
  return n;
}

}  // namespace thermocline
