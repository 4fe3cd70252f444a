// Ids are scattered into partitions by hash, each small enough for a hash table in the L2 cache. Partitions are
// independent, and scattering keeps positions ascending. Therefore every step is parallel, and its result does not
// depend on the split into tasks.
//
// Loops keep pointers and bounds in local variables: a store through a pointer may alias variables captured by
// reference, and the compiler would reload them for every id.
#include "dram/dedup.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "dram/kernels.h"
#include "util/error.h"

namespace thermocline {
namespace {

constexpr size_t kPartitionIds = 8192;
constexpr size_t kMinPartitions = 2;  // a shift by 64 bits is undefined
constexpr size_t kMaxPartitions = 256;
constexpr size_t kHashBlock = 256;
constexpr uint32_t kEmpty = ~uint32_t{0};

// Working memory: arrays of n elements. A partition uses its own range of each, for its ids or for its unique keys.
// Three pairs of arrays share memory: the first of a pair is valid until the named step of Run, the second from then
// on.
struct Scattered {
  uint64_t* keys;     // [j] the ids, grouped by partition
  uint32_t* pos;      // [j] position of keys[j] in the batch
  uint32_t* unique;   // [j] index of the unique key of keys[j] in `rank` and `count`; until fill()
  uint32_t* id_rank;  // [j] index of keys[j] in the working set; from fill() on, in the memory of `unique`
  uint32_t* rank;     // [u] index of unique key u in the working set
  uint32_t* count;    // [u] occurrences of unique key u; until fill()
  uint32_t* cursor;   // [u] next index into `order` of unique key u; from fill() on, in the memory of `count`
  uint8_t* part;      // [i] partition of the id at position i; until the end of scatter()
  uint8_t* is_first;  // [i] 1: first occurrence of its key; from number() on, in the memory of `part`
};
constexpr size_t kBytesPerId = 25;

Scattered layout(uint8_t* memory, size_t capacity) {
  auto* words = reinterpret_cast<uint32_t*>(memory + 8 * capacity);
  return {.keys = reinterpret_cast<uint64_t*>(memory),
          .pos = words,
          .unique = words + capacity,
          .id_rank = words + capacity,
          .rank = words + 2 * capacity,
          .count = words + 3 * capacity,
          .cursor = words + 3 * capacity,
          .part = memory + 24 * capacity,
          .is_first = memory + 24 * capacity};
}

struct Range {
  size_t begin, end;
};

// Deduplicates one batch. run() calls the steps in order.
class Run {
 public:
  Run(ThreadPool& pool, const uint64_t* ids, size_t n, const Scattered& scattered)
      : pool_(pool),
        ids_(ids),
        n_(n),
        s_(scattered),
        parts_(std::bit_ceil(std::clamp<size_t>(n / kPartitionIds, kMinPartitions, kMaxPartitions))),
        shift_(64 - std::countr_zero(parts_)),
        chunks_(std::min<size_t>(size_t{4} * pool.size(), n / kPartitionIds + 1)),
        begin_(parts_ + 1, 0),
        uniques_(parts_, 0) {}

  WorkingSet run() {
    out_.ids = n_;
    out_.inverse = Recycled<uint32_t>(n_);
    out_.order = Recycled<uint32_t>(n_);
    scatter();
    pool_.parallel(parts_, [&](size_t p) { number(p); });
    rank();
    pool_.parallel(parts_, [&](size_t p) { fill(p); });
    pool_.parallel(chunks_, [&](size_t c) { invert(c); });
    return std::move(out_);
  }

 private:
  Range chunk(size_t c) const { return {n_ * c / chunks_, n_ * (c + 1) / chunks_}; }

  // Groups the ids by partition. Until invert(), `inverse` has the index of every id in the grouped arrays.
  void scatter() {
    // offsets[c][p]: first the number of ids of chunk c in partition p, then the index of the next one.
    std::vector<std::vector<uint32_t>> offsets(chunks_, std::vector<uint32_t>(parts_, 0));
    pool_.parallel(chunks_, [&](size_t c) {
      const auto [begin, end] = chunk(c);
      const int shift = shift_;
      uint32_t* const counts = offsets[c].data();
      uint8_t* const part = s_.part;
      uint64_t hashes[kHashBlock];
      for (size_t b = begin; b < end; b += kHashBlock) {
        const size_t m = std::min(kHashBlock, end - b);
        kernels().hash_keys(ids_ + b, m, hashes);
        for (size_t i = 0; i < m; ++i) ++counts[part[b + i] = static_cast<uint8_t>(hashes[i] >> shift)];
      }
    });
    uint32_t sum = 0;
    for (size_t p = 0; p < parts_; ++p) {
      begin_[p] = sum;
      for (size_t c = 0; c < chunks_; ++c) sum += std::exchange(offsets[c][p], sum);
    }
    begin_[parts_] = sum;
    pool_.parallel(chunks_, [&](size_t c) {
      const auto [begin, end] = chunk(c);
      const uint64_t* const ids = ids_;
      const Scattered s = s_;
      uint32_t* const next = offsets[c].data();
      uint32_t* const inverse = out_.inverse.get();
      for (size_t i = begin; i < end; ++i) {
        const uint32_t to = next[s.part[i]]++;
        inverse[i] = to;
        s.keys[to] = ids[i];
        s.pos[to] = static_cast<uint32_t>(i);
      }
      std::memset(s.is_first + begin, 0, end - begin);
    });
  }

