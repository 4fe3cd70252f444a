#include "ssd/files.h"

#include <algorithm>
#include <utility>

#include "ssd/async_io.h"

namespace thermocline::ssd {
namespace {

// Reads pages [first, first + count) sequentially and calls fn(page bytes, page number).
template <class Fn>
void for_each_page(const Context& ctx, DataFile& file, uint64_t first, uint64_t count, Fn&& fn) {
  AlignedBuffer buffer(std::min<uint64_t>(ctx.sizes.append_pages, std::max<uint64_t>(count, 1)) * ctx.g.page_bytes);
  const uint64_t buffer_pages = buffer.size() / ctx.g.page_bytes;
  for (uint64_t done = 0; done < count;) {
    uint64_t n = std::min(buffer_pages, count - done);
    file.file->pread(buffer.data(), n * ctx.g.page_bytes, (first + done) * ctx.g.page_bytes);
    for (uint64_t i = 0; i < n; ++i) fn(buffer.data() + i * ctx.g.page_bytes, first + done + i);
    done += n;
  }
}

}  // namespace

BufferSizes BufferSizes::of(size_t mem_budget, size_t write_buffer, const Geometry& g, FileSystem::Concurrency reads,
                            int merge_threads) {
  constexpr size_t kReadBytes = 1u << 20, kMemory = 16u << 20;  // of the longest read; of the buffers of one lookup
  auto pages = [&](size_t bytes, size_t most) {
    return static_cast<uint32_t>(std::max<size_t>(1, std::min(bytes, most) / g.page_bytes));
  };
  BufferSizes s;
  const size_t read_memory = mem_budget / 16;
  s.read_workers = std::clamp(static_cast<int>(std::min<size_t>(read_memory / g.page_bytes, 64)), 1, reads.workers);
  const auto workers = static_cast<uint32_t>(s.read_workers);
  s.read_channels = s.read_workers > 1 ? s.read_workers + 2 : 1;
  const size_t channel = read_memory / static_cast<size_t>(s.read_channels);
  s.read_slots = static_cast<int>(
      std::clamp<size_t>(channel / g.page_bytes, 1, static_cast<size_t>(std::min(reads.depth, kMaxReadSlots))));
  const size_t slots = static_cast<size_t>(s.read_slots);
  const size_t most = std::clamp(kMemory / workers, kReadBytes, 4 * kReadBytes);
  s.slot_pages = pages(std::min(channel, most) / slots, kReadBytes);
  // Few workers: part of a channel, so that eight reads of this length are in flight.
  const uint32_t parts = std::clamp<uint32_t>(8 / workers, 1, static_cast<uint32_t>(std::min<size_t>(slots, 4)));
  s.read_pages = std::max(s.slot_pages,
                          std::min(s.slot_pages * static_cast<uint32_t>(slots) / parts, pages(kReadBytes, kReadBytes)));
  s.append_pages = pages(mem_budget / 64, 1u << 20);
  s.merge_bytes = std::min<size_t>(mem_budget / 16, 3u << 20);
  // 4,096 extents of 16 MB are the log of a base of 340 GB at the default ratio. A larger base needs a larger budget
  // for its fences; the number grows with the budget, so that it does not shorten the log of such a store.
  const size_t budget_pages = mem_budget / g.page_bytes;
  s.max_extents = std::clamp<size_t>(std::max(std::min<size_t>(budget_pages / 16, 4096), budget_pages / 64), 16, 65536);
  const size_t chunk = size_t{s.append_pages} * g.page_bytes;
  s.merge_memory = std::max<size_t>(s.merge_bytes, s.max_extents * g.page_bytes) + chunk;
  s.more_merges = std::min(static_cast<size_t>(merge_threads - 1) * (s.merge_bytes + chunk), mem_budget / 8);
  s.write_buffer = write_buffer ? write_buffer : std::min<size_t>(mem_budget / 16, 16u << 20);
  return s;
}

uint64_t BufferSizes::total(const Geometry& g) const {
  uint64_t reads = static_cast<uint64_t>(read_channels) * static_cast<uint64_t>(read_slots) * slot_pages;
  return (reads + 2ull * append_pages) * g.page_bytes + merge_memory + write_buffer;  // 2 chunks for the log
}

std::shared_ptr<DataFile> create_data_file(Context& ctx, FileKind kind, uint64_t number) {
  return create_data_file(ctx, kind, number, random_nonce(), ctx.file_path(kind, number));
}

std::shared_ptr<DataFile> create_data_file(Context& ctx, FileKind kind, uint64_t number, uint64_t nonce,
                                           const std::string& path) {
  auto data = std::make_shared<DataFile>();
  data->kind = kind;
  data->number = number;
  data->nonce = nonce;
  data->file = ctx.fs->open(path, OpenMode::kCreate);
  AlignedBuffer page(ctx.g.page_bytes);
  write_file_header(page.data(), ctx.g, kind, ctx.id.store_id, number, data->nonce);
  data->file->pwrite(page.data(), ctx.g.page_bytes, 0);
  ctx.bytes_written += ctx.g.page_bytes;
  data->pages = 1;
  return data;
}

std::shared_ptr<DataFile> open_data_file(Context& ctx, FileKind kind, uint64_t number, uint64_t nonce, uint64_t pages) {
  auto data = std::make_shared<DataFile>();
  data->kind = kind;
  data->number = number;
  data->nonce = nonce;
  std::string path = ctx.file_path(kind, number);
  try {
    data->file = ctx.fs->open(path, OpenMode::kRead);
  } catch (const NotFoundError&) {
    throw_corrupt(path, "the file is missing, but the manifest lists it");
  }
  uint64_t bytes = data->file->size(), need = std::max<uint64_t>(pages, 1) * ctx.g.page_bytes;
  if (bytes < need)
    throw_corrupt(path, "the file is truncated: it has " + std::to_string(bytes) + " bytes, the manifest needs " +
                            std::to_string(need));
  AlignedBuffer page(ctx.g.page_bytes);
  data->file->pread(page.data(), ctx.g.page_bytes, 0);
  const std::string cause = file_header_damage(page.data(), ctx.g, kind, ctx.id.store_id, number, nonce);
  if (!cause.empty()) throw_corrupt_page(path, 0, cause);
  data->pages = pages;
  data->synced = true;
  return data;
}

PageAppender::PageAppender(Context& ctx, DataFile& file, PreadPool* write_behind)
    : ctx_(ctx),
      file_(file),
      write_behind_(ctx.sizes.append_pages > 1 ? write_behind : nullptr),
      part_pages_(write_behind_ ? ctx.sizes.append_pages / 2 : ctx.sizes.append_pages),
      buffer_(size_t{ctx.sizes.append_pages} * ctx.g.page_bytes),
      part_(buffer_.data()),
      first_(file.pages) {}

PageAppender::~PageAppender() {
  if (write_.valid()) write_.wait();
}

uint8_t* PageAppender::next() {
  if (used_ == part_pages_) start_write();
  uint8_t* page = part_ + used_++ * ctx_.g.page_bytes;
  std::memset(page, 0, ctx_.g.page_bytes);
  return page;
}

void PageAppender::flush() {
  if (used_ > 0) start_write();
  finish_write();
}

// Writes the current part and continues with the other one.
void PageAppender::start_write() {
  finish_write();
  file_.synced = false;
  writing_ = std::exchange(used_, 0);
  const uint32_t bytes = ctx_.g.page_bytes;
  const auto write = [file = file_.file.get(), from = part_, n = writing_ * bytes, offset = first_ * bytes] {
    file->pwrite(from, n, offset);
  };
  first_ += writing_;
  if (write_behind_) part_ = part_ == buffer_.data() ? part_ + part_pages_ * bytes : buffer_.data();
  write_ = start_io(write_behind_, write);
  if (!write_behind_) finish_write();
}

void PageAppender::finish_write() {
  if (!write_.valid()) return;
  write_.get();
  ctx_.bytes_written += writing_ * ctx_.g.page_bytes;
  file_.pages += writing_;
}

std::shared_ptr<const BaseFile> open_base(Context& ctx, const PartitionRecord& record, bool with_filter) {
  auto base = std::make_shared<BaseFile>();
  uint64_t fence_pages = ctx.g.fence_pages(record.pages);
  base->data = open_data_file(ctx, FileKind::kBase, record.file, record.nonce,
                              BaseFile::file_pages(ctx.g, record.pages, record.filter_bytes));
  base->rows = record.rows;
  base->filter_bytes = record.filter_bytes;
  base->fences.reserve(record.pages);
  const std::string& path = base->data->file->path();
  for_each_page(ctx, *base->data, 1 + record.pages, fence_pages, [&](const uint8_t* page, uint64_t number) {
    verify_page(page, ctx.g, record.nonce, number, PageKind::kFences, path);
    size_t old = base->fences.size(), n = page_header(page).count;
    base->fences.resize(old + n);
    std::memcpy(base->fences.data() + old, page + sizeof(PageHeader), n * 8);
  });
  if (base->fences.size() != record.pages)
    throw_corrupt(path, std::to_string(base->fences.size()) + " fences for " + std::to_string(record.pages) + " pages");
  if (base->fences[0] < record.lo ||
      std::adjacent_find(base->fences.begin(), base->fences.end(), std::greater_equal<>()) != base->fences.end())
    throw_corrupt(path, "the fences are out of order");
  if (with_filter && record.filter_bytes > 0) {
    base->filter = Filter::of_bytes(record.filter_bytes);
    uint64_t done = 0;
    for_each_page(ctx, *base->data, 1 + record.pages + fence_pages, ctx.g.filter_pages(record.filter_bytes),
                  [&](const uint8_t* page, uint64_t number) {
                    verify_page(page, ctx.g, record.nonce, number, PageKind::kFilter, path);
                    uint64_t n = std::min<uint64_t>(ctx.g.filter_bytes_per_page(), record.filter_bytes - done);
                    std::memcpy(base->filter.data() + done, page + sizeof(PageHeader), n);
                    done += n;
                  });
  }
  return base;
}

BaseWriter::BaseWriter(Context& ctx, std::shared_ptr<DataFile> file, uint64_t rows, uint32_t filter_bits,
                       PreadPool* write_behind)
    : BaseWriter(ctx, std::move(file), filter_bits ? Filter(rows, filter_bits) : Filter(), write_behind) {}

BaseWriter::BaseWriter(Context& ctx, std::shared_ptr<DataFile> file, Filter filter, PreadPool* write_behind)
    : ctx_(ctx), file_(std::move(file)), out_(ctx, *file_, write_behind), filter_(std::move(filter)) {}

void BaseWriter::add(uint64_t key, const uint8_t* row) {
  const Geometry& g = ctx_.g;
  uint64_t hash = hash_key(key);
  if (rows_ > 0 && hash <= last_hash_) throw Error("base file: rows out of hash order");
  last_hash_ = hash;
  if (on_page_ == 0) {
    page_ = out_.next();
    fences_.push_back(hash);
  }
  std::memcpy(page_ + sizeof(PageHeader) + 8ull * on_page_, &key, 8);
  std::memcpy(page_ + sizeof(PageHeader) + 8ull * g.rows_per_page() + uint64_t{g.row_bytes} * on_page_, row,
              g.row_bytes);
  if (filter_.bytes() > 0) filter_.add(hash);
  ++rows_;
  if (++on_page_ == g.rows_per_page()) seal();
}

void BaseWriter::seal() {
  if (on_page_ == 0) return;
  const Geometry& g = ctx_.g;
  if (on_page_ < g.rows_per_page()) {  // the last page: move the rows up to the keys
    uint8_t* keys_end = page_ + sizeof(PageHeader) + 8ull * on_page_;
    uint8_t* rows = page_ + sizeof(PageHeader) + 8ull * g.rows_per_page();
    uint64_t bytes = uint64_t{g.row_bytes} * on_page_;
    std::memmove(keys_end, rows, bytes);
    std::memset(keys_end + bytes, 0, page_ + g.page_bytes - (keys_end + bytes));
  }
  seal_page(page_, g, file_->nonce, out_.page(), PageKind::kRows, on_page_);
  on_page_ = 0;
}

std::shared_ptr<const BaseFile> BaseWriter::finish() {
  seal();
  const Geometry& g = ctx_.g;
  for (size_t i = 0; i < fences_.size(); i += g.fences_per_page()) {
    uint8_t* page = out_.next();
    size_t n = std::min<size_t>(g.fences_per_page(), fences_.size() - i);
    std::memcpy(page + sizeof(PageHeader), fences_.data() + i, n * 8);
    seal_page(page, g, file_->nonce, out_.page(), PageKind::kFences, static_cast<uint32_t>(n));
  }
  for (uint64_t i = 0; i < filter_.bytes(); i += g.filter_bytes_per_page()) {
    uint8_t* page = out_.next();
    uint64_t n = std::min<uint64_t>(g.filter_bytes_per_page(), filter_.bytes() - i);
    std::memcpy(page + sizeof(PageHeader), filter_.data() + i, n);
    seal_page(page, g, file_->nonce, out_.page(), PageKind::kFilter, 0);
  }
  out_.flush();
  auto base = std::make_shared<BaseFile>();
  base->data = file_;
  base->rows = rows_;
  base->fences = std::move(fences_);
  base->fences.shrink_to_fit();
  base->filter_bytes = filter_.bytes();
  base->filter = std::move(filter_);
  return base;
}

void read_extent_keys(Context& ctx, Extent& extent, const std::function<void(uint64_t, uint32_t)>& fn) {
  const Geometry& g = ctx.g;
  const std::string& path = extent.segment->file->path();
  PageKind kind = extent.tombstones ? PageKind::kTombstones : PageKind::kKeys;
  uint32_t per_page = extent.per_page(g), data_page = extent.data_page(g);
  extent.fences.clear();
  extent.fences.reserve((extent.rows + per_page - 1) / per_page);
  uint64_t row = 0, last = 0;
  for_each_page(ctx, *extent.segment, extent.first_page, g.key_pages(extent.rows),
                [&](const uint8_t* page, uint64_t number) {
                  verify_page(page, g, extent.segment->nonce, number, kind, path);
                  ExtentInfo info;
                  std::memcpy(&info, page + sizeof(PageHeader), sizeof info);
                  uint64_t n = page_header(page).count;
                  if (info.seq != extent.seq || info.rows != extent.rows || info.first_row != row ||
                      n != std::min<uint64_t>(g.keys_per_page(), extent.rows - row))
                    throw_corrupt_page(path, number, "it belongs to another extent");
                  for (uint32_t i = 0; i < n; ++i, ++row) {
                    uint64_t hash = hash_key(page_key(page, kind, i));
                    if (row > 0 && hash <= last) throw_corrupt_page(path, number, "keys are out of order");
                    last = hash;
                    if (row % per_page == 0) extent.fences.push_back(hash);
                    fn(hash, data_page + static_cast<uint32_t>(row / per_page));
                  }
                });
}

}  // namespace thermocline::ssd
