#include "serving/view.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "util/error.h"
#include "util/hash.h"

namespace thermocline::serving {
namespace {

constexpr size_t kBlock = 64;              // keys whose memory accesses overlap
constexpr size_t kScanRows = 4096;         // read ahead from the base
constexpr size_t kLeastRecent = 1u << 14;  // changes below which a delta does not rebuild the main overlay

// Changes since the main overlay that a recent one holds beside it.
size_t most_recent(size_t main) { return std::max(kLeastRecent, main / 4); }

float half_to_float(uint16_t half) {
  _Float16 value;
  std::memcpy(&value, &half, 2);
  return static_cast<float>(value);
}

}  // namespace

uint64_t row_bytes_of(RowFormat format, uint32_t dim) {
  switch (format) {
    case RowFormat::kFp32:
      return uint64_t{4} * dim;
    case RowFormat::kFp16:
      return uint64_t{2} * dim;
    case RowFormat::kInt8:
      return uint64_t{8} + dim;
  }
  throw Error("unknown row format");
}

// ---- View

std::shared_ptr<const View> View::open(const std::string& base, RowFormat format, uint32_t dim) {
  auto view = std::shared_ptr<View>(new View);
  view->base_ = std::make_shared<const SnapshotFile>(base);
  view->format_ = format;
  view->dim_ = dim;
  if (view->base_->row_bytes() != row_bytes_of(format, dim))
    throw FormatError(base + ": rows of " + std::to_string(view->base_->row_bytes()) + " bytes, expected " +
                      std::to_string(row_bytes_of(format, dim)));
  if (!view->base_->deleted().empty()) throw FormatError(base + ": a base has no deleted keys");
  return view;
}

std::shared_ptr<const View> View::with_delta(const std::string& delta) const {
  auto file = std::make_shared<const SnapshotFile>(delta);
  if (file->row_bytes() != row_bytes())
    throw FormatError(delta + ": rows of " + std::to_string(file->row_bytes()) + " bytes, expected " +
                      std::to_string(row_bytes()));
  file->verify();
  auto view = std::shared_ptr<View>(new View(*this));
  size_t recent = (recent_ ? recent_->size() : 0) + file->rows() + file->deleted().size();
  size_t main = main_ ? main_->size() : 0;
  std::shared_ptr<ChangeFilter> filter;
  if (recent <= most_recent(main) && filter_) {
    view->recent_ = Overlay::merge({recent_}, file);
    filter = std::make_shared<ChangeFilter>(*filter_);
    file->for_each([&](uint64_t key, const uint8_t*) { filter->add(hash_key(key)); });
  } else {
    view->main_ = Overlay::merge({main_, recent_}, file);
    view->recent_ = nullptr;
    main = view->main_->size();
    filter = std::make_shared<ChangeFilter>(main + most_recent(main));
    for (const Overlay::Entry& entry : view->main_->entries())
      if (entry.row != nullptr) filter->add(hash_key(entry.key));
  }
  view->filter_ = std::move(filter);
  return view;
}

std::shared_ptr<const View> View::with_direct_reads(std::shared_ptr<FileSystem> fs) const {
  auto view = std::shared_ptr<View>(new View(*this));
  view->direct_ = std::make_shared<PageReader>(std::move(fs), base_->path(), base_->page_bytes());
  return view;
}

const Overlay::Entry* View::find_changed(uint64_t key, uint64_t h) const {
  const Overlay::Entry* entry = recent_ ? recent_->find(key, h) : nullptr;
  return entry == nullptr ? main_->find(key, h) : entry;
}

namespace {

// The keys of a lookup that are read from the base, in order of their pages.
struct Wanted {
  SnapshotFile::Place place;
  uint64_t hash;
  size_t index;
};
struct Pages {
  std::vector<uint64_t> numbers;  // in the file, each once
  std::vector<size_t> firsts;     // index of the first key of each page; then the number of keys
};

Pages pages_of(std::vector<Wanted>& wanted) {
  std::sort(wanted.begin(), wanted.end(), [](auto& a, auto& b) { return a.place.page < b.place.page; });
  Pages pages;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const uint64_t number = 1 + wanted[i].place.page;
    if (!pages.numbers.empty() && pages.numbers.back() == number) continue;
    pages.numbers.push_back(number);
    pages.firsts.push_back(i);
  }
  pages.firsts.push_back(wanted.size());
  return pages;
}

}  // namespace

