// Bloom filter of the keys of a base file, in blocks of one cache line. Optional: it uses StoreOptions::filter_bits of
// DRAM per key and avoids the page read of most absent keys. Persisted after the fences of a base file: its functions
// never change.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "util/hash.h"

namespace thermocline::ssd {

class Filter {
 public:
  static constexpr uint64_t kBlockBytes = 64;

  Filter() = default;  // empty: may_contain() is always true
  Filter(uint64_t keys, uint32_t bits_per_key)
      : words_(std::max<uint64_t>(1, (keys * bits_per_key + 511) / 512) * (kBlockBytes / 8), 0) {}

  void add(uint64_t hash) {
    uint64_t* block = words_.data() + block_of(hash);
    for_each_bit(hash, [&](uint32_t bit) {
      block[bit / 64] |= uint64_t{1} << (bit % 64);
      return true;
    });
  }
  bool may_contain(uint64_t hash) const {
    if (words_.empty()) return true;
    const uint64_t* block = words_.data() + block_of(hash);
    return for_each_bit(hash, [&](uint32_t bit) { return (block[bit / 64] >> (bit % 64)) & 1; });
  }

  uint64_t bytes() const { return words_.size() * 8; }
  uint8_t* data() { return reinterpret_cast<uint8_t*>(words_.data()); }
  const uint8_t* data() const { return reinterpret_cast<const uint8_t*>(words_.data()); }
  static Filter of_bytes(uint64_t bytes) {
    Filter f;
    f.words_.assign(bytes / 8, 0);
    return f;
  }

 private:
  static constexpr int kProbes = 6;

  uint64_t block_of(uint64_t hash) const {
    uint64_t blocks = words_.size() / (kBlockBytes / 8);
    return static_cast<uint64_t>((static_cast<unsigned __int128>(mix64(hash)) * blocks) >> 64) * (kBlockBytes / 8);
  }
  // Six of 512 bits, chosen by other hash bits than block_of() uses.
  template <class Fn>
  static bool for_each_bit(uint64_t hash, Fn&& fn) {
    uint64_t bits = hash * 0x9e3779b97f4a7c15ULL;
    for (int i = 0; i < kProbes; ++i, bits = bits >> 9)
      if (!fn(static_cast<uint32_t>((bits >> 10) & 511))) return false;
    return true;
  }

  std::vector<uint64_t> words_;
};

}  // namespace thermocline::ssd
