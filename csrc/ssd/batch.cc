// Lookups, puts and scans: whole batches through the index, the log and the files.
#include <algorithm>
#include <array>
#include <atomic>

#include "ssd/impl.h"

namespace thermocline {

using namespace ssd;

namespace {
constexpr size_t kPlanKeys = 1u << 20;  // of one plan: bounds the scratch memory of a call
constexpr size_t kMeasureFrom = 4096;   // reads that justify measuring the device
}  // namespace

// ---- reading

template <class Fn>
void SsdStore::Impl::for_each_plan(const uint64_t* keys, size_t n, Fn&& fn) {
  if (n > UINT32_MAX) throw Error(ctx.path + ": more than 2^32 keys in one call");
  // Large batches are cut by hash, not by position, so that each piece keeps the density of the whole.
  std::array<size_t, 257> start{};
  if (n > kPlanKeys) {
    for (size_t i = 0; i < n; ++i) ++start[(hash_key(keys[i]) >> 56) + 1];
    for (size_t b = 0; b < 256; ++b) start[b + 1] += start[b];
  }
  for (size_t b = 0; b < 256;) {
    size_t end = n > kPlanKeys ? b + 1 : 256;
    while (end < 256 && start[end + 1] - start[b] <= kPlanKeys) ++end;
    Plan plan;
    plan.items.reserve(n > kPlanKeys ? start[end] - start[b] : n);
    for (size_t i = 0; i < n; ++i) {
      uint64_t hash = hash_key(keys[i]), bucket = hash >> 56;
      if (bucket >= b && bucket < end) plan.items.push_back({hash, static_cast<uint32_t>(i)});
    }
    b = end;
    if (plan.items.empty()) continue;
    sort_items(plan.items);
    fn(plan);
  }
}

void SsdStore::Impl::take_from_buffer(Plan& plan, const uint64_t* keys, uint8_t* found, RowsOut rows) const {
  if (buffer_.size() == 0) return;
  size_t kept = 0;
  for (auto& item : plan.items) {
    int64_t at = buffer_.find(keys[item.index]);
    if (at < 0) {
      plan.items[kept++] = item;
    } else if (!buffer_.deleted(static_cast<uint32_t>(at))) {
      std::memcpy(rows.at(item.index), buffer_.row(static_cast<uint32_t>(at)), ctx.g.row_bytes);
      found[item.index] = 1;
    }
  }
  plan.items.resize(kept);
}

void SsdStore::Impl::get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) {
  auto life = alive();
  std::memset(found, 0, n);
  for_each_plan(keys, n, [&](Plan& plan) {
    {
      std::shared_lock lock(index_mutex_);
      take_from_buffer(plan, keys, found, rows);
      plan_reads(index_, plan);
    }
    if (plan.wants.size() >= kMeasureFrom) reader_.measure(plan);
    for (Plan rest = reader_.run(plan, keys, found, rows); !rest.items.empty();) {
      {
        std::shared_lock lock(index_mutex_);
        plan_reads(index_, rest);
      }
      rest = reader_.run(rest, keys, found, rows);
    }
  });
}

double SsdStore::Impl::read_floor(const uint64_t* keys, size_t n) {
  auto life = alive();
  double seconds = 0;
  for_each_plan(keys, n, [&](Plan& plan) {
    {
      std::shared_lock lock(index_mutex_);
      plan_reads(index_, plan);
    }
    if (plan.wants.size() >= kMeasureFrom) reader_.measure(plan);
    seconds += reader_.run_raw(plan);
  });
  return seconds;
}

// ---- writing

void SsdStore::Impl::put(const uint64_t* keys, size_t n, const RowsIn* rows) {
  auto life = alive();
  if (n == 0) return;
  std::lock_guard write(write_mutex_);
  require_writable();
  if (n > UINT32_MAX) throw Error(ctx.path + ": more than 2^32 keys in one call");
  bytes_put_ += n * (rows ? ctx.g.entry_bytes() : 8);
  add(keys, n, rows);
}

