// Arrays of a batch with recycled memory. Every batch needs a few large arrays of similar size; reusing their memory
// avoids page faults and the zeroing of new pages.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "util/huge_buffer.h"

namespace thermocline {

// Thread safety: all calls may run concurrently.
class Recycler {
 public:
  static HugeBuffer take(size_t bytes) {
    // Rounds up by at most 1/8, so that batches of about the same size can reuse a buffer.
    size_t granule = 4096;
    while (granule * 16 <= bytes) granule *= 2;
    bytes = (bytes + granule - 1) / granule * granule;
    {
      State& s = state();
      std::lock_guard lock(s.mutex);
      for (HugeBuffer& b : s.idle) {
        if (b.size() < bytes || b.size() > 2 * bytes) continue;
        HugeBuffer found = std::move(b);
        b = std::move(s.idle.back());
        s.idle.pop_back();
        return found;
      }
    }
    return HugeBuffer(bytes);
  }

  static void give(HugeBuffer buffer) {
    if (buffer.size() == 0) return;
    State& s = state();
    std::lock_guard lock(s.mutex);
    if (s.idle.size() == kIdle) s.idle.erase(s.idle.begin());  // the oldest
    s.idle.push_back(std::move(buffer));
  }

 private:
  static constexpr size_t kIdle = 16;
  struct State {
    std::mutex mutex;  // protects idle
    std::vector<HugeBuffer> idle;
  };
  static State& state() {
    static State* s = new State;  // never deleted: arrays may outlive static objects
    return *s;
  }
};

// An uninitialised array of n elements. Small arrays use the heap: a program that keeps many batches would otherwise
// reach the limit of memory mappings.
template <typename T>
class Recycled {
 public:
  Recycled() = default;
  explicit Recycled(size_t n) {
    if (n * sizeof(T) < kSmall) {
      heap_ = std::make_unique_for_overwrite<T[]>(n > 0 ? n : 1);
      data_ = heap_.get();
    } else {
      buffer_ = Recycler::take(n * sizeof(T));
      data_ = buffer_.template as<T>();
    }
  }
  Recycled(Recycled&& other) noexcept { *this = std::move(other); }
  Recycled& operator=(Recycled&& other) noexcept {
    std::swap(heap_, other.heap_);
    std::swap(buffer_, other.buffer_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Recycled() { Recycler::give(std::move(buffer_)); }

  T* get() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }

 private:
  static constexpr size_t kSmall = 64u << 10;
  std::unique_ptr<T[]> heap_;
  HugeBuffer buffer_;
  T* data_ = nullptr;
};

}  // namespace thermocline
