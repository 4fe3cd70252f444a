// check(): every byte and every book of a store.
#include <algorithm>

#include "ssd/impl.h"

namespace thermocline {

using namespace ssd;

// Reads every page of one partition; verifies order, counts, fences, and that the index finds every newer row.
void SsdStore::Impl::check_partition(size_t i) {
  PartitionView view;
  {
    std::shared_lock lock(index_mutex_);
    view = index_.view(i);
  }
  auto wrong = [&](const std::string& what) {
    throw CorruptionError(ctx.path + ": partition " + std::to_string(i) + ": " + what);
  };
  if (view.base) {
    const BaseFile& base = *view.base;
    PartitionCursor rows(ctx, {view.lo, view.hi, view.base, {}}, ctx.sizes.merge_bytes);
    uint64_t n = 0, last = 0;
    while (rows.next()) {
      uint64_t hash = hash_key(rows.key());
      if (n > 0 && hash <= last) wrong("the base's rows are out of order");
      if (n % ctx.g.rows_per_page() == 0 && base.fences.at(n / ctx.g.rows_per_page()) != hash)
        wrong("a fence of the base is wrong");
      last = hash;
      ++n;
    }
    if (n != base.rows)
      wrong("the base has " + std::to_string(n) + " rows, the manifest says " + std::to_string(base.rows));
  }
  PartitionCursor all(ctx, view, ctx.sizes.merge_bytes);
  while (all.next()) {
  }
  std::vector<uint32_t> vpages;
  uint64_t entries = 0;
  for (auto& extent : view.extents) {
    Extent copy = *extent;
    read_extent_keys(ctx, copy, [&](uint64_t hash, uint32_t page) {
      if (hash < view.lo || hash > view.hi) return;
      ++entries;
      std::shared_lock lock(index_mutex_);
      index_.candidates(index_.partition(i), hash, vpages);
      if (std::find(vpages.begin(), vpages.end(), extent->vbase + page) == vpages.end())
        wrong("the index lacks a row of extent " + std::to_string(extent->seq));
    });
    if (copy.fences != extent->fences) wrong("the fences of extent " + std::to_string(extent->seq) + " are wrong");
  }
  std::shared_lock lock(index_mutex_);
  if (entries > 0 && index_.partition(i).pending == 0) wrong("its newer rows are not counted");
}

void SsdStore::Impl::check() {
  auto life = alive();
  std::lock_guard write(write_mutex_);
  // No merge may replace partitions meanwhile.
  auto paused = merger_->pause();
  size_t partitions;
  {
    std::shared_lock lock(index_mutex_);
    partitions = index_.size();
    uint64_t pending = 0, base_rows = 0, next = 0;
    for (size_t i = 0; i < partitions; ++i) {
      const Partition& p = index_.partition(i);
      if (p.lo != next || p.hi < p.lo) throw Error(ctx.path + ": the partitions do not cover all keys");
      next = p.hi + 1;
      pending += p.pending;
      base_rows += p.base ? p.base->rows : 0;
      if (p.pending == 0 && !p.tables.empty()) throw Error(ctx.path + ": a merged partition still has a table");
    }
    if (next != 0) throw Error(ctx.path + ": the partitions do not reach the last key");
    if (pending != index_.pending() || base_rows != index_.base_rows())
      throw Error(ctx.path + ": rows counted " + std::to_string(base_rows) + " + " + std::to_string(pending) +
                  ", booked " + std::to_string(index_.base_rows()) + " + " + std::to_string(index_.pending()));
    for (auto& file : index_.files())
      if (file->file->size() < file->pages * ctx.g.page_bytes)
        throw CorruptionError(file->file->path() + ": the file is shorter than its books say");
  }
  for (size_t i = 0; i < partitions; ++i) check_partition(i);
  // Every retained epoch: its manifest is whole and its files are there.
  for (uint64_t epoch : catalog_.epochs()) {
    Manifest m = catalog_.read(epoch);
    auto need = [&](FileKind kind, uint64_t number) {
      if (!ctx.fs->exists(ctx.file_path(kind, number)))
        throw CorruptionError(ctx.file_path(kind, number) + ": the file is missing, epoch " + std::to_string(epoch) +
                              " needs it");
    };
    for (auto& p : m.partitions)
      if (p.file) need(FileKind::kBase, p.file);
    for (auto& s : m.segments) need(FileKind::kSegment, s.file);
  }
}

}  // namespace thermocline
