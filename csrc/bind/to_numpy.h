// Conversion of C++ arrays to NumPy arrays without a copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <utility>
#include <vector>

#include "data/grown.h"
#include "util/recycled.h"

namespace thermocline {

template <typename T>
auto to_numpy(Grown<T> array) {
  namespace nb = nanobind;
  array.reserve(1);  // NumPy needs a non-null pointer
  auto* owned = new Grown<T>(std::move(array));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Grown<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

template <typename T>
auto to_numpy(std::vector<T> array) {
  namespace nb = nanobind;
  array.reserve(1);  // NumPy needs a non-null pointer
  auto owned = std::make_unique<std::vector<T>>(std::move(array));
  std::vector<T>& kept = *owned;
  nb::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept.data(), {kept.size()}, owner);
}

// Converts the first n elements.
template <typename T>
auto to_numpy(Recycled<T> array, size_t n) {
  namespace nb = nanobind;
  auto kept = std::make_unique<Recycled<T>>(std::move(array));
  T* data = kept->get();
  nb::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<Recycled<T>*>(p); });
  kept.release();
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {n}, owner);
}

}  // namespace thermocline
