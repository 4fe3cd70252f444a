// Hashes used by every tier. Persisted in store files: these functions never change.
//
// Different uses take different bits of h = hash_key(key), so that they are independent:
//   63..16  order in the SSD store (partitions and pages are in order of h; tags are bits 31..16)
//   15..0   owning rank
// m = mem_hash(h) is a second mix for the DRAM tier: its top 8 bits select the shard, its low bits the index bucket.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace thermocline {

// Murmur3's finaliser: a bijection, so different keys have different hashes and hash order is a total order of keys.
inline constexpr uint64_t mix64(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return x;
}

inline constexpr uint64_t hash_key(uint64_t key) { return mix64(key ^ 0x9e3779b97f4a7c15ULL); }

// A part of the keys: those whose hash_key() is from lo to hi, both inclusive.
struct KeyRange {
  uint64_t lo = 0, hi = ~uint64_t{0};
  bool all() const { return lo == 0 && hi == ~uint64_t{0}; }
  bool contains(uint64_t key) const { return lo <= hash_key(key) && hash_key(key) <= hi; }
};
inline constexpr uint64_t mem_hash(uint64_t h) { return mix64(h ^ 0xd6e8feb86659fd93ULL); }

// XXH64 (public specification) for little-endian machines. The checksum of every page and record.
inline uint64_t xxh64(const void* data, size_t len, uint64_t seed) {
  constexpr uint64_t kP1 = 0x9E3779B185EBCA87ULL, kP2 = 0xC2B2AE3D27D4EB4FULL, kP3 = 0x165667B19E3779F9ULL,
                     kP4 = 0x85EBCA77C2B2AE63ULL, kP5 = 0x27D4EB2F165667C5ULL;
  auto p = static_cast<const uint8_t*>(data);
  const uint8_t* const end = p + len;
  auto read64 = [](const uint8_t* q) {
    uint64_t v;
    std::memcpy(&v, q, 8);
    return v;
  };
  auto read32 = [](const uint8_t* q) {
    uint32_t v;
    std::memcpy(&v, q, 4);
    return v;
  };
  auto round = [](uint64_t acc, uint64_t in) { return std::rotl(acc + in * kP2, 31) * kP1; };
  uint64_t h;
  if (len >= 32) {
    uint64_t a = seed + kP1 + kP2, b = seed + kP2, c = seed, d = seed - kP1;
    for (; p + 32 <= end; p += 32) {
      a = round(a, read64(p));
      b = round(b, read64(p + 8));
      c = round(c, read64(p + 16));
      d = round(d, read64(p + 24));
    }
    h = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    for (uint64_t acc : {a, b, c, d}) h = (h ^ round(0, acc)) * kP1 + kP4;
  } else {
    h = seed + kP5;
  }
  h += len;
  for (; p + 8 <= end; p += 8) h = std::rotl(h ^ round(0, read64(p)), 27) * kP1 + kP4;
  if (p + 4 <= end) {
    h = std::rotl(h ^ (read32(p) * kP1), 23) * kP2 + kP3;
    p += 4;
  }
  for (; p < end; ++p) h = std::rotl(h ^ (*p * kP5), 11) * kP1;
  h ^= h >> 33;
  h *= kP2;
  h ^= h >> 29;
  h *= kP3;
  h ^= h >> 32;
  return h;
}

}  // namespace thermocline