void SsdStore::Impl::add(const uint64_t* keys, size_t n, const RowsIn* rows) {
  if (n < buffer_.capacity() / 2) {
    if (buffer_.size() + n > buffer_.capacity()) {
      merger_->admit();
      flush_buffer();
    }
    std::unique_lock lock(index_mutex_);
    for (size_t i = 0; i < n; ++i) buffer_.set(keys[i], rows ? rows->at(i) : nullptr);
    return;
  }
  merger_->admit();
  flush_buffer();  // its rows are older than this batch
  const size_t most = log_.max_rows();
  for (size_t first = 0; first < n; first += most) {
    size_t count = std::min(most, n - first);
    std::vector<Item> items(count);
    for (size_t i = 0; i < count; ++i) items[i] = {hash_key(keys[first + i]), static_cast<uint32_t>(first + i)};
    sort_items(items);
    keep_last(items);
    if (first > 0) merger_->admit();
    write_batch(items, keys, rows);
  }
}

// On a full disk the space of what failed is what is needed next.
template <class Fn>
auto SsdStore::Impl::collecting(Fn&& fn) {
  try {
    return fn();
  } catch (...) {
    catalog_.collect();
    throw;
  }
}

void SsdStore::Impl::write_batch(std::vector<Item>& items, const uint64_t* keys, const RowsIn* rows) {
  std::vector<HashAndPage> entries;
  std::shared_ptr<Extent> extent = collecting([&] { return log_.write(items, keys, rows, base_bytes(), entries); });
  uint64_t bytes = extent->bytes(ctx.g);
  {
    std::unique_lock lock(index_mutex_);
    index_.add_extent(std::move(extent), entries);
  }
  ctx.fs->reached("extent.indexed");
  merger_->flushed(bytes);
}

uint64_t SsdStore::Impl::base_bytes() const {
  std::shared_lock lock(index_mutex_);
  return index_.base_bytes();
}

void SsdStore::Impl::flush_buffer() {
  if (buffer_.size() == 0) return;
  // Only writers change the buffer, and we are the writer: reading it needs no index lock.
  std::vector<Item> kept, deleted;
  for (uint32_t i = 0; i < buffer_.size(); ++i)
    (buffer_.deleted(i) ? deleted : kept).push_back({hash_key(buffer_.key(i)), i});
  RowsIn rows{buffer_.rows(), ctx.g.row_bytes};
  struct Flushed {
    std::shared_ptr<Extent> extent;
    std::vector<HashAndPage> entries;
  };
  std::vector<Flushed> flushed;
  const size_t most = log_.max_rows();
  uint64_t bytes = 0;
  auto write = [&](std::vector<Item>& items, const RowsIn* from) {
    sort_items(items);
    for (size_t first = 0; first < items.size(); first += most) {
      std::vector<Item> part(items.begin() + static_cast<ptrdiff_t>(first),
                             items.begin() + static_cast<ptrdiff_t>(std::min(first + most, items.size())));
      Flushed f;
      f.extent = log_.write(part, buffer_.keys().data(), from, base_bytes(), f.entries);
      bytes += f.extent->bytes(ctx.g);
      flushed.push_back(std::move(f));
    }
  };
  collecting([&] {
    write(kept, &rows);
    write(deleted, nullptr);
    return 0;
  });
  {
    // Rows leave the buffer and appear in the index in one step; a failure above left them in the buffer.
    std::unique_lock lock(index_mutex_);
    for (auto& f : flushed) index_.add_extent(std::move(f.extent), f.entries);
    buffer_.clear();
  }
  ctx.fs->reached("flush.indexed");
  merger_->flushed(bytes);
}

