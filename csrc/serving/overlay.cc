#include "serving/overlay.h"

#include <algorithm>
#include <bit>

#include "util/hash.h"

namespace thermocline::serving {

const uint8_t* Overlay::deleted() {
  static constexpr uint8_t kMark = 0;
  return &kMark;
}

Overlay::Overlay(size_t expected)
    : entries_(std::bit_ceil(std::max<size_t>(2 * expected, 16)) * sizeof(Entry)),
      mask_(entries_.size() / sizeof(Entry) - 1) {}

std::shared_ptr<const Overlay> Overlay::merge(const std::vector<std::shared_ptr<const Overlay>>& older,
                                              const std::shared_ptr<const SnapshotFile>& newer) {
  size_t expected = newer->rows() + newer->deleted().size();
  for (const auto& overlay : older) expected += overlay ? overlay->size() : 0;
  std::shared_ptr<Overlay> merged(new Overlay(expected));
  for (const auto& overlay : older) {
    if (!overlay) continue;
    for (const Entry& entry : overlay->entries())
      if (entry.row != nullptr) merged->insert(entry.key, entry.row);
    merged->files_.insert(merged->files_.end(), overlay->files_.begin(), overlay->files_.end());
  }
  newer->for_each([&](uint64_t key, const uint8_t* row) { merged->insert(key, row ? row : deleted()); });
  merged->files_.push_back(newer);
  return merged;
}

void Overlay::insert(uint64_t key, const uint8_t* row) {
  for (uint64_t i = hash_key(key) & mask_;; i = (i + 1) & mask_) {
    Entry& entry = entries_.as<Entry>()[i];
    if (entry.row == nullptr) {
      entry = {key, row};
      ++size_;
      return;
    }
    if (entry.key == key) {
      entry.row = row;
      return;
    }
  }
}

const Overlay::Entry* Overlay::find(uint64_t key, uint64_t h) const {
  const Entry* entries = entries_.as<Entry>();
  for (uint64_t i = h & mask_; entries[i].row != nullptr; i = (i + 1) & mask_)
    if (entries[i].key == key) return &entries[i];
  return nullptr;
}

}  // namespace thermocline::serving
