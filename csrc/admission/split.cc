#include "admission/split.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace thermocline {
namespace {

// Positions with a flag that is not 0, ascending. Most batches have few: eight flags are tested at once.
std::vector<uint32_t> positions_of(const uint8_t* flags, size_t n) {
  std::vector<uint32_t> found;
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, flags + i, 8);
    if (eight == 0) continue;
    for (size_t j = i; j < i + 8; ++j)
      if (flags[j]) found.push_back(static_cast<uint32_t>(j));
  }
  for (; i < n; ++i)
    if (flags[i]) found.push_back(static_cast<uint32_t>(i));
  return found;
}

// Copies the values at `lost` to `others`, and the values between them to `kept`.
template <typename T>
void divide(const T* values, size_t n, const std::vector<uint32_t>& lost, T* kept, T* others) {
  size_t begin = 0;
  for (uint32_t at : lost) {
    kept = std::copy(values + begin, values + at, kept);
    *others++ = values[at];
    begin = at + 1;
  }
  std::copy(values + begin, values + n, kept);
}

}  // namespace

SplitBags split_bags(const uint64_t* ids, const Bags& bags, const uint8_t* refused) {
  const std::vector<uint32_t> lost = positions_of(refused, bags.ids);
  SplitBags out;
  out.others = lost.size();
  out.kept = bags.ids - lost.size();
  out.ids = Recycled<uint64_t>(out.kept);
  out.other_ids = Recycled<uint64_t>(out.others);
  divide(ids, bags.ids, lost, out.ids.get(), out.other_ids.get());
  if (bags.weights) {
    out.weights = Recycled<float>(out.kept);
    out.other_weights = Recycled<float>(out.others);
    divide(bags.weights, bags.ids, lost, out.weights.get(), out.other_weights.get());
  }
  out.offsets = Recycled<int64_t>(bags.bags + 1);
  out.place = Recycled<int64_t>(std::min(out.others, bags.bags));
  out.other_offsets = Recycled<int64_t>(std::min(out.others, bags.bags) + 1);
  int64_t* const offsets = out.offsets.get();
  const auto first_of = [given = bags.offsets](size_t bag) { return given ? given[bag] : static_cast<int64_t>(bag); };
  size_t before = 0, bag = 0;  // others before the bag
  offsets[0] = out.other_offsets[0] = 0;
  while (bag < bags.bags) {
    // Bags up to the one with the next refused id have all their ids.
    const int64_t next = before < lost.size() ? lost[before] : static_cast<int64_t>(bags.ids);
    const auto moved = static_cast<int64_t>(before);
    while (bag < bags.bags && first_of(bag + 1) <= next) {
      offsets[bag + 1] = first_of(bag + 1) - moved;
      ++bag;
    }
    if (bag == bags.bags) break;
    while (before < lost.size() && lost[before] < first_of(bag + 1)) ++before;
    offsets[bag + 1] = first_of(bag + 1) - static_cast<int64_t>(before);
    out.place[out.places++] = static_cast<int64_t>(bag);
    out.other_offsets[out.places] = static_cast<int64_t>(before);
    ++bag;
  }
  return out;
}

WorkingSet split_working_set(const WorkingSetView& all, const uint8_t* refused) {
  const std::vector<uint32_t> lost = positions_of(refused, all.ids);
  std::vector<uint32_t> lost_keys;  // ascending, as keys are in the order of their first occurrence
  for (uint32_t at : lost)
    if (all.order[all.starts[all.inverse[at]]] == at) lost_keys.push_back(all.inverse[at]);
  WorkingSet out;
  out.ids = all.ids - lost.size();
  out.unique = all.unique - lost_keys.size();
  out.keys = Recycled<uint64_t>(out.unique);
  out.starts = Recycled<uint32_t>(out.unique + 1);
  out.inverse = Recycled<uint32_t>(out.ids + 1);
  out.order = Recycled<uint32_t>(out.ids);
  const Recycled<uint32_t> index(all.unique);  // of each trained key among them
  size_t key = 0;
  uint32_t lost_ids = 0;  // of the keys before
  for (size_t before = 0; before <= lost_keys.size(); ++before) {
    const size_t end = before < lost_keys.size() ? lost_keys[before] : all.unique;
    for (; key < end; ++key) {
      index[key] = static_cast<uint32_t>(key - before);
      out.keys[key - before] = all.keys[key];
      out.starts[key - before] = all.starts[key] - lost_ids;
    }
    if (key == all.unique) break;
    lost_ids += all.starts[key + 1] - all.starts[key];
    index[key++] = 0;
  }
  out.starts[out.unique] = static_cast<uint32_t>(out.ids);
  const Recycled<uint32_t> position(all.ids);  // of each trained id among them
  uint32_t ids = 0;
  for (size_t i = 0; i < all.ids; ++i) {
    position[i] = ids;
    out.inverse[ids] = index[all.inverse[i]];
    ids += !refused[i];
  }
  uint32_t* order = out.order.get();
  size_t at = 0;
  for (size_t k = 0; k <= lost_keys.size(); ++k) {  // occurrences of the keys between two that are lost
    const size_t end = k < lost_keys.size() ? all.starts[lost_keys[k]] : all.ids;
    for (; at < end; ++at) *order++ = position[all.order[at]];
    if (k < lost_keys.size()) at = all.starts[lost_keys[k] + 1];
  }
  return out;
}

void add_at_places(const int64_t* places, size_t n, size_t dim, const float* rows, float* out) {
  constexpr size_t kAhead = 8;  // rows that are requested before they are used
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(out + static_cast<size_t>(places[i + kAhead]) * dim, 1);
    float* const sum = out + static_cast<size_t>(places[i]) * dim;
    for (size_t j = 0; j < dim; ++j) sum[j] += rows[i * dim + j];
  }
}

}  // namespace thermocline