void View::prefetch_block(const uint64_t* keys, size_t n, uint64_t* hashes) const {
  for (size_t i = 0; i < n; ++i) {
    hashes[i] = hash_key(keys[i]);
    base_->prefetch_directory(hashes[i]);
    if (filter_) filter_->prefetch(hashes[i]);
  }
  for (size_t i = 0; i < n && base_->rows() > 0; ++i) base_->prefetch_fence(hashes[i]);
}

void View::lookup_direct(const uint64_t* keys, size_t n, uint8_t* found, float* out) const {
  std::vector<Wanted> wanted;
  wanted.reserve(n);
  uint64_t hashes[kBlock];
  for (size_t i = 0; i < n; ++i) {
    if (i % kBlock == 0) prefetch_block(keys + i, std::min(kBlock, n - i), hashes);
    const uint64_t h = hashes[i % kBlock];
    const Overlay::Entry* entry = filter_ && filter_->may_contain(h) ? find_changed(keys[i], h) : nullptr;
    found[i] = entry != nullptr && entry->row != Overlay::deleted();
    if (found[i]) decode(entry->row, out + i * dim_);
    if (entry == nullptr && base_->rows() > 0) wanted.push_back({base_->locate(h), h, i});
  }
  const Pages pages = pages_of(wanted);
  direct_->read(pages.numbers, [&](size_t page, const uint8_t* bytes) {
    base_->check_page(bytes, pages.numbers[page] - 1);
    for (size_t k = pages.firsts[page]; k < pages.firsts[page + 1]; ++k) {
      const size_t i = wanted[k].index;
      const uint8_t* row = base_->find_on(bytes, keys[i], wanted[k].hash, wanted[k].place);
      found[i] = row != nullptr;
      if (row != nullptr) decode(row, out + i * dim_);
    }
  });
}

