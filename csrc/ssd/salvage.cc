#include "ssd/salvage.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace thermocline::ssd {
namespace {

constexpr uint64_t kMaxHash = std::numeric_limits<uint64_t>::max();

std::string at_page(uint64_t page, const std::string& cause) { return "page " + std::to_string(page) + ": " + cause; }

// Collects lost pages; neighbours become one entry. The range of an entry ends before the next hash that is known.
class LossList {
 public:
  explicit LossList(std::vector<LostPages>& out) : out_(out) {}

  // `after`: no row of the page has a lower hash.
  void lose(uint64_t page, uint64_t pages, uint64_t rows, uint64_t after, const std::string& cause) {
    if (!open_) out_.push_back({page, 0, 0, {after, kMaxHash}, cause});
    open_ = true;
    out_.back().pages += pages;
    out_.back().rows += rows;
  }
  // `last`: no row of the lost pages has a higher hash.
  void close(uint64_t last) {
    if (open_) out_.back().range.hi = std::max(last, out_.back().range.lo);
    open_ = false;
  }

 private:
  std::vector<LostPages>& out_;
  bool open_ = false;
};

// Hashes of the keys of a page; false if they are not ascending, or not within [from, to].
bool ascending_hashes(const uint8_t* page, PageKind kind, uint64_t from, uint64_t to, std::vector<uint64_t>& hashes) {
  const uint32_t count = page_header(page).count;
  hashes.resize(count);
  for (uint32_t i = 0; i < count; ++i) {
    hashes[i] = hash_key(page_key(page, kind, i));
    if (hashes[i] < from || hashes[i] > to || (i > 0 && hashes[i] <= hashes[i - 1])) return false;
  }
  return count > 0;
}

// Rows of page `i` of `rows` rows, `per_page` on each page but the last.
uint64_t rows_of_page(uint64_t i, uint64_t rows, uint64_t per_page) {
  return std::min<uint64_t>(per_page, rows - i * per_page);
}

}  // namespace

bool LostVersions::contains(uint64_t hash) const {
  if (std::binary_search(hashes.begin(), hashes.end(), hash)) return true;
  auto after = std::upper_bound(ranges.begin(), ranges.end(), hash,
                                [](uint64_t h, const HashRange& range) { return h < range.lo; });
  return after != ranges.begin() && (after - 1)->hi >= hash;
}

bool LostVersions::intersects(const HashRange& range) const {
  auto hash = std::lower_bound(hashes.begin(), hashes.end(), range.lo);
  if (hash != hashes.end() && *hash <= range.hi) return true;
  return std::any_of(ranges.begin(), ranges.end(),
                     [&](const HashRange& r) { return r.lo <= range.hi && r.hi >= range.lo; });
}

// ---- pages

PageReader::PageReader(Context& ctx, FileKind kind, uint64_t number, uint64_t nonce)
    : ctx_(ctx), kind_(kind), number_(number), nonce_(nonce) {
  try {
    file_ = ctx.fs->open(ctx.file_path(kind, number), OpenMode::kRead);
    pages_ = file_->size() / ctx.g.page_bytes;
  } catch (const NotFoundError&) {
    cause_ = "the file is missing";
  } catch (const IoError& e) {
    file_.reset();
    cause_ = e.what();
  }
}

bool PageReader::fill(uint64_t page, uint64_t pages) {
  buffered_ = 0;
  try {
    file_->pread(buffer_.data(), pages * ctx_.g.page_bytes, page * ctx_.g.page_bytes);
  } catch (const IoError& e) {
    cause_ = e.what();
    return false;
  }
  first_ = page;
  buffered_ = pages;
  return true;
}

