#include "serving/snapshot_file.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "util/error.h"
#include "util/hash.h"

namespace thermocline::serving {
namespace {

constexpr uint64_t kWordBits = 64;
constexpr uint64_t kReadBytes = 128u << 10;  // what Linux reads at most for one request, by default
constexpr uint64_t kReadsAhead = 8;

[[noreturn]] void corrupt(const std::string& path, const std::string& cause) {
  throw CorruptionError(path + ": " + cause + ": publish or copy this version again");
}

}  // namespace

SnapshotFile::SnapshotFile(const std::string& path) : file_(path) {
  constexpr size_t kHeaderBytes = sizeof(ssd::PageHeader) + sizeof(SnapshotHeader);
  if (file_.size() < kSector) corrupt(path, std::to_string(file_.size()) + " bytes are no snapshot");
  static_assert(kHeaderBytes <= kSector);
  std::memcpy(&header_, file_.data() + sizeof(ssd::PageHeader), sizeof(header_));
  if (std::memcmp(header_.magic, kSnapshotMagic, sizeof(kSnapshotMagic)) != 0)
    throw FormatError(path + ": not a snapshot file");
  if (header_.version != kSnapshotVersion)
    throw FormatError(path + ": format " + std::to_string(header_.version) + "; this version reads format " +
                      std::to_string(kSnapshotVersion));
  geometry_ = {header_.row_bytes, header_.page_bytes};
  if (!geometry_.valid() || header_.rows > kMaxRows || header_.deleted > kMaxRows)
    corrupt(path, "the header has impossible sizes");
  layout_ = SnapshotLayout::of(geometry_, header_.rows, header_.deleted);
  if (layout_.row_pages > ssd::kMaxFilePages || file_.size() != layout_.pages() * geometry_.page_bytes)
    corrupt(path, "has " + std::to_string(file_.size()) + " bytes, expected " +
                      std::to_string(layout_.pages() * geometry_.page_bytes));
  if (std::string damage = ssd::page_damage(page(0), geometry_, header_.nonce, 0, ssd::PageKind::kHeader);
      !damage.empty())
    corrupt(path, "header: " + damage);
  fences_ =
      read_column(layout_.first_fence_page(), layout_.row_pages, geometry_.fences_per_page(), ssd::PageKind::kFences);
  deleted_ =
      read_column(layout_.first_key_page(), header_.deleted, geometry_.keys_per_page(), ssd::PageKind::kTombstones);
  if (std::adjacent_find(fences_.begin(), fences_.end(), std::greater_equal<>()) != fences_.end())
    corrupt(path, "fences are not in order");
  verified_ = std::make_unique<std::atomic<uint64_t>[]>(layout_.row_pages / kWordBits + 1);
  int bits = std::clamp(static_cast<int>(std::bit_width(2 * layout_.row_pages)), 1, 32);
  shift_ = 64 - bits;
  directory_.resize(size_t{1} << bits);
  uint32_t at = 0;
  for (size_t i = 0; i < directory_.size(); ++i) {
    while (at + 1 < fences_.size() && fences_[at + 1] <= uint64_t{i} << shift_) ++at;
    directory_[i] = at;
  }
  file_.expect_random_reads();
}

uint64_t SnapshotFile::mem_bytes() const {
  return 8 * (fences_.size() + deleted_.size()) + 4 * directory_.size() + layout_.row_pages / 8;
}

SnapshotFile::Place SnapshotFile::locate(uint64_t h) const {
  uint64_t p = directory_[h >> shift_];
  while (p + 1 < fences_.size() && fences_[p + 1] <= h) ++p;
  uint64_t low = fences_[p], high = p + 1 < fences_.size() ? fences_[p + 1] : ~uint64_t{0};
  uint32_t count = rows_on(p);
  double share = h <= low ? 0.0 : static_cast<double>(h - low) / static_cast<double>(high - low);
  auto guess = std::min(static_cast<uint32_t>(share * count), count - 1);
  const uint8_t* keys = page(1 + p) + sizeof(ssd::PageHeader);
  __builtin_prefetch(keys + 8ull * guess);
  __builtin_prefetch(&verified_[p / kWordBits]);
  return {p, guess, count};
}

const uint8_t* SnapshotFile::find(uint64_t key, uint64_t h, const Place& place) const {
  return find_on(verified_page(place.page), key, h, place);
}

const uint8_t* SnapshotFile::find_on(const uint8_t* bytes, uint64_t key, uint64_t h, const Place& place) const {
  uint32_t i = place.guess;
  uint64_t found = ssd::page_key(bytes, ssd::PageKind::kRows, i);
  if (found != key) {
    // Towards the key; ends where the hashes pass h.
    bool up = hash_key(found) < h;
    do {
      if (up ? ++i == place.count : i-- == 0) return nullptr;
      found = ssd::page_key(bytes, ssd::PageKind::kRows, i);
      if (found == key) return ssd::page_row(bytes, geometry_, i);
    } while ((hash_key(found) < h) == up);
    return nullptr;
  }
  return ssd::page_row(bytes, geometry_, i);
}

uint32_t SnapshotFile::rows_on(uint64_t row_page) const {
  uint64_t per_page = geometry_.rows_per_page();
  return static_cast<uint32_t>(std::min(per_page, header_.rows - row_page * per_page));
}

const uint8_t* SnapshotFile::verified_page(uint64_t row_page) const {
  const uint8_t* bytes = page(1 + row_page);
  std::atomic<uint64_t>& word = verified_[row_page / kWordBits];
  uint64_t bit = uint64_t{1} << (row_page % kWordBits);
  if (word.load(std::memory_order_relaxed) & bit) return bytes;
  check_page(bytes, row_page);
  word.fetch_or(bit, std::memory_order_relaxed);
  return bytes;
}

void SnapshotFile::check_page(const uint8_t* bytes, uint64_t row_page) const {
  std::string damage = ssd::page_damage(bytes, geometry_, header_.nonce, 1 + row_page, ssd::PageKind::kRows);
  if (damage.empty() && ssd::page_header(bytes).count != rows_on(row_page)) damage = "wrong number of rows";
  if (!damage.empty()) corrupt(path(), "page " + std::to_string(1 + row_page) + ": " + damage);
}

void SnapshotFile::verify() const {
  // A page that is not in the page cache would be read alone: expect_random_reads().
  const uint64_t part = std::max<uint64_t>(1, kReadBytes / geometry_.page_bytes);
  for (uint64_t p = 0, requested = 0; p < layout_.row_pages; ++p) {
    for (; requested < layout_.row_pages && requested < p + kReadsAhead * part; requested += part)
      file_.read_ahead((1 + requested) * geometry_.page_bytes, part * geometry_.page_bytes);
    verified_page(p);
  }
}

void SnapshotFile::for_each(const std::function<void(uint64_t, const uint8_t*)>& fn) const {
  for (uint64_t p = 0; p < layout_.row_pages; ++p) {
    const uint8_t* bytes = verified_page(p);
    for (uint32_t i = 0; i < rows_on(p); ++i)
      fn(ssd::page_key(bytes, ssd::PageKind::kRows, i), ssd::page_row(bytes, geometry_, i));
  }
  for (uint64_t key : deleted_) fn(key, nullptr);
}

void SnapshotFile::copy_rows(uint64_t first, uint64_t n, uint64_t* keys, uint8_t* rows) const {
  if (first > header_.rows || n > header_.rows - first) throw Error("rows beyond the end of the snapshot");
  uint64_t per_page = geometry_.rows_per_page();
  for (uint64_t done = 0; done < n;) {
    uint64_t p = (first + done) / per_page, i = (first + done) % per_page;
    const uint8_t* bytes = verified_page(p);
    uint64_t count = std::min<uint64_t>(rows_on(p) - i, n - done);
    std::memcpy(keys + done, bytes + sizeof(ssd::PageHeader) + 8 * i, 8 * count);
    std::memcpy(rows + done * geometry_.row_bytes, ssd::page_row(bytes, geometry_, static_cast<uint32_t>(i)),
                count * geometry_.row_bytes);
    done += count;
  }
}

HugeVector<uint64_t> SnapshotFile::read_column(uint64_t first_page, uint64_t values, uint32_t per_page,
                                               ssd::PageKind kind) const {
  HugeVector<uint64_t> column(values);
  uint32_t offset = ssd::keys_offset(kind == ssd::PageKind::kFences ? ssd::PageKind::kRows : kind);
  for (uint64_t done = 0, number = first_page; done < values; ++number) {
    uint64_t count = std::min<uint64_t>(per_page, values - done);
    std::string damage = ssd::page_damage(page(number), geometry_, header_.nonce, number, kind);
    if (damage.empty() && ssd::page_header(page(number)).count != count) damage = "wrong number of entries";
    if (!damage.empty()) corrupt(path(), "page " + std::to_string(number) + ": " + damage);
    std::memcpy(&column[done], page(number) + offset, 8 * count);
    done += count;
  }
  return column;
}

}  // namespace thermocline::serving
