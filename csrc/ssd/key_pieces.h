// The keys of one lookup, divided into pieces of neighbouring hashes that several threads take one after the other.
//
// A piece has few keys, so that its plan stays in cache and in bounded memory, and all keys of its range of hashes, so
// that it reads each page once. The division takes linear time and four bytes per key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ssd/sorted_batch.h"
#include "util/thread_pool.h"

namespace thermocline::ssd {

// Thread safety: next() and left() may run concurrently. The keys must not change.
class KeyPieces {
 public:
  static constexpr size_t kMostKeys = 16384;      // of one piece, usually
  static constexpr size_t kMostSpanKeys = 65536;  // of one piece that is larger because of `span`

  // For `workers` threads that call next(); the division runs on the pool. `least`: keys of the smallest piece. `span`:
  // hashes of the smallest piece of a lookup of more than kMostKeys keys, as far as every worker, or four, get a piece.
  // Each extent of the log is in hash order: a piece makes a read in every extent, and pages at its borders are read
  // twice, so pieces of a dense lookup must not be narrow.
  KeyPieces(const uint64_t* keys, size_t n, size_t workers, size_t least, uint64_t span, ThreadPool& pool);

  // Fills `items` with the next piece, sorted by hash. False: none is left. `scratch` is working memory. Pieces become
  // smaller towards the end, so that all threads finish together, except wide() ones.
  bool next(std::vector<Item>& items, std::vector<Item>& scratch);
  bool left() const;                   // whether next() would return a piece
  bool wide() const { return wide_; }  // larger pieces because of `span`: a worker should take one at a time
  uint64_t memory() const;             // the most that was in use

 private:
  void divide(uint64_t span, ThreadPool& pool);
  bool claim(size_t* begin, size_t* end);

  const uint64_t* const keys_;
  const size_t n_, workers_;
  size_t least_;  // constant after construction, as wide_
  bool wide_ = false;
  std::vector<Item> sorted_;           // all keys, if they are at most kMostKeys
  std::unique_ptr<uint32_t[]> order_;  // else: the indices of all keys, grouped by ranges of hashes in ascending order
  std::vector<uint32_t> ends_;         // of the groups in order_
  uint64_t dividing_ = 0;              // bytes of divide()

  mutable std::mutex mutex_;  // protects the members below
  size_t taken_ = 0;          // keys
  size_t group_ = 0;          // of the next key
};

}  // namespace thermocline::ssd