const uint8_t* PageReader::raw(uint64_t page) {
  if (!file_) return nullptr;  // cause_ is set
  if (page >= pages_) {
    cause_ = "the file is truncated: it has " + std::to_string(pages_) + " pages";
    return nullptr;
  }
  if (page < first_ || page >= first_ + buffered_) {
    const uint64_t chunk = std::min<uint64_t>(ctx_.sizes.append_pages, pages_ - page);
    if (buffer_.size() < ctx_.sizes.append_pages * uint64_t{ctx_.g.page_bytes})
      buffer_ = AlignedBuffer(std::min<uint64_t>(ctx_.sizes.append_pages, pages_) * ctx_.g.page_bytes);
    // An unreadable sector fails the whole chunk: read its pages one by one.
    if (!fill(page, chunk) && !fill(page, 1)) return nullptr;
  }
  return buffer_.data() + (page - first_) * ctx_.g.page_bytes;
}

const uint8_t* PageReader::read(uint64_t page, PageKind kind) {
  const uint8_t* bytes = raw(page);
  if (!bytes) return nullptr;
  cause_ = page_damage(bytes, ctx_.g, nonce_, page, kind);
  return cause_.empty() ? bytes : nullptr;
}

const uint8_t* PageReader::header() {
  const uint8_t* bytes = raw(0);
  if (!bytes) return nullptr;
  cause_ = file_header_damage(bytes, ctx_.g, kind_, ctx_.id.store_id, number_, nonce_);
  return cause_.empty() ? bytes : nullptr;
}

// ---- base files

bool BaseScan::lost_page(uint64_t page) const {
  return std::any_of(lost.begin(), lost.end(),
                     [&](const LostPages& l) { return page >= l.first_page && page < l.first_page + l.pages; });
}

BaseScan scan_base(Context& ctx, const PartitionRecord& record, const HashRange& range) {
  const Geometry& g = ctx.g;
  BaseScan scan{record, range, "", {}, false};
  PageReader pages(ctx, FileKind::kBase, record.file, record.nonce);
  auto rebuild = [&](uint64_t page, const std::string& cause) {
    if (scan.rebuild.empty()) scan.rebuild = at_page(page, cause);
  };
  if (!pages.header()) rebuild(0, pages.cause());

  // Row pages. Memory follows from the size of the file, not from the numbers of the manifest.
  const uint64_t present = pages.count() > 0 ? std::min(record.pages, pages.count() - 1) : 0;
  const bool with_filter = record.filter_bytes > 0;
  scan.drop_filter = record.filter_bytes / 64 > record.rows && record.filter_bytes > pages.count() * g.page_bytes;
  Filter filter = with_filter && !scan.drop_filter ? Filter::of_bytes(record.filter_bytes) : Filter();
  LossList losses(scan.lost);
  std::vector<uint64_t> hashes, fences(present, 0);
  uint64_t next = range.lo;  // the least hash of the next row
  bool ended = false;        // no larger hash is possible
  for (uint64_t i = 0; i < present; ++i) {
    const uint64_t rows = rows_of_page(i, record.rows, g.rows_per_page());
    const uint8_t* page = pages.read(1 + i, PageKind::kRows);
    std::string cause = pages.cause();
    if (page && (ended || page_header(page).count != rows ||
                 !ascending_hashes(page, PageKind::kRows, next, range.hi, hashes))) {
      page = nullptr;
      cause = "rows are missing, out of order or of another partition";
    }
    if (!page) {
      losses.lose(1 + i, 1, rows, next, cause);
      continue;
    }
    fences[i] = hashes.front();
    losses.close(hashes.front() - 1);
    if (filter.bytes() > 0)
      for (uint64_t hash : hashes) filter.add(hash);
    ended = hashes.back() == kMaxHash;
    next = hashes.back() + 1;
  }
  if (present < record.pages) {
    pages.raw(1 + present);  // sets the cause
    losses.lose(1 + present, record.pages - present, record.rows - present * g.rows_per_page(), next, pages.cause());
  }
  losses.close(range.hi);
  if (scan.replaced()) {
    scan.rebuild = scan.lost.empty() ? "the filter is larger than the file" : "";
    return scan;
  }

  for (uint64_t i = 0; i < g.fence_pages(record.pages); ++i) {
    const uint64_t number = 1 + record.pages + i, first = i * g.fences_per_page();
    const uint8_t* page = pages.read(number, PageKind::kFences);
    const uint64_t count = rows_of_page(i, record.pages, g.fences_per_page());
    if (!page) rebuild(number, pages.cause());
    else if (page_header(page).count != count ||
             std::memcmp(page + sizeof(PageHeader), fences.data() + first, count * 8) != 0)
      rebuild(number, "a fence is not the first hash of its page");
  }
  uint64_t done = 0;
  for (uint64_t i = 0; i < g.filter_pages(record.filter_bytes); ++i) {
    const uint64_t number = 1 + record.pages + g.fence_pages(record.pages) + i;
    const uint8_t* page = pages.read(number, PageKind::kFilter);
    const uint64_t bytes = std::min<uint64_t>(g.filter_bytes_per_page(), record.filter_bytes - done);
    if (!page) rebuild(number, pages.cause());
    else if (std::memcmp(page + sizeof(PageHeader), filter.data() + done, bytes) != 0)
      rebuild(number, "the filter differs from the keys of the file");
    done += bytes;
  }
  return scan;
}

