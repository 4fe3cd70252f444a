#include "data/op_osrp.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "util/error.h"

namespace thermocline {
namespace {

constexpr size_t kChunkIds = 16384;  // of a task

// Entries of a bag, with permuted keys.
struct Weighted {
  uint64_t permuted;
  float weight;

  // By magnitude, not by sign: then u and -u are summed in the same order, and their sums differ only in sign.
  bool operator<(const Weighted& other) const {
    if (permuted != other.permuted) return permuted < other.permuted;
    return std::abs(weight) < std::abs(other.weight);
  }
};
struct Plain {
  uint64_t permuted;
  static constexpr double weight = 1;

  bool operator<(const Plain& other) const { return permuted < other.permuted; }
};

// Permuted keys are uniformly distributed: each entry is first placed near its rank, then neighbours are sorted.
template <typename Entry>
class Sorter {
 public:
  // Input array, with capacity for n entries.
  Entry* input(size_t n) {
    if (input_.size() < n) {
      input_.resize(n);
      sorted_.resize(n);
    }
    return input_.data();
  }

  // Returns the first n entries of input(), sorted.
  const Entry* sort(size_t n) {
    constexpr size_t kFew = 32, kCrowd = 64;
    if (n <= kFew) {
      std::sort(input_.data(), input_.data() + n);
      return input_.data();
    }
    const int bits = std::bit_width(n) - 1, shift = 64 - bits;
    ends_.assign((size_t{1} << bits) + 1, 0);
    for (size_t i = 0; i < n; ++i) ++ends_[(input_[i].permuted >> shift) + 1];
    const bool crowded = *std::max_element(ends_.begin(), ends_.end()) > kCrowd;  // one key many times
    for (size_t b = 1; b < ends_.size(); ++b) ends_[b] += ends_[b - 1];
    for (size_t i = 0; i < n; ++i) sorted_[ends_[input_[i].permuted >> shift]++] = input_[i];
    if (crowded) {
      std::sort(sorted_.data(), sorted_.data() + n);
      return sorted_.data();
    }
    for (size_t i = 1; i < n; ++i) {
      const Entry entry = sorted_[i];
      size_t at = i;
      for (; at > 0 && entry < sorted_[at - 1]; --at) sorted_[at] = sorted_[at - 1];
      sorted_[at] = entry;
    }
    return sorted_.data();
  }

 private:
  std::vector<Entry> input_, sorted_;
  std::vector<uint32_t> ends_;
};

}  // namespace

OpOsrp::OpOsrp(uint64_t bins, uint64_t seed, int threads)
    : bins_(bins), permutation_(seed), sign_key_(Stream(seed, ~uint64_t{0})()), pool_(threads) {
  if (bins < 1 || bins > kMaxBins) {
    throw Error("OP+OSRP: k is " + std::to_string(bins) + "; it must be 1 to 2**40 bins");
  }
}

// The results of a chunk start at the index of its first id, and its offsets are relative to it.
template <bool kWeighted, bool kSketch>
void OpOsrp::run_bags(const uint64_t* ids, const float* weights, const int64_t* offsets, size_t first, size_t end,
                      HashedBags& out) const {
  using Entry = std::conditional_t<kWeighted, Weighted, Plain>;
  Sorter<Entry> sorter;
  const auto base = static_cast<size_t>(offsets[first]);
  size_t made = base;
  for (size_t b = first; b < end; ++b) {
    const auto begin = static_cast<size_t>(offsets[b]), n = static_cast<size_t>(offsets[b + 1]) - begin;
    Entry* const input = sorter.input(n);
    for (size_t i = 0; i < n; ++i) {
      input[i].permuted = permutation_(ids[begin + i]);
      if constexpr (kWeighted) {
        input[i].weight = weights[begin + i];
        if (!std::isfinite(input[i].weight)) {
          throw Error("hashing: the weight of id " + std::to_string(begin + i) + " is not finite");
        }
      }
    }
    const Entry* const entries = sorter.sort(n);
    for (size_t i = 0; i < n;) {
      const uint64_t bin = bin_at(entries[i].permuted);
      // Positive and negative terms separately: the terms and their order are then the same for u and -u.
      double sums[2] = {0, 0};
      for (; i < n && bin_at(entries[i].permuted) == bin; ++i) {
        const double weight = entries[i].weight;
        sums[sign_at(entries[i].permuted) == (weight > 0)] += std::abs(weight);
      }
      if (sums[0] == sums[1]) continue;
      if constexpr (kSketch) {
        const auto value = static_cast<float>(sums[1] - sums[0]);
        if (value == 0) continue;  // too small for a float
        if (!std::isfinite(value)) throw Error("hashing: the sum of bin " + std::to_string(bin) + " is too large");
        out.weights[made] = value;
        out.ids[made++] = bin;
      } else {
        out.ids[made++] = 2 * bin + (sums[1] > sums[0]);
      }
    }
    out.offsets[b + 1] = static_cast<int64_t>(made - base);
  }
}

template <bool kWeighted, bool kSketch>
HashedBags OpOsrp::run(const uint64_t* ids, const float* weights, const int64_t* offsets, size_t bags) const {
  const auto count = static_cast<size_t>(offsets[bags]);
  HashedBags out;
  out.ids.resize(count);
  out.offsets.resize(bags + 1);
  if (kSketch) out.weights.resize(count);
  const size_t chunks = std::clamp<size_t>(count / kChunkIds, 1, std::max<size_t>(bags, 1));
  const auto cut = [&](size_t chunk) { return bags * chunk / chunks; };
  pool_.parallel(chunks,
                 [&](size_t c) { run_bags<kWeighted, kSketch>(ids, weights, offsets, cut(c), cut(c + 1), out); });
  size_t made = 0;  // removes the gaps between chunks
  out.offsets[0] = 0;
  for (size_t c = 0; c < chunks; ++c) {
    const auto from = static_cast<size_t>(offsets[cut(c)]);
    const size_t n = cut(c) == cut(c + 1) ? 0 : static_cast<size_t>(out.offsets[cut(c + 1)]);
    if (from != made) {
      std::memmove(out.ids.data() + made, out.ids.data() + from, n * sizeof(uint64_t));
      if (kSketch) std::memmove(out.weights.data() + made, out.weights.data() + from, n * sizeof(float));
    }
    for (size_t b = cut(c); b < cut(c + 1); ++b) out.offsets[b + 1] += static_cast<int64_t>(made);
    made += n;
  }
  out.ids.resize(made);
  if (kSketch) out.weights.resize(made);
  return out;
}

HashedBags OpOsrp::slots(const uint64_t* ids, const float* weights, const int64_t* offsets, size_t bags) const {
  return weights ? run<true, false>(ids, weights, offsets, bags) : run<false, false>(ids, weights, offsets, bags);
}

HashedBags OpOsrp::sketch(const uint64_t* ids, const float* weights, const int64_t* offsets, size_t bags) const {
  return weights ? run<true, true>(ids, weights, offsets, bags) : run<false, true>(ids, weights, offsets, bags);
}

}  // namespace thermocline
