// A growing array of plain numbers without initialisation, with recycled memory: every block of a file needs arrays of
// similar size, and new pages would have to be zeroed for each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "util/recycled.h"

namespace thermocline {

template <typename T>
class Grown {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Grown() = default;
  explicit Grown(size_t size) { resize(size); }
  Grown(Grown&& other) noexcept { *this = std::move(other); }
  Grown& operator=(Grown&& other) noexcept {
    std::swap(small_, other.small_);
    std::swap(large_, other.large_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  ~Grown() {
    std::free(small_);
    Recycler::give(std::move(large_));
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

  // Elements between size() and capacity() may be written. They are kept when the array grows, and resize() adds them.
  void reserve(size_t capacity) {
    if (capacity > capacity_) reallocate(capacity);
  }
  void resize(size_t size) {
    reserve(size);
    size_ = size;
  }
  // Frees memory if more than half is unused.
  void shrink() {
    if (size_ < capacity_ / 2) reallocate(size_);
  }

 private:
  static constexpr size_t kLarge = 256 << 10;  // bytes: malloc reuses smaller blocks

  void reallocate(size_t capacity) {
    if (capacity > static_cast<size_t>(-1) / 2 / sizeof(T)) throw std::bad_alloc();
    const size_t bytes = std::max<size_t>(capacity, 1) * sizeof(T);
    HugeBuffer large;
    void* small = nullptr;
    if (bytes >= kLarge) {
      large = Recycler::take(bytes);
      capacity = large.size() / sizeof(T);
    } else if ((small = std::malloc(bytes)) == nullptr) {
      throw std::bad_alloc();
    }
    T* const data = bytes >= kLarge ? large.as<T>() : static_cast<T*>(small);
    if (capacity_ > 0) std::memcpy(data, data_, std::min(capacity, capacity_) * sizeof(T));
    std::free(small_);
    Recycler::give(std::move(large_));
    small_ = small;
    large_ = std::move(large);
    data_ = data;
    capacity_ = capacity;
  }

  void* small_ = nullptr;  // from malloc, if smaller than kLarge
  HugeBuffer large_;       // else
  T* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

}  // namespace thermocline