std::shared_ptr<const BaseFile> copy_base(Context& ctx, const BaseScan& scan, std::shared_ptr<DataFile> file,
                                          Filter filter) {
  PageReader pages(ctx, FileKind::kBase, scan.record.file, scan.record.nonce);
  BaseWriter writer(ctx, std::move(file), std::move(filter));
  for (uint64_t i = 1; i <= scan.record.pages; ++i) {
    if (scan.lost_page(i)) continue;
    const uint8_t* page = pages.read(i, PageKind::kRows);
    if (!page)
      throw CorruptionError(ctx.file_path(FileKind::kBase, scan.record.file) + ": " + at_page(i, pages.cause()) +
                            "; it was readable a moment ago: copy the store to another device, then repair the copy");
    for (uint32_t k = 0; k < page_header(page).count; ++k)
      writer.add(page_key(page, PageKind::kRows, k), page_row(page, ctx.g, k));
  }
  return writer.finish();
}

// ---- extents

namespace {

// Scan of one column of an extent: its key pages or its row pages.
struct Column {
  std::vector<uint64_t> keys;
  std::vector<bool> known;  // by row
  std::vector<bool> valid;  // by page
  std::vector<std::string> causes;
};

Column scan_column(PageReader& pages, const ExtentRecord& record, PageKind kind, uint64_t first_page, uint64_t count,
                   uint64_t per_page) {
  Column column{std::vector<uint64_t>(record.rows), std::vector<bool>(record.rows), std::vector<bool>(count),
                std::vector<std::string>(count)};
  std::vector<uint64_t> hashes;
  uint64_t next = 0;
  bool ended = false;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t first = i * per_page, rows = rows_of_page(i, record.rows, per_page);
    const uint8_t* page = pages.read(first_page + i, kind);
    if (!page) {
      column.causes[i] = pages.cause();
      continue;
    }
    ExtentInfo info{record.seq, first, record.rows};
    if (kind != PageKind::kRows) std::memcpy(&info, page + sizeof(PageHeader), sizeof info);
    if (info.seq != record.seq || info.first_row != first || info.rows != record.rows || ended ||
        page_header(page).count != rows || !ascending_hashes(page, kind, next, kMaxHash, hashes)) {
      column.causes[i] = "keys are missing, out of order or of another extent";
      continue;
    }
    column.valid[i] = true;
    for (uint64_t k = 0; k < rows; ++k) {
      column.keys[first + k] = page_key(page, kind, static_cast<uint32_t>(k));
      column.known[first + k] = true;
    }
    ended = hashes.back() == kMaxHash;
    next = hashes.back() + 1;
  }
  return column;
}

}  // namespace

