// One permutation + one sign random projection (OP+OSRP): sparse vectors over all 2^64 keys to sparse vectors over k
// bins.
//
// The keys are permuted (permutation.h) and the permuted space is split into k equal bins; bin b of a vector u has
// z_b = sum of u_i r_i over its keys, r_i = +1 or -1. slots() keeps the sign only: slot 2b + 1 if z_b > 0, slot 2b if
// z_b < 0, none if z_b = 0, which is a binary vector of length 2k. sketch() keeps z itself, as a count-sketch.
//
// r is +1 or -1, not Gaussian: sums over binary vectors are integers, exact in any order, and the sketch is an unbiased
// estimate of inner products with the least variance of all r. Two keys in one bin cancel with probability 1/2.
#pragma once

#include <cstddef>
#include <cstdint>

#include "data/grown.h"
#include "data/permutation.h"
#include "util/hash.h"
#include "util/thread_pool.h"

namespace thermocline {

// Bags as CSR: the ids of bag b are ids[offsets[b] .. offsets[b + 1] - 1], strictly ascending.
struct HashedBags {
  Grown<uint64_t> ids;
  Grown<int64_t> offsets;
  Grown<float> weights;  // of sketch() only
};

// Thread safety: all calls may run concurrently.
class OpOsrp {
 public:
  static constexpr uint64_t kMaxBins = uint64_t{1} << 40;

  OpOsrp(uint64_t bins, uint64_t seed, int threads);

  // Bag b is the vector whose entry ids[i] is the sum of its weights (null: 1 each) over offsets[b] <= i <
  // offsets[b + 1]. `offsets` starts with 0 and ascends. The result does not depend on the order of ids within a bag or
  // on the number of threads. Throws Error if a weight is not finite.
  HashedBags slots(const uint64_t* ids, const float* weights, const int64_t* offsets, size_t bags) const;
  HashedBags sketch(const uint64_t* ids, const float* weights, const int64_t* offsets, size_t bags) const;

  uint64_t bin_of(uint64_t key) const { return bin_at(permutation_(key)); }
  int sign_of(uint64_t key) const { return sign_at(permutation_(key)) ? 1 : -1; }

 private:
  // Bin of a permuted key: the upper 64 bits of permuted * bins, so bins are in order of permuted keys.
  uint64_t bin_at(uint64_t permuted) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(permuted) * bins_) >> 64);
  }
  bool sign_at(uint64_t permuted) const { return mix64(permuted ^ sign_key_) >> 63; }

  template <bool kWeighted, bool kSketch>
  HashedBags run(const uint64_t* ids, const float* weights, const int64_t* offsets, size_t bags) const;
  template <bool kWeighted, bool kSketch>
  void run_bags(const uint64_t* ids, const float* weights, const int64_t* offsets, size_t first, size_t end,
                HashedBags& out) const;

  // Constant after construction:
  uint64_t bins_;
  Permutation permutation_;
  uint64_t sign_key_;
  mutable ThreadPool pool_;
};

}  // namespace thermocline
