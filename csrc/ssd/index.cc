#include "ssd/index.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <unordered_set>

namespace thermocline::ssd {

void Index::clear() {
  partitions_.clear();
  extents_.clear();
  forget_log();
  segment_starts_.clear();
  last_seq_ = pending_ = base_rows_ = 0;
  keeps_filters_ = true;
}

void Index::load_partitions(std::vector<Partition> partitions) {
  if (partitions.empty()) {
    partitions.emplace_back();
    partitions.back().hi = std::numeric_limits<uint64_t>::max();
  }
  for (auto& p : partitions) {
    if (p.base) base_rows_ += p.base->rows;
    partitions_.push_back(std::make_shared<Partition>(std::move(p)));
  }
}

size_t Index::partition_of(uint64_t hash) const {
  auto after = std::upper_bound(partitions_.begin(), partitions_.end(), hash,
                                [](uint64_t h, const auto& p) { return h < p->lo; });
  return static_cast<size_t>(after - partitions_.begin()) - 1;
}

void Index::insert(Partition& p, uint64_t hash, uint32_t vpage, size_t expected) {
  ++p.pending;
  if (!p.tables.empty() && p.tables.back()->insert(hash, vpage)) return;
  // A quarter of the rows that the partition collects between merges, so that memory grows in small increments.
  uint64_t usual = p.base ? static_cast<uint64_t>(static_cast<double>(p.base->rows) * log_ratio_ / 4) : 0;
  uint64_t capacity = std::max({uint64_t{64}, usual, expected, p.pending / 4});
  capacity = std::min<uint64_t>(capacity + capacity / 6 + 8, 1u << 30);
  // If the last table refused an entry before it was full, rows arrive in hash order and crowd one region: mix them.
  const bool mixed = !p.tables.empty() && (p.tables.back()->mixed() || !p.tables.back()->full());
  p.tables.push_back(std::make_shared<DeltaTable>(p.lo, p.hi, static_cast<uint32_t>(capacity), mixed));
  if (!p.tables.back()->insert(hash, vpage)) throw Error("index: a new delta table refused its first entry");
}

void Index::add_extent(std::shared_ptr<Extent> extent, const std::vector<HashAndPage>& rows) {
  require_newer(*extent);
  pending_ += insert_rows(*extent, rows.data(), rows.data() + rows.size());
  append(std::move(extent));
}

void Index::add_extents(std::span<const std::shared_ptr<Extent>> extents,
                        std::span<const std::vector<HashAndPage>> rows, ThreadPool& threads) {
  constexpr size_t kGroupsPerThread = 4;  // partitions differ in the number of rows
  const size_t groups = std::min(partitions_.size(), kGroupsPerThread * static_cast<size_t>(threads.size()));
  std::atomic<uint64_t> inserted{0};
  threads.parallel(groups, [&](size_t group) {
    const uint64_t lo = partitions_[partitions_.size() * group / groups]->lo;
    const uint64_t hi = partitions_[partitions_.size() * (group + 1) / groups - 1]->hi;
    for (size_t i = 0; i < extents.size(); ++i) {
      const auto first = std::lower_bound(rows[i].begin(), rows[i].end(), lo,
                                          [](const HashAndPage& row, uint64_t h) { return row.hash < h; });
      const auto end =
          std::upper_bound(first, rows[i].end(), hi, [](uint64_t h, const HashAndPage& row) { return h < row.hash; });
      inserted += insert_rows(*extents[i], rows[i].data() + (first - rows[i].begin()),
                              rows[i].data() + (end - rows[i].begin()));
    }
  });
  pending_ += inserted;
  for (auto& extent : extents) {
    require_newer(*extent);
    append(extent);
  }
}

void Index::require_newer(const Extent& extent) const {
  if (extent.seq <= last_seq_)
    throw Error("index: extent " + std::to_string(extent.seq) + " is not newer than " + std::to_string(last_seq_));
}

uint64_t Index::insert_rows(const Extent& extent, const HashAndPage* row, const HashAndPage* end) {
  uint64_t inserted = 0;
  for (size_t at = row < end ? partition_of(row->hash) : 0; row < end;) {
    while (row->hash > partitions_[at]->hi) ++at;
    Partition& p = *partitions_[at];
    const HashAndPage* next = row;
    while (next < end && next->hash <= p.hi) ++next;
    if (extent.seq > p.merged_seq) {
      inserted += static_cast<uint64_t>(next - row);
      for (; row < next; ++row) insert(p, row->hash, extent.vbase + row->page, static_cast<size_t>(next - row));
    }
    row = next;
  }
  return inserted;
}

void Index::append(std::shared_ptr<Extent> extent) {
  last_seq_ = extent->seq;
  if (segment_starts_.empty() || segment_starts_.back()->segment != extent->segment) segment_starts_.push_back(extent);
  extents_.push_back(std::move(extent));
}

bool Index::candidate(const Partition& p, uint64_t hash, const uint32_t* before_page, uint32_t* vpage) {
  // Log page numbers ascend with time and may wrap around: compare distances.
  auto before = [](uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) < 0; };
  bool found = false;
  for (auto& table : p.tables) {
    table->find(hash, [&](uint32_t page) {
      if ((before_page && !before(page, *before_page)) || (found && before(page, *vpage))) return;
      *vpage = page;
      found = true;
    });
  }
  return found;
}

