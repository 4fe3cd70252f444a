// Shared by the parsers of all formats: output arrays and the list of malformed lines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "data/parse.h"

namespace thermocline {

// Output of one block. The values of a line are written after the accepted ones and counted only if the whole line is
// valid. Not thread-safe.
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

  // Reserves `n` more elements of `array`. `at`: current position in the block, from which the final size is estimated.
  // `most`: upper bound of the final size.
  template <typename T>
  void reserve_more(Grown<T>& array, size_t n, const char* at, size_t most = SIZE_MAX) const {
    if (array.capacity() - array.size() < n) [[unlikely]]
      grow(array, array.size() + n, at, most);
  }

  // Records the current line as malformed. Returns true if parsing continues after it.
  bool malformed(std::string cause) {
    ++parsed.malformed;
    if (parsed.errors.size() < kMaxDescribed) parsed.errors.push_back({line, std::move(cause)});
    return skip_errors_;
  }

  // Lines of [p, q), which ends with a line break or at the end of the block.
  size_t lines(const char* p, const char* q) const { return static_cast<size_t>(std::count(p, q, '\n')); }

  // End of the line of `p`: its \n, or the end of the block.
  const char* line_end(const char* p) const {
    const void* found = p < end ? std::memchr(p, '\n', static_cast<size_t>(end - p)) : nullptr;
    return found ? static_cast<const char*>(found) : end;
  }

  bool nul_in_line(const char* p) const { return has_nul(p, line_end(p)); }
  bool has_nul(const char* p, const char* q) const {
    return has_nul_ && std::memchr(p, 0, static_cast<size_t>(q - p)) != nullptr;
  }

 private:
  template <typename T>
  void grow(Grown<T>& array, size_t need, const char* at, size_t most) const {
    size_t expected = 64 * need;
    if (array.size() >= 63 && at > block.data()) {  // enough lines for an estimate
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
  virtual size_t whole_records(std::string_view text) const { return text.rfind('\n') + 1; }  // npos + 1 is 0

  size_t fields = 0;
  size_t dense = 0;
  bool has_time = false;
};

std::unique_ptr<const LineParser> make_table_parser(ParseOptions options);
std::unique_ptr<const LineParser> make_svm_parser(const ParseOptions& options);

// Formats a value for messages: in quotes, at most 40 bytes, control characters as \xNN.
std::string quoted(std::string_view value);

}  // namespace thermocline