double View::read_floor(const uint64_t* keys, size_t n) const {
  if (!direct_) throw Error("read_floor() needs direct reads");
  std::vector<Wanted> wanted;
  for (size_t i = 0; i < n && base_->rows() > 0; ++i) wanted.push_back({base_->locate(hash_key(keys[i])), 0, i});
  const Pages pages = pages_of(wanted);
  const auto start = std::chrono::steady_clock::now();
  direct_->read(pages.numbers, [](size_t, const uint8_t*) {});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void View::lookup(const uint64_t* keys, size_t n, uint8_t* found, float* out) const {
  if (direct_) return lookup_direct(keys, n, found, out);
  uint64_t hashes[kBlock];
  SnapshotFile::Place places[kBlock];
  const uint8_t* rows[kBlock];
  uint8_t changed[kBlock];
  const bool has_base = base_->rows() > 0;
  for (size_t first = 0; first < n; first += kBlock) {
    const size_t count = std::min(kBlock, n - first);
    const uint64_t* block = keys + first;
    prefetch_block(block, count, hashes);
    for (size_t i = 0; i < count; ++i) {
      changed[i] = filter_ && filter_->may_contain(hashes[i]);
      if (changed[i]) {
        main_->prefetch(hashes[i]);
        if (recent_) recent_->prefetch(hashes[i]);
      } else if (has_base) {
        places[i] = base_->locate(hashes[i]);
      }
    }
    for (size_t i = 0; i < count; ++i) {
      const Overlay::Entry* entry = nullptr;
      if (changed[i]) {
        entry = find_changed(block[i], hashes[i]);
        if (entry == nullptr && has_base) places[i] = base_->locate(hashes[i]);  // a false positive of the filter
      }
      if (entry != nullptr) rows[i] = entry->row == Overlay::deleted() ? nullptr : entry->row;
      else rows[i] = has_base ? base_->find(block[i], hashes[i], places[i]) : nullptr;
      if (rows[i] != nullptr) {
        __builtin_prefetch(rows[i]);
        __builtin_prefetch(rows[i] + 64);
      }
    }
    for (size_t i = 0; i < count; ++i) {
      found[first + i] = rows[i] != nullptr;
      if (rows[i] != nullptr) decode(rows[i], out + (first + i) * dim_);
    }
  }
}

void View::decode(const uint8_t* row, float* out) const {
  if (format_ == RowFormat::kFp32) {
    std::memcpy(out, row, size_t{4} * dim_);
  } else if (format_ == RowFormat::kFp16) {
    for (uint32_t i = 0; i < dim_; ++i) {
      uint16_t half;
      std::memcpy(&half, row + 2ull * i, 2);
      out[i] = half_to_float(half);
    }
  } else {
    float scale, offset;
    std::memcpy(&scale, row, 4);
    std::memcpy(&offset, row + 4, 4);
    for (uint32_t i = 0; i < dim_; ++i) out[i] = offset + scale * static_cast<float>(row[8 + i]);
  }
}

uint64_t View::changed_rows() const {
  uint64_t count = main_ ? main_->size() : 0;
  if (!recent_) return count;
  for (const Overlay::Entry& entry : recent_->entries())
    if (entry.row != nullptr && !(main_ && main_->find(entry.key, hash_key(entry.key)))) ++count;
  return count;
}

uint64_t View::mem_bytes() const {
  return base_->mem_bytes() + (main_ ? main_->mem_bytes() : 0) + (recent_ ? recent_->mem_bytes() : 0) +
         (filter_ ? filter_->mem_bytes() : 0);
}

// ---- Scan

View::Scan::Scan(std::shared_ptr<const View> view) : view_(std::move(view)) {
  for (const auto& overlay : {view_->recent_, view_->main_}) {
    if (!overlay) continue;
    for (const Overlay::Entry& entry : overlay->entries()) {
      if (entry.row == nullptr) continue;
      bool newer = overlay == view_->main_ && view_->recent_ && view_->recent_->find(entry.key, hash_key(entry.key));
      if (!newer) changed_.push_back(entry);
    }
  }
  std::sort(changed_.begin(), changed_.end(),
            [](const auto& a, const auto& b) { return hash_key(a.key) < hash_key(b.key); });
  keys_.resize(kScanRows);
  rows_.resize(kScanRows * view_->row_bytes());
}

size_t View::Scan::next(size_t max_rows, uint64_t* keys, uint8_t* rows) {
  const size_t row_bytes = view_->row_bytes();
  size_t n = 0;
  while (n < max_rows) {
    if (ahead_at_ == ahead_ && base_at_ < view_->base_->rows()) {
      ahead_ = std::min<uint64_t>(kScanRows, view_->base_->rows() - base_at_);
      ahead_at_ = 0;
      view_->base_->copy_rows(base_at_, ahead_, keys_.data(), rows_.data());
      base_at_ += ahead_;
    }
    const bool in_base = ahead_at_ < ahead_, in_delta = changed_at_ < changed_.size();
    if (!in_base && !in_delta) break;
    const uint64_t base_hash = in_base ? hash_key(keys_[ahead_at_]) : 0;
    const uint64_t delta_hash = in_delta ? hash_key(changed_[changed_at_].key) : 0;
    if (in_delta && (!in_base || delta_hash <= base_hash)) {
      if (in_base && delta_hash == base_hash) ++ahead_at_;  // replaced or deleted
      const Overlay::Entry& entry = changed_[changed_at_++];
      if (entry.row == Overlay::deleted()) continue;
      keys[n] = entry.key;
      std::memcpy(rows + n++ * row_bytes, entry.row, row_bytes);
    } else {
      keys[n] = keys_[ahead_at_];
      std::memcpy(rows + n++ * row_bytes, &rows_[ahead_at_++ * row_bytes], row_bytes);
    }
  }
  return n;
}

}  // namespace thermocline::serving