uint64_t Index::mergeable() const {
  uint64_t rows = 0;
  for (auto& p : partitions_)
    if (p->damage.empty()) rows += p->pending;
  return rows;
}

LogPage Index::log_page(uint32_t vpage) const {
  auto after =
      std::upper_bound(segment_starts_.begin(), segment_starts_.end(), vpage,
                       [](uint32_t v, const auto& start) { return static_cast<int32_t>(v - start->vbase) < 0; });
  if (after == segment_starts_.begin()) throw Error("index: an entry refers to a page before the start of the log");
  const Extent& start = **(after - 1);
  return {start.segment, vpage - start.vbase};
}

bool Index::base_page(const BaseFile& base, uint64_t hash, uint32_t* page, uint32_t hint) {
  auto& f = base.fences;
  if (f.empty() || hash < f[0] || !base.filter.may_contain(hash)) return false;
  // Batches are sorted: gallop from the last page found.
  size_t low = hint < f.size() && f[hint] <= hash ? hint : 0, stride = 1;
  while (low + stride < f.size() && f[low + stride] <= hash) {
    low += stride;
    stride *= 2;
  }
  size_t high = std::min(low + stride, f.size());
  *page = static_cast<uint32_t>(std::upper_bound(f.begin() + low, f.begin() + high, hash) - f.begin() - 1);
  return true;
}

PartitionView Index::view(size_t i) const {
  const Partition& p = *partitions_[i];
  PartitionView view{p.lo, p.hi, p.base, {}};
  if (p.pending > 0)
    for (auto& e : extents_)
      if (e->seq > p.merged_seq) view.extents.push_back(e);
  return view;
}

Manifest Index::manifest() const {
  Manifest m;
  for (auto& p : partitions_) {
    PartitionRecord r{p->lo, p->merged_seq, 0, 0, 0, 0, 0};
    if (p->base) {
      r.file = p->base->data->number;
      r.nonce = p->base->data->nonce;
      r.rows = p->base->rows;
      r.pages = p->base->pages();
      r.filter_bytes = p->base->filter_bytes;
    }
    m.partitions.push_back(r);
  }
  for (auto& e : extents_) {
    if (m.segments.empty() || m.segments.back().file != e->segment->number)
      m.segments.push_back({e->segment->number, e->segment->nonce, 0});
    m.segments.back().pages = e->first_page + e->pages(g_);
    m.extents.push_back({e->seq, e->segment->number, e->first_page, e->rows, e->tombstones ? 1u : 0u});
  }
  m.next_seq = last_seq_ + 1;
  return m;
}

std::vector<std::shared_ptr<DataFile>> Index::files() const {
  std::vector<std::shared_ptr<DataFile>> out;
  for (auto& p : partitions_)
    if (p->base) out.push_back(p->base->data);
  for (auto& start : segment_starts_) out.push_back(start->segment);
  return out;
}

