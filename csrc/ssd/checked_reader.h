// Reads numbers, lists and text from the bytes of STORE or a manifest. No call reads outside the bytes or allocates
// more than their size; a number that must lie in a range is compared with it here, before anything uses it.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ssd/format.h"

namespace thermocline::ssd {

class CheckedReader {
 public:
  // `path` names the file in errors.
  CheckedReader(std::string_view bytes, const std::string& path) : rest_(bytes), path_(path) {}

  template <class T>
  T take() {
    T value;
    std::memcpy(&value, take_bytes(sizeof(T), "a field").data(), sizeof value);
    return value;
  }
  // A number from `low` to `high`.
  template <class T>
  T take_between(const char* name, uint64_t low, uint64_t high) {
    const T value = take<T>();
    check_between(name, value, low, high);
    return value;
  }
  // A count and so many records.
  template <class T>
  std::vector<T> take_list(const char* name) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto count = take<uint64_t>();
    if (count > rest_.size() / sizeof(T)) fail(std::string("the list of ") + name + " is longer than the file");
    std::vector<T> out(count);
    const std::string_view bytes = take_bytes(count * sizeof(T), name);
    if (count > 0) std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
  // A length and so many bytes.
  std::string take_text(const char* name) {
    const auto bytes = take<uint64_t>();
    return std::string(take_bytes(bytes, name));
  }
  std::string_view take_bytes(uint64_t bytes, const char* name) {
    if (bytes > rest_.size()) fail(std::string("the file ends inside ") + name);
    const std::string_view out = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return out;
  }
  void check_between(const char* name, uint64_t value, uint64_t low, uint64_t high) const {
    if (value < low || value > high)
      fail(std::string(name) + " is " + std::to_string(value) + ", it must be " + std::to_string(low) + " to " +
           std::to_string(high));
  }
  void check(bool valid, const char* otherwise) const {
    if (!valid) fail(otherwise);
  }
  void check_end() const { check(rest_.empty(), "the file has bytes after the last field"); }
  [[noreturn]] void fail(const std::string& cause) const { throw_corrupt(path_, cause); }

 private:
  std::string_view rest_;
  const std::string& path_;
};

}  // namespace thermocline::ssd
