// An array of plain numbers that grows by realloc (which moves pages, not bytes, when arrays are large), is not
// initialised, and can be given away.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

namespace thermocline {

template <typename T>
class Grown {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Grown() = default;
  explicit Grown(size_t size) { resize(size); }
  Grown(Grown&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        capacity_(std::exchange(other.capacity_, 0)) {}
  Grown& operator=(Grown&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  ~Grown() { std::free(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

  // What lies between size() and capacity() may be written and then counted by resize().
  void reserve(size_t capacity) {
    if (capacity > capacity_) reallocate(capacity);
  }
  void resize(size_t size) {
    reserve(size);
    size_ = size;
  }
  void shrink() {
    if (size_ < capacity_) reallocate(size_);
  }
  // The caller frees it with std::free.
  T* release() {
    size_ = capacity_ = 0;
    return std::exchange(data_, nullptr);
  }

 private:
  void reallocate(size_t capacity) {
    if (capacity > static_cast<size_t>(-1) / 2 / sizeof(T)) throw std::bad_alloc();
    // Never zero bytes: realloc may free then.
    void* data = std::realloc(data_, (capacity > 0 ? capacity : 1) * sizeof(T));
    if (data == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(data);
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

}  // namespace thermocline