void SsdStore::Impl::load(const uint64_t* keys, size_t n, RowsIn rows) {
  auto life = alive();
  if (n == 0) return;
  if (n > UINT32_MAX) throw Error(ctx.path + ": more than 2^32 keys in one call");
  std::vector<Item> items(n);
  for (size_t i = 0; i < n; ++i) items[i] = {hash_key(keys[i]), static_cast<uint32_t>(i)};
  auto less = [](const Item& a, const Item& b) { return a.hash < b.hash; };
  if (!std::is_sorted(items.begin(), items.end(), less)) sort_items(items);
  keep_last(items);
  std::lock_guard write(write_mutex_);
  require_writable();
  bytes_put_ += n * ctx.g.entry_bytes();
  Index::Merge job;
  const auto begin = [&] {
    std::unique_lock lock(index_mutex_);
    return index_.begin_load(items.front().hash, items.back().hash, &job);
  };
  bool empty = begin();
  if (empty && buffer_.size() > 0) {
    flush_buffer();  // its rows are older than these, and may lie among them
    empty = begin();
  }
  if (!empty) return add(keys, n, &rows);
  merger_->admit();
  merger_->limit(items.size(), index_bytes(items.size()));
  // Only writers bring rows to a partition without any, and we are the writer: it stays as it is.
  std::vector<Partition> pieces = collecting([&] { return write_bases(items, keys, rows); });
  pieces.front().lo = job.partition->lo;
  if (pieces.back().hi < job.partition->hi) {
    pieces.emplace_back();
    pieces.back().lo = items.back().hash + 1;
    pieces.back().hi = job.partition->hi;
  }
  ctx.fs->reached("load.written");
  std::unique_lock lock(index_mutex_);
  index_.finish_merge(job, std::move(pieces));
}

// What base files of so many rows add to the index: fences and filters.
uint64_t SsdStore::Impl::index_bytes(uint64_t rows) const {
  return ctx.g.row_pages(rows) * 8 + rows * options_.filter_bits / 8;
}

// Files of the usual size, side by side; each is a partition that begins at its first row and ends before the next.
std::vector<Partition> SsdStore::Impl::write_bases(const std::vector<Item>& items, const uint64_t* keys, RowsIn rows) {
  const uint64_t target = std::max<uint64_t>(options_.partition_bytes, base_bytes() / 512) * 3 / 4 + 1;
  const uint64_t count = (items.size() * ctx.g.entry_bytes() + target - 1) / target;
  std::vector<Partition> pieces(count);
  auto first = [&](uint64_t piece) { return items.size() * piece / count; };
  // Each writer has a chunk of its own: together they take no more than the write buffer may.
  const size_t chunk = size_t{ctx.sizes.append_pages} * ctx.g.page_bytes;
  const size_t writers = std::clamp<size_t>(ctx.sizes.write_buffer / chunk, 1, count);
  std::atomic<uint64_t> next{0};
  pool_.parallel(writers, [&](size_t) {
    for (uint64_t piece; (piece = next.fetch_add(1)) < count;) {
      const uint64_t begin = first(piece), end = first(piece + 1);
      BaseWriter writer(ctx, catalog_.create(FileKind::kBase), end - begin, options_.filter_bits);
      constexpr uint64_t kAhead = 8;  // rows may lie scattered in the caller's memory
      for (uint64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) __builtin_prefetch(rows.at(items[i + kAhead].index));
        writer.add(keys[items[i].index], rows.at(items[i].index));
      }
      pieces[piece].base = writer.finish();
      pieces[piece].lo = items[begin].hash;
      pieces[piece].hi = end < items.size() ? items[end].hash - 1 : items.back().hash;
      ctx.fs->reached("load.piece");
    }
  });
  return pieces;
}

// ---- scanning and books

std::vector<PartitionView> SsdStore::Impl::views() {
  auto life = alive();
  std::lock_guard write(write_mutex_);
  if (buffer_.size() > 0) {
    require_writable();
    flush_buffer();
  }
  std::shared_lock lock(index_mutex_);
  std::vector<PartitionView> out;
  for (size_t i = 0; i < index_.size(); ++i) out.push_back(index_.view(i));
  return out;
}

uint64_t SsdStore::Impl::count() {
  uint64_t sum = 0;
  for (auto& view : views()) {
    if (view.extents.empty()) {
      sum += view.base ? view.base->rows : 0;
      continue;
    }
    PartitionCursor cursor(ctx, std::move(view), ctx.sizes.merge_bytes);
    while (cursor.next()) ++sum;
  }
  return sum;
}

uint64_t SsdStore::Impl::buffer_memory() const {
  return buffer_.memory() + log_.memory() + reader_.memory() + merger_->memory();
}