  // Numbers and counts the unique keys of a partition, in order of first occurrence.
  void number(size_t p) {
    const Scattered s = s_;
    const uint32_t lo = begin_[p], size = begin_[p + 1] - lo;
    const uint64_t mask = std::bit_ceil(size_t{2} * size + 2) - 1;
    std::vector<uint32_t> table_memory(mask + 1, kEmpty);
    std::vector<uint64_t> known_memory(size);
    uint32_t* const table = table_memory.data();
    uint64_t* const known = known_memory.data();
    uint32_t found = 0;
    uint64_t hashes[kHashBlock];
    for (uint32_t b = lo; b < lo + size; b += kHashBlock) {
      const uint32_t end = std::min<uint32_t>(b + kHashBlock, lo + size);
      kernels().hash_keys(s.keys + b, end - b, hashes);
      for (uint32_t j = b; j < end; ++j) {
        const uint64_t key = s.keys[j];
        uint64_t at = hashes[j - b] & mask;
        uint32_t u = table[at];
        while (u != kEmpty && known[u] != key) u = table[at = (at + 1) & mask];
        if (u == kEmpty) {
          u = found++;
          table[at] = u;
          known[u] = key;
          s.count[lo + u] = 0;
          s.is_first[s.pos[j]] = 1;
        }
        s.unique[j] = lo + u;
        ++s.count[lo + u];
      }
    }
    uniques_[p] = found;
  }

  // The rank of a first occurrence among all first occurrences is the index of its key in the working set.
  void rank() {
    std::vector<uint32_t> ranks(chunks_ + 1, 0);
    pool_.parallel(chunks_, [&](size_t c) {
      const auto [begin, end] = chunk(c);
      const uint8_t* const is_first = s_.is_first;
      uint32_t firsts = 0;
      for (size_t i = begin; i < end; ++i) firsts += is_first[i];
      ranks[c + 1] = firsts;
    });
    for (size_t c = 0; c < chunks_; ++c) ranks[c + 1] += ranks[c];
    out_.unique = ranks[chunks_];
    out_.keys = Recycled<uint64_t>(out_.unique);
    out_.starts = Recycled<uint32_t>(out_.unique + 1);
    uint32_t* const starts = out_.starts.get();
    pool_.parallel(chunks_, [&](size_t c) {
      const auto [begin, end] = chunk(c);
      const Scattered s = s_;
      const uint64_t* const ids = ids_;
      const uint32_t* const inverse = out_.inverse.get();
      uint64_t* const keys = out_.keys.get();
      // Collects the first occurrences without an unpredictable branch, in the memory of `order`, unused until fill().
      uint32_t* const firsts = out_.order.get() + begin;
      size_t found = 0;
      for (size_t i = begin; i < end; ++i) {
        firsts[found] = static_cast<uint32_t>(i);
        found += s.is_first[i];
      }
      uint32_t r = ranks[c];
      for (size_t f = 0; f < found; ++f, ++r) {
        const uint32_t i = firsts[f], u = s.unique[inverse[i]];
        keys[r] = ids[i];
        starts[r + 1] = s.count[u];
        s.rank[u] = r;
      }
    });
    starts[0] = 0;
    for (size_t r = 0; r < out_.unique; ++r) starts[r + 1] += starts[r];
  }

  // Fills `order` with the positions of every key of a partition, and replaces `unique` by `id_rank`.
  void fill(size_t p) {
    const Scattered s = s_;
    const uint32_t lo = begin_[p], end = begin_[p + 1];
    const uint32_t* const starts = out_.starts.get();
    uint32_t* const order = out_.order.get();
    for (uint32_t u = lo; u < lo + uniques_[p]; ++u) s.cursor[u] = starts[s.rank[u]];
    for (uint32_t j = lo; j < end; ++j) {
      const uint32_t u = s.unique[j];
      order[s.cursor[u]++] = s.pos[j];
      s.id_rank[j] = s.rank[u];
    }
  }

  void invert(size_t c) {
    const auto [begin, end] = chunk(c);
    const uint32_t* const ranks = s_.id_rank;
    uint32_t* const inverse = out_.inverse.get();
    for (size_t i = begin; i < end; ++i) inverse[i] = ranks[inverse[i]];
  }

  ThreadPool& pool_;
  const uint64_t* const ids_;
  const size_t n_;
  const Scattered s_;
  const size_t parts_;
  const int shift_;
  const size_t chunks_;
  std::vector<uint32_t> begin_;    // [parts + 1] into the scattered arrays
  std::vector<uint32_t> uniques_;  // [parts]
  WorkingSet out_;
};

}  // namespace

WorkingSet Dedup::run(const uint64_t* ids, size_t n) {
  if (n >= kEmpty) throw Error("a batch has " + std::to_string(n) + " ids; the maximum is 2^32 - 2");
  std::lock_guard lock(mutex_);
  const size_t capacity = n / 64 * 64 + 64;  // never 0
  if (memory_.size() < capacity * kBytesPerId) {
    memory_ = HugeBuffer();  // first, so that both buffers never exist at once
    memory_ = HugeBuffer(capacity * kBytesPerId);
  }
  return Run(pool_, ids, n, layout(memory_.as<uint8_t>(), capacity)).run();
}

}  // namespace thermocline