bool Index::begin_merge(Merge* merge, const std::function<bool(const Merge&)>& may_begin) {
  size_t best = partitions_.size();
  for (size_t i = 0; i < partitions_.size(); ++i) {
    Partition& p = *partitions_[i];
    if (p.pending == 0) p.merged_seq = last_seq_;  // the log has no rows of this partition
    if (p.pending == 0 || !p.damage.empty() || p.merging) continue;
    if (best == partitions_.size()) best = i;
    const Partition& b = *partitions_[best];
    if (p.merged_seq < b.merged_seq || (p.merged_seq == b.merged_seq && p.pending > b.pending)) best = i;
  }
  if (best == partitions_.size()) return false;
  describe(best, merge);
  if (!may_begin(*merge)) return false;
  freeze(merge);
  merge->partition->merging = true;
  return true;
}

void Index::describe(size_t i, Merge* merge) const {
  Partition& p = *partitions_[i];
  merge->partition = &p;
  merge->view = view(i);
  merge->seq = last_seq_;
  merge->frozen_tables = p.tables.size();
  merge->frozen_pending = p.pending;
  merge->rows = p.pending + (p.base ? p.base->rows : 0);
}

void Index::freeze(Merge* merge) {
  Partition& p = *merge->partition;
  // Entries that arrive during the merge go to a new table, which is kept after it.
  if (p.tables.back()->count() == 0) --merge->frozen_tables;  // left by a failed merge
  else p.tables.push_back(std::make_shared<DeltaTable>(p.lo, p.hi, static_cast<uint32_t>(p.pending / 8 + 64)));
}

bool Index::begin_copy(Merge* copy, uint64_t before_seq) {
  for (size_t i = 0; i < partitions_.size(); ++i) {
    const Partition& p = *partitions_[i];
    if (p.damage.empty() || p.log_damaged || p.pending == 0 || p.merged_seq >= before_seq) continue;
    describe(i, copy);
    freeze(copy);
    copy->view.base = nullptr;
    return true;
  }
  return false;
}

void Index::finish_copy(const Merge& copy) {
  Partition& p = *copy.partition;
  p.tables.erase(p.tables.begin(), p.tables.begin() + static_cast<ptrdiff_t>(copy.frozen_tables));
  p.pending -= copy.frozen_pending;
  pending_ -= copy.frozen_pending;
  if (p.pending == 0) p.tables.clear();
  p.merged_seq = copy.seq;
  ++copies_;
  drop_merged_extents();
}

Index::SetAside Index::set_aside() const {
  SetAside out;
  uint64_t merged = last_seq_;  // by all other partitions
  for (auto& p : partitions_) {
    if (!p->damage.empty()) {
      ++out.partitions;
      if (p->base) out.base_bytes += p->base->bytes(g_);
    } else if (p->pending > 0) {
      merged = std::min(merged, p->merged_seq);
    }
  }
  if (out.partitions == 0) return out;
  for (auto& e : extents_) {
    if (e->seq > merged) break;
    ++out.extents;
    out.log_bytes += e->bytes(g_);
  }
  return out;
}

uint64_t Index::filter_bytes() const {
  uint64_t sum = 0;
  for (auto& p : partitions_)
    if (p->base) sum += p->base->filter.bytes();
  return sum;
}

void Index::drop_filters() {
  keeps_filters_ = false;
  for (auto& p : partitions_)
    if (p->base) p->base->filter = Filter();
}

bool Index::begin_load(uint64_t first, uint64_t last, Merge* merge) {
  Partition& p = *partitions_[partition_of(first)];
  if (p.base || p.pending > 0 || last > p.hi) return false;
  merge->partition = &p;
  merge->seq = last_seq_;
  return true;
}

