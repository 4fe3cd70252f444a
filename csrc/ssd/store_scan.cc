// Scans, counts and statistics of SsdStore, and the forwarding of its interface to Impl.
#include <algorithm>
#include <utility>

#include "ssd/impl.h"

namespace thermocline {

using namespace ssd;

std::vector<PartitionView> SsdStore::Impl::views() {
  auto life = alive();
  const auto write = begin_write();
  flush_for_reading();
  std::shared_lock lock(index_mutex_);
  std::vector<PartitionView> out;
  for (size_t i = 0; i < index_.size(); ++i) out.push_back(index_.view(i));
  return out;
}

SsdStore::Impl::RangeView SsdStore::Impl::view(KeyRange range) {
  auto life = alive();
  std::shared_lock lock(index_mutex_);
  return view_locked(range);
}

SsdStore::Impl::RangeView SsdStore::Impl::view_locked(KeyRange range) const {
  RangeView out;
  for (size_t i = index_.partition_of(range.lo); i < index_.size() && index_.partition(i).lo <= range.hi; ++i) {
    PartitionView view = index_.view(i);
    view.lo = std::max(view.lo, range.lo);
    view.hi = std::min(view.hi, range.hi);
    out.partitions.push_back(std::move(view));
  }
  for (uint32_t i = 0; i < buffer_.size(); ++i) {
    if (!range.contains(buffer_.key(i))) continue;
    auto& row = out.buffered[buffer_.key(i)];
    if (buffer_.deleted(i)) continue;
    row = std::make_unique<uint8_t[]>(ctx.g.row_bytes);
    std::memcpy(row.get(), buffer_.row(i), ctx.g.row_bytes);
  }
  for (uint64_t key : deletions_.keys()) {
    if (range.contains(key)) out.buffered[key] = nullptr;
  }
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
  return buffer_.memory() + deletions_.memory() + log_.memory() + reader_.memory() + merger_->memory() +
         ctx.scan_memory;
}

StoreStats SsdStore::Impl::stats() const {
  auto life = alive();
  StoreStats s;
  {
    std::shared_lock lock(index_mutex_);
    s.epoch = epoch_;
    s.rows_in_base = index_.base_rows();
    s.waiting_deletions = deletions_.size();
    s.rows_in_log = index_.log_rows() + buffer_.size() + deletions_.size();
    s.partitions = index_.size();
    s.log_bytes = index_.log_bytes();
    s.base_bytes = index_.base_bytes();
    s.mem_index = index_.memory();
    s.mem_buffers = buffer_memory();
    s.mem_spare = merger_->spare();
    s.damage = index_.damage();
    const Index::SetAside aside = index_.set_aside();
    s.damaged_partitions = aside.partitions;
    s.set_aside_log_bytes = aside.log_bytes;
    s.set_aside_log_bound = aside.partitions ? merger_->set_aside_bound(aside) : 0;
    s.filter_given_up = !index_.keeps_filters();
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
  s.get_scratch_peak = r.scratch_peak;
  s.bytes_put = bytes_put_;
  s.bytes_written = ctx.bytes_written;
  const MergeCounters& m = merger_->counters();
  s.merges = m.merges;
  s.merge_bytes_read = m.bytes_read;
  s.merge_bytes_written = m.bytes_written;
  s.merge_threads = static_cast<uint64_t>(merger_->threads());
  s.merges_running = merger_->running();
  s.merge_seconds = m.seconds;
  s.stall_seconds = merger_->stall_seconds();
  ReadCost cost = reader_.cost();
  s.read_cost_us = cost.read_us;
  s.page_cost_us = cost.page_us;
  s.engine = ctx.fs->name();
  return s;
}

std::string SsdStore::Impl::damage() const {
  if (!merger_->has_damage()) return "";
  std::shared_lock lock(index_mutex_);
  return index_.damage();
}

std::vector<std::string> SsdStore::Impl::take_warnings() {
  std::vector<std::string> out = ctx.warnings.take();
  for (auto& text : ctx.fs->take_warnings()) out.push_back(std::move(text));
  return out;
}

void SsdStore::Impl::merge_all() {
  auto life = alive();
  const auto write = begin_write();
  require_writable();
  flush_buffer();
  merger_->merge_all();
}

// ---- interface

namespace {

class PartitionScan : public SsdStore::Scan {
 public:
  PartitionScan(std::shared_ptr<SsdStore::Impl> impl, SsdStore::Impl::RangeView view,
                std::shared_ptr<SsdStore::Impl::Followed> followed = nullptr)
      : impl_(std::move(impl)),
        followed_(std::move(followed)),
        io_(followed_ ? &impl_->scan_io() : nullptr),
        views_(std::move(view.partitions)),
        buffered_(std::move(view.buffered)),
        next_buffered_(buffered_.begin()) {}

  size_t next(size_t max_rows, uint64_t* keys, uint8_t* rows, size_t skip) override {
    const size_t bytes = impl_->ctx.g.row_bytes - skip;
    size_t n = 0;
    while (n < max_rows) {
      if (next_buffered_ != buffered_.end()) {
        const auto& [key, row] = *next_buffered_++;
        if (!row) continue;
        keys[n] = key;
        std::memcpy(rows + n++ * bytes, row.get() + skip, bytes);
        continue;
      }
      if (!cursor_) {
        if (at_ == views_.size()) {
          if (followed_ && std::exchange(reading_, false)) impl_->end_reading(*followed_);
          break;
        }
        cursor_ = std::make_unique<PartitionCursor>(impl_->ctx, std::move(views_[at_++]), impl_->ctx.sizes.merge_bytes,
                                                    /*with_deleted=*/false, io_);
      }
      if (!cursor_->next()) {
        cursor_.reset();
        continue;
      }
      if (buffered_.contains(cursor_->key())) continue;  // the buffer has a newer version
      keys[n] = cursor_->key();
      std::memcpy(rows + n++ * bytes, cursor_->row() + skip, bytes);
    }
    return n;
  }

  std::optional<size_t> changed(KeyRange part, size_t max, uint64_t* keys, uint8_t* rows, uint8_t* deleted) override {
    if (!followed_) throw Error("scan: it does not follow its range");
    return impl_->changed(*followed_, part, max, keys, rows, deleted);
  }

  bool lost() const override { return followed_ && followed_->lost; }

 private:
  std::shared_ptr<SsdStore::Impl> impl_;  // keeps the context alive after close()
  const std::shared_ptr<SsdStore::Impl::Followed> followed_;
  PreadPool* const io_;  // null: one read at a time
  std::vector<PartitionView> views_;
  const std::unordered_map<uint64_t, std::unique_ptr<uint8_t[]>> buffered_;
  std::unordered_map<uint64_t, std::unique_ptr<uint8_t[]>>::const_iterator next_buffered_;
  size_t at_ = 0;
  bool reading_ = true;
  std::unique_ptr<PartitionCursor> cursor_;
};

}  // namespace

size_t SsdStore::row_bytes() const { return impl_->ctx.g.row_bytes; }
void SsdStore::get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) { impl_->get(keys, n, found, rows); }
void SsdStore::put(const uint64_t* keys, size_t n, RowsIn rows) { impl_->put(keys, n, &rows); }
void SsdStore::load(const uint64_t* keys, size_t n, RowsIn rows) { impl_->load(keys, n, rows); }
void SsdStore::erase(const uint64_t* keys, size_t n) { impl_->erase(keys, n); }
uint64_t SsdStore::commit(const std::string& note) { return impl_->commit(note); }
uint64_t SsdStore::epoch() const { return impl_->epoch(); }
std::string SsdStore::note() const { return impl_->note(); }
std::vector<uint64_t> SsdStore::epochs() const { return impl_->epochs(); }
void SsdStore::release(uint64_t epoch) { impl_->release(epoch); }
std::unique_ptr<SsdStore::Scan> SsdStore::follow(KeyRange range, uint64_t kept, uint64_t buffers) {
  auto followed = std::make_shared<Impl::Followed>(impl_->ctx, range);
  std::optional<Impl::RangeView> view = impl_->view(followed, kept, buffers);
  if (!view) return nullptr;
  return std::make_unique<PartitionScan>(impl_, std::move(*view), std::move(followed));
}
std::unique_ptr<SsdStore::Scan> SsdStore::scan(KeyRange range) {
  if (range.all()) return std::make_unique<PartitionScan>(impl_, Impl::RangeView{impl_->views(), {}});
  return std::make_unique<PartitionScan>(impl_, impl_->view(range));
}
uint64_t SsdStore::count() { return impl_->count(); }
StoreStats SsdStore::stats() const { return impl_->stats(); }
std::string SsdStore::damage() const { return impl_->damage(); }
std::vector<std::string> SsdStore::take_warnings() { return impl_->take_warnings(); }
void SsdStore::check() {
  std::exception_ptr first;
  impl_->find_damage(&first);
  if (first) std::rethrow_exception(first);
}
std::vector<std::string> SsdStore::find_damage() { return impl_->find_damage(); }
void SsdStore::merge_all() { impl_->merge_all(); }
void SsdStore::link_checkpoint(const std::string& path) { impl_->link_checkpoint(path); }
void SsdStore::close() { impl_->close(); }
double SsdStore::read_floor(const uint64_t* keys, size_t n) { return impl_->read_floor(keys, n); }

}  // namespace thermocline