ExtentScan scan_extent(Context& ctx, PageReader& pages, const ExtentRecord& record) {
  const Geometry& g = ctx.g;
  ExtentScan scan;
  scan.record = record;
  scan.versions.seq = record.seq;
  const bool tombstones = record.tombstones != 0;
  const uint64_t key_pages = g.key_pages(record.rows), row_pages = tombstones ? key_pages : g.row_pages(record.rows);
  const uint64_t data_page = tombstones ? record.first_page : record.first_page + key_pages;
  const uint64_t per_page = tombstones ? g.keys_per_page() : g.rows_per_page();
  // `data` decides which rows are lost, `index` has the keys of lost rows.
  Column index = scan_column(pages, record, tombstones ? PageKind::kTombstones : PageKind::kKeys, record.first_page,
                             key_pages, g.keys_per_page());
  Column data = tombstones ? index : scan_column(pages, record, PageKind::kRows, data_page, row_pages, per_page);
  for (uint64_t i = 0; !tombstones && i < key_pages && scan.rebuild.empty(); ++i) {
    if (!index.valid[i]) {
      scan.rebuild = at_page(record.first_page + i, index.causes[i]);
      continue;
    }
    const uint64_t first = i * g.keys_per_page();
    for (uint64_t k = first; k < first + rows_of_page(i, record.rows, g.keys_per_page()); ++k)
      if (data.known[k] && data.keys[k] != index.keys[k]) {
        scan.rebuild = at_page(record.first_page + i, "its keys differ from those of the row pages");
        break;
      }
  }

  LossList losses(scan.lost);
  uint64_t next = 0;  // the least hash of the next row
  for (uint64_t i = 0; i < row_pages; ++i) {
    const uint64_t first = i * per_page, rows = rows_of_page(i, record.rows, per_page);
    if (data.valid[i]) {
      losses.close(hash_key(data.keys[first]) - 1);
      for (uint64_t k = first; k < first + rows; ++k) scan.keys.push_back(data.keys[k]);
      next = hash_key(scan.keys.back()) + 1;
    } else {
      losses.lose(data_page + i, 1, rows, next, data.causes[i]);
    }
  }
  losses.close(kMaxHash);

  // Lost rows: exact hashes where the key column has them between the neighbours on the row pages, else ranges.
  for (const LostPages& lost : scan.lost) {
    const uint64_t first = (lost.first_page - data_page) * per_page;
    uint64_t after = lost.range.lo;  // the least hash of the next lost row
    bool unknown = false;            // rows without a hash since then
    for (uint64_t k = first; k < first + lost.rows; ++k) {
      const uint64_t hash = hash_key(index.keys[k]);
      if (tombstones || !index.known[k] || hash < after || hash > lost.range.hi) {
        unknown = true;
        continue;
      }
      if (unknown && hash > after) scan.versions.ranges.push_back({after, hash - 1});
      unknown = false;
      scan.versions.hashes.push_back(hash);
      after = hash + 1;
    }
    if (unknown) scan.versions.ranges.push_back({after, lost.range.hi});
  }
  return scan;
}

std::vector<uint8_t> read_rows(Context& ctx, PageReader& pages, const ExtentScan& scan) {
  const Geometry& g = ctx.g;
  std::vector<uint8_t> rows;
  rows.reserve(scan.keys.size() * g.row_bytes);
  const uint64_t data_page = scan.record.first_page + g.key_pages(scan.record.rows);
  size_t lost = 0;
  for (uint64_t i = 0; i < g.row_pages(scan.record.rows); ++i) {
    while (lost < scan.lost.size() && scan.lost[lost].first_page + scan.lost[lost].pages <= data_page + i) ++lost;
    if (lost < scan.lost.size() && scan.lost[lost].first_page <= data_page + i) continue;
    const uint8_t* page = pages.read(data_page + i, PageKind::kRows);
    if (!page)
      throw CorruptionError(ctx.path + ": extent " + std::to_string(scan.record.seq) + ": " +
                            at_page(data_page + i, pages.cause()) +
                            "; it was readable a moment ago: copy the store to another device, then repair the copy");
    rows.insert(rows.end(), page_row(page, g, 0), page_row(page, g, page_header(page).count));
  }
  return rows;
}

}  // namespace thermocline::ssd