void Index::finish_merge(const Merge& merge, std::vector<Partition> pieces) {
  size_t at = partition_of(merge.partition->lo);
  if (partitions_[at].get() != merge.partition) throw Error("index: the merged partition was replaced meanwhile");
  std::shared_ptr<Partition> old = partitions_[at];
  uint64_t arrived = old->pending - merge.frozen_pending;
  pending_ -= old->pending;
  if (old->base) base_rows_ -= old->base->rows;
  std::vector<std::shared_ptr<Partition>> fresh;
  for (auto& piece : pieces) {
    piece.merged_seq = merge.seq;
    if (arrived > 0) {
      // Pieces share the tables filled meanwhile. Each counts an equal part of their rows, rounded up: 0 means none.
      piece.tables.assign(old->tables.begin() + static_cast<ptrdiff_t>(merge.frozen_tables), old->tables.end());
      piece.pending = (arrived + pieces.size() - 1) / pieces.size();
    }
    pending_ += piece.pending;
    if (piece.base) base_rows_ += piece.base->rows;
    if (piece.base && !keeps_filters_) piece.base->filter = Filter();
    fresh.push_back(std::make_shared<Partition>(std::move(piece)));
  }
  partitions_.erase(partitions_.begin() + static_cast<ptrdiff_t>(at));
  partitions_.insert(partitions_.begin() + static_cast<ptrdiff_t>(at), fresh.begin(), fresh.end());
  drop_merged_extents();
}

void Index::drop_merged_extents() {
  uint64_t merged = last_seq_;
  for (auto& p : partitions_)
    if (p->pending > 0) merged = std::min(merged, p->merged_seq);
  while (!extents_.empty() && extents_.front()->seq <= merged) {
    auto dropped = extents_.front();
    extents_.pop_front();
    // The segment stays while it has a later extent.
    if (extents_.empty() || extents_.front()->segment != dropped->segment) segment_starts_.pop_front();
    if (kept_from_ != 0 && dropped->seq >= kept_from_) {
      kept_bytes_ += dropped->bytes(g_);
      kept_.push_back(std::move(dropped));
    }
  }
  if (kept_bytes_ > kept_limit_ && kept_bytes_ > base_bytes()) forget_log();
  for (auto& p : partitions_)
    if (p->pending == 0) p->merged_seq = last_seq_;
}

void Index::keep_log(uint64_t seq, uint64_t limit) {
  kept_from_ = seq;
  kept_limit_ = limit;
  while (!kept_.empty() && kept_.front()->seq < seq) {
    kept_bytes_ -= kept_.front()->bytes(g_);
    kept_.pop_front();
  }
}

void Index::forget_log() {
  kept_.clear();
  kept_from_ = kept_bytes_ = 0;
}

std::vector<std::shared_ptr<const Extent>> Index::extents_from(uint64_t seq) const {
  std::vector<std::shared_ptr<const Extent>> found;
  for (const auto* extents : {&kept_, &extents_})
    for (auto& e : *extents)
      if (e->seq >= seq) found.push_back(e);
  return found;
}

uint64_t Index::base_bytes() const {
  uint64_t sum = 0;
  for (auto& p : partitions_)
    if (p->base) sum += p->base->bytes(g_);
  return sum;
}

uint64_t Index::log_bytes() const {
  uint64_t sum = 0;
  for (auto& e : extents_) sum += e->bytes(g_);
  return sum;
}

uint64_t Index::log_rows() const {
  uint64_t sum = 0;
  for (auto& e : extents_) sum += e->rows;
  return sum;
}

uint64_t Index::memory() const {
  uint64_t sum = partitions_.capacity() * sizeof(partitions_[0]);
  std::unordered_set<const DeltaTable*> shared;
  for (auto& p : partitions_) {
    sum += sizeof(Partition) + 32;
    if (p->base) sum += sizeof(BaseFile) + sizeof(DataFile) + p->base->fences.capacity() * 8 + p->base->filter.bytes();
    for (auto& t : p->tables)
      if (t.use_count() == 1 || shared.insert(t.get()).second) sum += t->memory();
  }
  for (const auto* extents : {&kept_, &extents_})
    for (auto& e : *extents) sum += sizeof(Extent) + 32 + e->fences.capacity() * 8;
  return sum;
}

void Index::throw_damage() const {
  for (auto& p : partitions_)
    if (p->damage_error) std::rethrow_exception(p->damage_error);
}

std::string Index::damage() const {
  for (auto& p : partitions_)
    if (!p->damage.empty()) return p->damage;
  return "";
}

}  // namespace thermocline::ssd
