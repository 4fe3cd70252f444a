// What the parsers of all formats share: where examples go, and how malformed lines are told.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "data/parse.h"

namespace thermocline {

// Examples of one block as they are parsed. A line's ids, dense features and label are written behind the accepted ones
// and counted only once the whole line is right.
class Output {
 public:
  Output(std::string_view block, bool skip_errors)
      : block(block),
        end(block.data() + block.size()),
        skip_errors_(skip_errors),
        has_nul_(!block.empty() && std::memchr(block.data(), 0, block.size()) != nullptr) {}

  const std::string_view block;
  const char* const end;
  Parsed parsed;
  size_t line = 0;

  // Room for `n` more of `array`, `at` being how far the block is parsed: large arrays are sized by what it took so
  // far. There are never more than `most`.
  template <typename T>
  void make_room(Grown<T>& array, size_t n, const char* at, size_t most = SIZE_MAX) const {
    if (array.capacity() - array.size() < n) [[unlikely]]
      grow(array, array.size() + n, at, most);
  }

  // Tells of the current line. True: go on behind it.
  bool malformed(std::string cause) {
    ++parsed.malformed;
    if (parsed.errors.size() < kMaxDescribed) parsed.errors.push_back({line, std::move(cause)});
    return skip_errors_;
  }

  // The end of the line that `p` is in: its \n, or the block's end.
  const char* line_end(const char* p) const {
    const void* found = p < end ? std::memchr(p, '\n', static_cast<size_t>(end - p)) : nullptr;
    return found ? static_cast<const char*>(found) : end;
  }

  bool nul_in_line(const char* p) const {
    return has_nul_ && std::memchr(p, 0, static_cast<size_t>(line_end(p) - p)) != nullptr;
  }

 private:
  template <typename T>
  void grow(Grown<T>& array, size_t need, const char* at, size_t most) const {
    size_t expected = 64 * need;
    if (array.size() >= 63 && at > block.data()) {  // some lines are known
      const double done = static_cast<double>(at - block.data()) / static_cast<double>(block.size());
      expected = std::max(static_cast<size_t>(1.05 * static_cast<double>(need) / done), need + need / 4);
    }
    array.reserve(std::max(need, std::min(expected, most)));
  }

  const bool skip_errors_;
  const bool has_nul_;
};

class LineParser {
 public:
  virtual ~LineParser() = default;
  virtual void parse(Output& out) const = 0;

  size_t fields = 0;
  size_t dense = 0;
};

std::unique_ptr<const LineParser> make_table_parser(ParseOptions options);
std::unique_ptr<const LineParser> make_svm_parser(const ParseOptions& options);

// A value for people: in quotes, at most 40 bytes, control characters as \xNN.
std::string quoted(std::string_view value);

}  // namespace thermocline
