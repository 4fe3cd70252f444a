// Writes of SsdStore: put and erase through the write buffer and the log, load into base files. All functions here
// except put(), erase(), load() and begin_write() run with write_mutex_ held.
#include <algorithm>
#include <atomic>

#include "ssd/impl.h"

namespace thermocline {

using namespace ssd;

namespace {

constexpr size_t kManyDeletions = 4;  // one of so many that may wait

}  // namespace

void SsdStore::Impl::put(const uint64_t* keys, size_t n, const RowsIn* rows) {
  auto life = alive();
  if (n == 0) return;
  const auto write = begin_write();
  require_writable();
  if (n > UINT32_MAX) throw Error(ctx.path + ": more than 2^32 keys in one call");
  bytes_put_ += n * (rows ? ctx.g.entry_bytes() : 8);
  add(keys, n, rows);
}

// A put() may wait for the device and for merges, and a step of training waits for its deletions. So they wait for no
// put(): the next one moves them to the buffer, before its own rows.
void SsdStore::Impl::erase(const uint64_t* keys, size_t n) {
  {
    auto life = alive();
    require_writable();
    std::unique_lock lock(index_mutex_);
    const size_t most = std::min(deletions_.capacity(), buffer_.capacity());  // they must fit into an empty buffer
    if (deletions_.size() + n <= most) {
      for (size_t i = 0; i < n; ++i) deletions_.set(keys[i], nullptr);
      follow(keys, n, nullptr);
      bytes_put_ += n * 8;
      const bool many = deletions_.size() > most / kManyDeletions;
      lock.unlock();
      if (many) buffer_deletions();
      return;
    }
  }
  put(keys, n, nullptr);
}

void SsdStore::Impl::buffer_deletions() {
  if (!options_.background_merge || buffering_.exchange(true)) return;
  std::call_once(deletions_io_once_, [this] { deletions_io_ = std::make_unique<PreadPool>(1); });
  deletions_io_->run([this] {
    buffering_ = false;  // first: deletions that follow may need another job
    try {
      auto life = alive();
      begin_write();
    } catch (const std::exception&) {
      // Closed, or the next put() fails in the same way.
    }
  });
}

std::unique_lock<std::mutex> SsdStore::Impl::begin_write() {
  std::unique_lock write(write_mutex_);
  for (;;) {
    {
      std::unique_lock lock(index_mutex_);
      if (buffer_.size() + deletions_.size() <= buffer_.capacity()) {
        for (uint64_t key : deletions_.keys()) buffer_.set(key, nullptr);
        deletions_.clear();
        return write;
      }
    }
    require_writable();
    flush_buffer();
  }
}

void SsdStore::Impl::add(const uint64_t* keys, size_t n, const RowsIn* rows) {
  if (n < buffer_.capacity() / 2) {
    if (buffer_.size() + n > buffer_.capacity()) {
      admit();
      flush_buffer();
    }
    std::unique_lock lock(index_mutex_);
    for (size_t i = 0; i < n; ++i) buffer_.set(keys[i], rows ? rows->at(i) : nullptr);
    follow(keys, n, rows);
    return;
  }
  admit();
  flush_buffer();  // first: its rows are older than this batch
  const size_t most = log_.max_rows();
  for (size_t first = 0; first < n; first += most) {
    size_t count = std::min(most, n - first);
    std::vector<Item> items(count);
    for (size_t i = 0; i < count; ++i) items[i] = {hash_key(keys[first + i]), static_cast<uint32_t>(first + i)};
    sort_items(items);
    keep_last(items);
    if (first > 0) admit();
    write_batch(items, keys, rows);
  }
}

// Runs fn; if it throws, deletes the files it left and those of the kept log, because a full disk needs their space.
template <class Fn>
auto SsdStore::Impl::collecting(Fn&& fn) {
  try {
    return fn();
  } catch (...) {
    {
      std::unique_lock lock(index_mutex_);
      index_.forget_log();
    }
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
    follow(items, keys, rows);
  }
  ctx.fs->failpoint("extent.indexed");
  merger_->flushed(bytes);
}

uint64_t SsdStore::Impl::base_bytes() const {
  std::shared_lock lock(index_mutex_);
  return index_.base_bytes();
}

void SsdStore::Impl::admit() {
  if (merger_->set_aside_log_is_due()) {
    flush_buffer();
    copy_set_aside_log();
  }
  merger_->admit();
}

// Set-aside partitions are not merged, and every extent that has one of their rows would stay, with the rows of all
// other partitions. Puts the newest version of each such row to the log again, through the (empty) write buffer; the
// old extents are dropped then. No value changes, so concurrent reads are not affected.
void SsdStore::Impl::copy_set_aside_log() {
  uint64_t bytes = 0;
  const uint64_t before = index_.last_seq();  // only the holder of write_mutex_ changes it
  {
    auto paused = merger_->pause();  // a merge would replace partitions
    Index::Merge copy;
    const auto begin = [&] {
      std::unique_lock lock(index_mutex_);
      return index_.begin_copy(&copy, before);
    };
    while (begin()) {
      try {
        PartitionCursor rows(ctx, copy.view, ctx.sizes.merge_bytes, true);
        while (rows.next()) {
          if (buffer_.full()) bytes += append_buffer();
          std::unique_lock lock(index_mutex_);
          buffer_.set(rows.key(), rows.row());
        }
        bytes += append_buffer();
      } catch (const CorruptionError&) {
        std::unique_lock lock(index_mutex_);
        copy.partition->log_damaged = true;
        continue;
      } catch (const UnreadableError&) {
        std::unique_lock lock(index_mutex_);
        copy.partition->log_damaged = true;
        continue;
      }
      ctx.fs->failpoint("copy.written");
      std::unique_lock lock(index_mutex_);
      index_.finish_copy(copy);
    }
    catalog_.collect();
    // Before a merge can set another partition aside: the log of that one is not copied and must not be counted.
    merger_->set_aside_log_copied(bytes, index_.last_seq() - before);
    ctx.fs->failpoint("copy.counted");
  }
  merger_->flushed(bytes);
}

void SsdStore::Impl::flush_for_reading() {
  if (buffer_.size() == 0) return;
  require_writable();
  flush_buffer();
}

void SsdStore::Impl::flush_buffer() {
  if (buffer_.size() == 0) return;
  merger_->flushed(append_buffer());
}

uint64_t SsdStore::Impl::append_buffer() {
  if (buffer_.size() == 0) return 0;
  // Only the holder of write_mutex_ changes the buffer: this call may read it without the index lock.
  std::vector<Item> kept, deleted;
  for (uint32_t i = 0; i < buffer_.size(); ++i)
    (buffer_.deleted(i) ? deleted : kept).push_back({hash_key(buffer_.key(i)), i});
  RowsIn rows{buffer_.rows(), ctx.g.row_bytes};
  struct Written {
    std::shared_ptr<Extent> extent;
    std::vector<HashAndPage> entries;
  };
  std::vector<Written> written;
  const size_t most = log_.max_rows();
  uint64_t bytes = 0;
  auto write = [&](std::vector<Item>& items, const RowsIn* from) {
    sort_items(items);
    for (size_t first = 0; first < items.size(); first += most) {
      std::vector<Item> part(items.begin() + static_cast<ptrdiff_t>(first),
                             items.begin() + static_cast<ptrdiff_t>(std::min(first + most, items.size())));
      Written f;
      f.extent = log_.write(part, buffer_.keys().data(), from, base_bytes(), f.entries);
      bytes += f.extent->bytes(ctx.g);
      written.push_back(std::move(f));
    }
  };
  collecting([&] {
    write(kept, &rows);
    write(deleted, nullptr);
    return 0;
  });
  {
    // Rows move from the buffer to the index atomically. After a failure above they are still in the buffer.
    std::unique_lock lock(index_mutex_);
    for (auto& f : written) index_.add_extent(std::move(f.extent), f.entries);
    buffer_.clear();
  }
  ctx.fs->failpoint("flush.indexed");
  return bytes;
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
  const auto write = begin_write();
  require_writable();
  bytes_put_ += n * ctx.g.entry_bytes();
  Index::Merge job;
  const auto begin = [&] {
    std::unique_lock lock(index_mutex_);
    return index_.begin_load(items.front().hash, items.back().hash, &job);
  };
  bool empty = begin();
  if (empty && buffer_.size() > 0) {
    flush_buffer();  // its rows are older than this batch and may be in the same hash range
    empty = begin();
  }
  if (!empty) return add(keys, n, &rows);
  admit();
  merger_->limit(items.size(), index_bytes(items.size()));
  // Only the holder of write_mutex_ adds rows to an empty partition: it stays empty during the write.
  std::vector<Partition> pieces = collecting([&] { return write_bases(items, keys, rows); });
  pieces.front().lo = job.partition->lo;
  if (pieces.back().hi < job.partition->hi) {
    pieces.emplace_back();
    pieces.back().lo = items.back().hash + 1;
    pieces.back().hi = job.partition->hi;
  }
  ctx.fs->failpoint("load.written");
  std::unique_lock lock(index_mutex_);
  index_.finish_merge(job, std::move(pieces));
  follow(items, keys, &rows);
  // The rows are in no extent: a missing number says so to changes_since().
  index_.start_at(log_.skip_extent());
}

// Bytes that base files with this number of rows add to the index: fences and filters.
uint64_t SsdStore::Impl::index_bytes(uint64_t rows) const {
  std::shared_lock lock(index_mutex_);
  return ctx.g.row_pages(rows) * 8 + (index_.keeps_filters() ? rows * options_.filter_bits / 8 : 0);
}

// Writes base files of the usual size in parallel. Each is a partition from its first row up to the next file's first.
std::vector<Partition> SsdStore::Impl::write_bases(const std::vector<Item>& items, const uint64_t* keys, RowsIn rows) {
  const uint64_t target = std::max<uint64_t>(options_.partition_bytes, base_bytes() / 512) * 3 / 4 + 1;
  const uint64_t count = (items.size() * ctx.g.entry_bytes() + target - 1) / target;
  std::vector<Partition> pieces(count);
  auto first = [&](uint64_t piece) { return items.size() * piece / count; };
  // Each writer has one chunk of memory: together at most the size of the write buffer.
  const size_t chunk = size_t{ctx.sizes.append_pages} * ctx.g.page_bytes;
  const size_t writers = std::clamp<size_t>(ctx.sizes.write_buffer / chunk, 1, count);
  std::atomic<uint64_t> next{0};
  pool_.parallel(writers, [&](size_t) {
    for (uint64_t piece; (piece = next.fetch_add(1)) < count;) {
      const uint64_t begin = first(piece), end = first(piece + 1);
      BaseWriter writer(ctx, catalog_.create(FileKind::kBase), end - begin, options_.filter_bits);
      constexpr uint64_t kAhead = 8;  // prefetch: rows may be scattered in the caller's memory
      for (uint64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) __builtin_prefetch(rows.at(items[i + kAhead].index));
        writer.add(keys[items[i].index], rows.at(items[i].index));
      }
      pieces[piece].base = writer.finish();
      pieces[piece].lo = items[begin].hash;
      pieces[piece].hi = end < items.size() ? items[end].hash - 1 : items.back().hash;
      ctx.fs->failpoint("load.piece");
    }
  });
  return pieces;
}

}  // namespace thermocline
