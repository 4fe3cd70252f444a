// The ids are scattered into partitions by hash, each small enough for a hash table inside the L2 cache. Partitions
// are independent, and scattering keeps positions ascending; so each step is parallel, and its result does not
// depend on how the work was cut.
#include "mem/dedup.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "util/error.h"
#include "util/hash.h"

namespace thermocline {
namespace {

constexpr size_t kPartitionIds = 8192;
constexpr size_t kMaxPartitions = 256;
constexpr uint32_t kEmpty = ~uint32_t{0};

}  // namespace

// Arrays of n elements; a partition uses its own range of each.
struct Dedup::Scratch {
  uint64_t* keys;     // the ids, grouped by partition
  uint32_t* pos;      // their positions in the batch
  uint32_t* local;    // per id: which unique key of the partition
  uint32_t* first;    // per unique key of the partition: position of the first occurrence
  uint32_t* count;    // per unique key: occurrences, later the cursor into `order`
  uint8_t* is_first;  // by position in the batch
};

Dedup::Scratch Dedup::scratch(size_t n) {
  const size_t room = (n + 63) / 64 * 64;
  const size_t bytes = room * 25;
  if (memory_.size() < bytes) {
    memory_ = HugeBuffer();  // before the larger one, so that both never exist together
    memory_ = HugeBuffer(bytes);
  }
  auto* p = memory_.as<uint8_t>();
  auto* words = reinterpret_cast<uint32_t*>(p + 8 * room);
  return {reinterpret_cast<uint64_t*>(p), words, words + room, words + 2 * room, words + 3 * room, p + 24 * room};
}

WorkingSet Dedup::run(const uint64_t* ids, size_t n) {
  if (n >= kEmpty) throw Error("a batch of " + std::to_string(n) + " ids: at most 2^32 - 2 can be taken at once");
  std::lock_guard lock(mutex_);
  const Scratch s = scratch(n);
  const size_t parts = std::bit_ceil(std::clamp<size_t>(n / kPartitionIds, 1, kMaxPartitions));
  const int shift = 64 - std::countr_zero(parts);
  const auto part_of = [&](uint64_t key) -> size_t { return parts == 1 ? 0 : hash_key(key) >> shift; };
  const size_t chunks = std::min<size_t>(pool_.size(), n / kPartitionIds + 1);
  const auto chunk_begin = [&](size_t c) { return n * c / chunks; };

  // 1. Scatter ids by partition. place[c][p]: where chunk c writes its next id of partition p.
  std::vector<std::vector<uint32_t>> place(chunks, std::vector<uint32_t>(parts, 0));
  pool_.parallel(chunks, [&](size_t c) {
    auto& counts = place[c];
    for (size_t i = chunk_begin(c); i < chunk_begin(c + 1); ++i) ++counts[part_of(ids[i])];
  });
  std::vector<uint32_t> begin(parts + 1);
  uint32_t sum = 0;
  for (size_t p = 0; p < parts; ++p) {
    begin[p] = sum;
    for (size_t c = 0; c < chunks; ++c) sum += std::exchange(place[c][p], sum);
  }
  begin[parts] = sum;
  pool_.parallel(chunks, [&](size_t c) {
    auto& next = place[c];
    for (size_t i = chunk_begin(c); i < chunk_begin(c + 1); ++i) {
      const uint32_t to = next[part_of(ids[i])]++;
      s.keys[to] = ids[i];
      s.pos[to] = static_cast<uint32_t>(i);
    }
    std::memset(s.is_first + chunk_begin(c), 0, chunk_begin(c + 1) - chunk_begin(c));
  });

  // 2. Number the unique keys of each partition.
  std::vector<uint32_t> uniques(parts);
  pool_.parallel(parts, [&](size_t p) {
    const uint32_t lo = begin[p], size = begin[p + 1] - lo;
    const uint64_t mask = std::bit_ceil(size_t{2} * size + 2) - 1;
    std::vector<uint32_t> table(mask + 1, kEmpty);
    std::vector<uint64_t> known(size);
    uint32_t found = 0;
    for (uint32_t j = lo; j < lo + size; ++j) {
      const uint64_t key = s.keys[j];
      uint64_t at = hash_key(key) & mask;
      while (table[at] != kEmpty && known[table[at]] != key) at = (at + 1) & mask;
      if (table[at] == kEmpty) {
        table[at] = found;
        known[found] = key;
        s.first[lo + found] = s.pos[j];
        s.count[lo + found] = 0;
        s.is_first[s.pos[j]] = 1;
        ++found;
      }
      s.local[j] = table[at];
      ++s.count[lo + table[at]];
    }
    uniques[p] = found;
  });

  // 3. Rank first occurrences: the rank is the key's place in the working set, parked in `inverse` at that position.
  WorkingSet out;
  out.ids = n;
  out.inverse = std::make_unique_for_overwrite<uint32_t[]>(n);
  out.order = std::make_unique_for_overwrite<uint32_t[]>(n);
  std::vector<uint32_t> rank(chunks + 1, 0);
  pool_.parallel(chunks, [&](size_t c) {
    uint32_t firsts = 0;
    for (size_t i = chunk_begin(c); i < chunk_begin(c + 1); ++i) firsts += s.is_first[i];
    rank[c + 1] = firsts;
  });
  for (size_t c = 0; c < chunks; ++c) rank[c + 1] += rank[c];
  out.unique = rank[chunks];
  out.keys = std::make_unique_for_overwrite<uint64_t[]>(out.unique);
  out.starts = std::make_unique_for_overwrite<uint32_t[]>(out.unique + 1);
  pool_.parallel(chunks, [&](size_t c) {
    uint32_t r = rank[c];
    for (size_t i = chunk_begin(c); i < chunk_begin(c + 1); ++i) {
      if (!s.is_first[i]) continue;
      out.keys[r] = ids[i];
      out.inverse[i] = r++;
    }
  });

  // 4. Counts -> starts.
  pool_.parallel(parts, [&](size_t p) {
    for (uint32_t u = begin[p]; u < begin[p] + uniques[p]; ++u) out.starts[out.inverse[s.first[u]] + 1] = s.count[u];
  });
  out.starts[0] = 0;
  for (size_t u = 0; u < out.unique; ++u) out.starts[u + 1] += out.starts[u];

  // 5. Every id's rank, and every key's positions.
  pool_.parallel(parts, [&](size_t p) {
    const uint32_t lo = begin[p];
    for (uint32_t u = lo; u < lo + uniques[p]; ++u) {
      const uint32_t r = out.inverse[s.first[u]];
      s.first[u] = r;
      s.count[u] = out.starts[r];
    }
    for (uint32_t j = lo; j < begin[p + 1]; ++j) {
      const uint32_t u = lo + s.local[j];
      out.inverse[s.pos[j]] = s.first[u];
      out.order[s.count[u]++] = s.pos[j];
    }
  });
  return out;
}

}  // namespace thermocline
