// Arrays of a batch. Every batch needs the same few large ones; memory given back by one is taken by the next, so that
// the system need not clear new pages for each.
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
    // Sizes in steps of an eighth: batches of about the same size fit each other's memory.
    size_t step = 4096;
    while (step * 16 <= bytes) step *= 2;
    bytes = (bytes + step - 1) / step * step;
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
    if (s.idle.size() == kIdle) s.idle.erase(s.idle.begin());  // the one that waited longest
    s.idle.push_back(std::move(buffer));
  }

 private:
  static constexpr size_t kIdle = 16;
  struct State {
    std::mutex mutex;  // protects idle
    std::vector<HugeBuffer> idle;
  };
  static State& state() {
    static State* s = new State;  // never destroyed: arrays may outlive static objects
    return *s;
  }
};

// An array of n elements, not initialised.
template <typename T>
class Recycled {
 public:
  Recycled() = default;
  explicit Recycled(size_t n) : buffer_(Recycler::take(n * sizeof(T))) {}
  Recycled(Recycled&&) noexcept = default;
  Recycled& operator=(Recycled&&) noexcept = default;
  ~Recycled() { Recycler::give(std::move(buffer_)); }

  T* get() const { return buffer_.as<T>(); }
  T& operator[](size_t i) const { return get()[i]; }

 private:
  HugeBuffer buffer_;
};

}  // namespace thermocline