StoreStats SsdStore::Impl::stats() const {
  auto life = alive();
  StoreStats s;
  {
    std::shared_lock lock(index_mutex_);
    s.epoch = epoch_;
    s.rows_in_base = index_.base_rows();
    s.rows_in_log = index_.log_rows() + buffer_.size();
    s.partitions = index_.size();
    s.log_bytes = index_.log_bytes();
    s.base_bytes = index_.base_bytes();
    s.mem_index = index_.memory();
    s.mem_buffers = buffer_memory();
    s.damage = index_.damage();
  }
  s.mem_total = s.mem_index + s.mem_buffers;
  s.mem_budget = options_.mem_budget;
  s.disk_bytes = catalog_.disk_bytes();
  s.live_files = catalog_.files();
  const ReadCounters& r = reader_.counters();
  s.keys_read = r.keys;
  s.pages_read = r.pages;
  s.reads = r.reads;
  s.bytes_read = r.bytes;
  s.false_pages = r.false_pages;
  s.bytes_put = bytes_put_;
  s.bytes_written = ctx.bytes_written;
  const MergeCounters& m = merger_->counters();
  s.merges = m.merges;
  s.merge_bytes_read = m.bytes_read;
  s.merge_bytes_written = m.bytes_written;
  s.stall_seconds = merger_->stall_seconds();
  ReadCost cost = reader_.cost();
  s.read_cost_us = cost.read_us;
  s.page_cost_us = cost.page_us;
  s.engine = ctx.fs->name();
  return s;
}

void SsdStore::Impl::merge_all() {
  auto life = alive();
  std::lock_guard write(write_mutex_);
  require_writable();
  flush_buffer();
  merger_->merge_all();
}

// ---- the interface

namespace {

class PartitionScan : public SsdStore::Scan {
 public:
  PartitionScan(std::shared_ptr<SsdStore::Impl> impl, std::vector<PartitionView> views)
      : impl_(std::move(impl)), views_(std::move(views)) {}

  size_t next(size_t max_rows, uint64_t* keys, uint8_t* rows) override {
    const size_t row_bytes = impl_->ctx.g.row_bytes;
    size_t n = 0;
    while (n < max_rows) {
      if (!cursor_) {
        if (at_ == views_.size()) break;
        cursor_ = std::make_unique<PartitionCursor>(impl_->ctx, std::move(views_[at_++]), impl_->ctx.sizes.merge_bytes);
      }
      if (!cursor_->next()) {
        cursor_.reset();
        continue;
      }
      keys[n] = cursor_->key();
      std::memcpy(rows + n++ * row_bytes, cursor_->row(), row_bytes);
    }
    return n;
  }

 private:
  std::shared_ptr<SsdStore::Impl> impl_;  // keeps the context alive, even after close()
  std::vector<PartitionView> views_;
  size_t at_ = 0;
  std::unique_ptr<PartitionCursor> cursor_;
};

}  // namespace

size_t SsdStore::row_bytes() const { return impl_->ctx.g.row_bytes; }
void SsdStore::get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) { impl_->get(keys, n, found, rows); }
void SsdStore::put(const uint64_t* keys, size_t n, RowsIn rows) { impl_->put(keys, n, &rows); }
void SsdStore::load(const uint64_t* keys, size_t n, RowsIn rows) { impl_->load(keys, n, rows); }
void SsdStore::erase(const uint64_t* keys, size_t n) { impl_->put(keys, n, nullptr); }
uint64_t SsdStore::commit(const std::string& note) { return impl_->commit(note); }
uint64_t SsdStore::epoch() const { return impl_->epoch(); }
std::string SsdStore::note() const { return impl_->note(); }
std::vector<uint64_t> SsdStore::epochs() const { return impl_->epochs(); }
void SsdStore::release(uint64_t epoch) { impl_->release(epoch); }
std::unique_ptr<SsdStore::Scan> SsdStore::scan() { return std::make_unique<PartitionScan>(impl_, impl_->views()); }
uint64_t SsdStore::count() { return impl_->count(); }
StoreStats SsdStore::stats() const { return impl_->stats(); }
void SsdStore::check() { impl_->check(); }
void SsdStore::merge_all() { impl_->merge_all(); }
void SsdStore::link_checkpoint(const std::string& path) { impl_->link_checkpoint(path); }
void SsdStore::close() { impl_->close(); }
double SsdStore::read_floor(const uint64_t* keys, size_t n) { return impl_->read_floor(keys, n); }

}  // namespace thermocline
