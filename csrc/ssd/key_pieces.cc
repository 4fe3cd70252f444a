#include "ssd/key_pieces.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

namespace thermocline::ssd {
namespace {

constexpr size_t kGroupKeys = 512;   // about, of one group
constexpr size_t kLeastMost = 2048;  // the last pieces of the largest lookups
constexpr size_t kLeastWide = 4;     // pieces that are larger because of `span`
constexpr size_t kRangeKeys = 32768;
constexpr size_t kPrefetchAhead = 16;

}  // namespace

KeyPieces::KeyPieces(const uint64_t* keys, size_t n, size_t workers, size_t least, uint64_t span, ThreadPool& pool)
    : keys_(keys),
      n_(n),
      workers_(workers),
      least_(std::clamp(n / (16 * workers), least, std::max(least, kLeastMost))) {
  if (n > kMostKeys) {
    divide(span, pool);
    return;
  }
  sorted_.resize(n);
  for (size_t i = 0; i < n; ++i) sorted_[i] = {hash_key(keys[i]), static_cast<uint32_t>(i)};
  sort_items(sorted_);
}

// A counting sort of the keys by the upper bits of their hash, relative to the least one: callers that look up a range
// of hashes at a time get groups as small as others.
void KeyPieces::divide(uint64_t span, ThreadPool& pool) {
  const size_t ranges = std::clamp<size_t>(n_ / kRangeKeys, 1, workers_);
  auto first = [&](size_t range) { return n_ * range / ranges; };
  std::vector<uint64_t> least(ranges), greatest(ranges);
  pool.parallel(ranges, [&](size_t r) {
    uint64_t lo = std::numeric_limits<uint64_t>::max(), hi = 0;
    for (size_t i = first(r); i < first(r + 1); ++i) {
      const uint64_t hash = hash_key(keys_[i]);
      lo = std::min(lo, hash);
      hi = std::max(hi, hash);
    }
    least[r] = lo;
    greatest[r] = hi;
  });
  const uint64_t lo = *std::min_element(least.begin(), least.end());
  const uint64_t hi = *std::max_element(greatest.begin(), greatest.end());

  const double share = std::min(1.0, static_cast<double>(span) / (static_cast<double>(hi - lo) + 1));
  const auto in_span = static_cast<size_t>(share * static_cast<double>(n_));
  const size_t most = std::max(n_ / workers_, std::min(n_ / kLeastWide, 2 * kMostKeys));
  const size_t keys = std::min({in_span, most, kMostSpanKeys});
  wide_ = keys > kMostKeys;
  if (wide_) least_ = keys;

  int bits = std::min<int>(std::bit_width(n_ / kGroupKeys), 12);  // more groups scatter over too many pages of memory
  while (bits < 16 && (n_ >> bits) > kMostKeys / 2) ++bits;
  const int shift = std::max(0, static_cast<int>(std::bit_width(hi - lo)) - bits);
  auto group_of = [=](uint64_t hash) { return (hash - lo) >> shift; };
  const size_t groups = group_of(hi) + 1;

  std::vector<std::vector<uint32_t>> starts(ranges);  // per range and group: first the count, then the next place
  pool.parallel(ranges, [&](size_t r) {
    starts[r].assign(groups, 0);
    for (size_t i = first(r); i < first(r + 1); ++i) ++starts[r][group_of(hash_key(keys_[i]))];
  });
  dividing_ = ranges * groups * sizeof(uint32_t);
  ends_.resize(groups);
  uint32_t at = 0;
  for (size_t g = 0; g < groups; ++g) {
    for (size_t r = 0; r < ranges; ++r) at += std::exchange(starts[r][g], at);
    ends_[g] = at;
  }
  order_ = std::make_unique_for_overwrite<uint32_t[]>(n_);
  pool.parallel(ranges, [&](size_t r) {
    for (size_t i = first(r); i < first(r + 1); ++i)
      order_[starts[r][group_of(hash_key(keys_[i]))]++] = static_cast<uint32_t>(i);
  });
}

bool KeyPieces::claim(size_t* begin, size_t* end) {
  std::lock_guard lock(mutex_);
  if (taken_ == n_) return false;
  const size_t share = workers_ == 1 ? kMostKeys : (n_ - taken_) / (4 * workers_);
  const size_t want = std::clamp(share, least_, std::max(least_, kMostKeys));
  *begin = taken_;
  if (!order_) {
    taken_ = std::min(n_, taken_ + want);
  } else {
    while (group_ < ends_.size() && ends_[group_] - *begin <= want) taken_ = ends_[group_++];
    // A group that is larger alone. Only repeated and crafted keys have groups of more than kMostKeys: those are
    // divided in the order of the call, and their pieces may read the same pages.
    if (taken_ == *begin) taken_ = std::min<size_t>(*begin + kMostKeys, ends_[group_]);
  }
  *end = taken_;
  return true;
}

bool KeyPieces::next(std::vector<Item>& items, std::vector<Item>& scratch) {
  size_t begin, end;
  if (!claim(&begin, &end)) return false;
  if (!order_) {
    items.assign(sorted_.begin() + static_cast<ptrdiff_t>(begin), sorted_.begin() + static_cast<ptrdiff_t>(end));
    return true;
  }
  items.resize(end - begin);
  for (size_t j = begin; j < end; ++j) {
    __builtin_prefetch(&keys_[order_[std::min(j + kPrefetchAhead, end - 1)]]);
    const uint32_t i = order_[j];
    items[j - begin] = {hash_key(keys_[i]), i};
  }
  sort_items(items, scratch);
  return true;
}

bool KeyPieces::left() const {
  std::lock_guard lock(mutex_);
  return taken_ < n_;
}

uint64_t KeyPieces::memory() const {
  const uint64_t indices = (order_ ? n_ : 0) + ends_.capacity();
  return sorted_.capacity() * sizeof(Item) + indices * sizeof(uint32_t) + dividing_;
}

}  // namespace thermocline::ssd
