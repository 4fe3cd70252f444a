// SsdStore::check() and find_damage(): verify every page of every file, and the invariants of the index.
#include <algorithm>
#include <set>

#include "ssd/impl.h"

namespace thermocline {

using namespace ssd;

void SsdStore::Impl::check_invariants() {
  std::shared_lock lock(index_mutex_);
  uint64_t pending = 0, base_rows = 0, next = 0;
  for (size_t i = 0; i < index_.size(); ++i) {
    const Partition& p = index_.partition(i);
    if (p.lo != next || p.hi < p.lo) throw Error(ctx.path + ": the partitions do not cover all hashes");
    next = p.hi + 1;
    pending += p.pending;
    base_rows += p.base ? p.base->rows : 0;
    if (p.pending == 0 && !p.tables.empty()) throw Error(ctx.path + ": a merged partition still has a table");
  }
  if (next != 0) throw Error(ctx.path + ": the partitions do not reach the last hash");
  if (pending != index_.pending() || base_rows != index_.base_rows())
    throw Error(ctx.path + ": base + log rows of the partitions are " + std::to_string(base_rows) + " + " +
                std::to_string(pending) + ", the counters are " + std::to_string(index_.base_rows()) + " + " +
                std::to_string(index_.pending()));
  for (auto& file : index_.files())
    if (file->file->size() < file->pages * ctx.g.page_bytes)
      throw_corrupt(file->file->path(), "the file has fewer than " + std::to_string(file->pages) + " pages");
}

// Reads every page of a base file: header, rows in order, fences, filter.
void SsdStore::Impl::check_base(const PartitionRecord& record, uint64_t lo, uint64_t hi) {
  std::shared_ptr<const BaseFile> base = open_base(ctx, record, true);
  auto fail = [&](const std::string& cause) { throw_corrupt(base->data->file->path(), cause); };
  PartitionCursor rows(ctx, {0, ~uint64_t{0}, base, {}}, ctx.sizes.merge_bytes);
  uint64_t n = 0, last = 0;
  while (rows.next()) {
    uint64_t hash = hash_key(rows.key());
    if (n > 0 && hash <= last) fail("the rows are out of order");
    if (hash < lo || hash > hi) fail("a row belongs to another partition");
    if (n % ctx.g.rows_per_page() == 0 && base->fences.at(n / ctx.g.rows_per_page()) != hash)
      fail("a fence is not the first hash of its page");
    if (!base->filter.may_contain(hash)) fail("the filter excludes a row of the file");
    last = hash;
    ++n;
  }
  if (n != base->rows)
    fail("the file has " + std::to_string(n) + " rows, the manifest lists " + std::to_string(base->rows));
}

// Reads every page of an extent: its key column, and the same keys on its row pages.
void SsdStore::Impl::check_extent(const Extent& extent) {
  const std::string& path = extent.segment->file->path();
  Extent copy = extent;
  std::vector<HashAndPage> keys;
  keys.reserve(extent.rows);
  read_extent_keys(ctx, copy, [&](uint64_t hash, uint32_t page) { keys.push_back({hash, page}); });
  if (!extent.fences.empty() && copy.fences != extent.fences)
    throw_corrupt(path, "the fences of extent " + std::to_string(extent.seq) + " are wrong");
  if (!extent.tombstones) {
    PartitionCursor rows(ctx, {0, ~uint64_t{0}, nullptr, {std::make_shared<Extent>(copy)}}, ctx.sizes.merge_bytes);
    for (auto& key : keys)
      if (!rows.next() || hash_key(rows.key()) != key.hash)
        throw_corrupt(
            path, "the keys of the row pages of extent " + std::to_string(extent.seq) + " differ from its key pages");
  }
  if (extent.fences.empty()) return;  // an extent of another epoch, not in the index
  std::shared_lock lock(index_mutex_);
  for (auto& key : keys) {
    const Partition& p = index_.partition(index_.partition_of(key.hash));
    if (extent.seq <= p.merged_seq) continue;
    bool found = false;
    for (auto& table : p.tables) table->find(key.hash, [&](uint32_t v) { found |= v == extent.vbase + key.page; });
    if (!found) throw Error(ctx.path + ": the index has no entry for a row of extent " + std::to_string(extent.seq));
    if (p.pending == 0) throw Error(ctx.path + ": rows of extent " + std::to_string(extent.seq) + " are not counted");
  }
}

std::vector<std::string> SsdStore::Impl::find_damage(std::exception_ptr* first) {
  auto life = alive();
  std::lock_guard committing(commit_mutex_);  // a release would remove manifests
  const auto write = begin_write();
  auto paused = merger_->pause();  // a merge would replace partitions
  std::vector<std::string> found;
  auto add = [&](const Error& e) {
    found.push_back(e.what());
    if (first && !*first) *first = std::current_exception();
  };
  auto collect = [&](auto&& verify) {  // goes on after damage
    try {
      verify();
    } catch (const CorruptionError& e) {
      add(e);
    } catch (const IoError& e) {
      if (e.code == 0 || !is_unreadable(e)) throw;  // code 0: a concurrent writer may have truncated the file
      add(e);
    }
  };
  collect([&] { check_invariants(); });
  std::set<uint64_t> bases;  // numbers of checked files
  auto check_manifest = [&](const Manifest& m) {
    for (size_t i = 0; i < m.partitions.size(); ++i) {
      const PartitionRecord& r = m.partitions[i];
      uint64_t hi = i + 1 < m.partitions.size() ? m.partitions[i + 1].lo - 1 : ~uint64_t{0};
      if (r.file && bases.insert(r.file).second) collect([&] { check_base(r, r.lo, hi); });
    }
  };
  Manifest now;
  std::vector<std::shared_ptr<Extent>> live;
  {
    std::shared_lock lock(index_mutex_);
    now = index_.manifest();
    live.assign(index_.live_extents().begin(), index_.live_extents().end());
  }
  check_manifest(now);
  for (auto& extent : live) collect([&] { check_extent(*extent); });
  // Other retained epochs: the files and extents that the current state does not share.
  for (uint64_t epoch : catalog_.epochs()) {
    Manifest m;
    collect([&] { m = catalog_.read(epoch); });
    check_manifest(m);
    for (auto& s : m.segments) {
      std::shared_ptr<DataFile> segment;
      collect([&] { segment = open_data_file(ctx, FileKind::kSegment, s.file, s.nonce, s.pages); });
      if (!segment) continue;
      for (auto& r : m.extents) {
        bool seen = std::any_of(live.begin(), live.end(),
                                [&](auto& e) { return e->seq == r.seq && e->segment->number == r.segment; });
        if (r.segment != s.file || seen) continue;
        Extent extent;
        extent.seq = r.seq;
        extent.segment = segment;
        extent.first_page = static_cast<uint32_t>(r.first_page);
        extent.rows = r.rows;
        extent.tombstones = r.tombstones != 0;
        collect([&] { check_extent(extent); });
      }
    }
  }
  return found;
}

}  // namespace thermocline
