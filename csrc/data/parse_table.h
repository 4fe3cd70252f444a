// Tables: Criteo's TSV, CSV, TSV. parse_table.cc is the whole truth; parse_table_fast.cc takes the plain lines.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/parse_lines.h"
#include "data/parse_scan.h"

namespace thermocline {

class TableParser final : public LineParser {
 public:
  explicit TableParser(ParseOptions options);
  void parse(Output& out) const override;

 private:
  // Why a value is malformed. Texts are made where the line is given up.
  enum class Cause : uint8_t {
    kNone,
    kNoLabel,
    kBadLabel,
    kBadNumber,
    kTooLarge,
    kNoKey,
    kBadKey,
    kColumns,
    kOpenQuote,
    kTextAfterQuote,
  };

  struct Plan {
    Role role;
    uint64_t seed = 0;
    uint64_t missing = 0;  // the key of ""
    // Features of small integers, of which most numbers in logs are: of 0 .. kSmall - 1, or of none.
    std::vector<uint64_t> small_keys = {};  // number_key in buckets
    std::vector<float> small_dense = {};    // dense
  };
  static constexpr int64_t kSmall = 2048;

  // Neighbouring columns of one role: up to, not with, column `end`.
  struct Run {
    Role role;
    size_t end;
  };

  // A piece of one line, and what follows it.
  struct Value {
    const char* begin;
    const char* end;
    const char* next;  // its delimiter, its line's \n, or the block's end
  };

  // Where the next values of a line go; after a failure, the column and value that caused it.
  struct Line {
    uint64_t* ids;
    float* dense;
    float* label;
    size_t column = 0;
    std::string_view value = {};
  };

  void check_options() const;

  // `delimiters`: the line's, ended by its \n, if it is as it should be. False: it is not, or has values that are not
  // plain; what was written is to be overwritten, by parse_line.
  bool parse_plain_line(const Output& out, uint32_t* delimiters, const char* p, Line line) const;

  // `next`: the line's end. `empty`: it is no example.
  Cause parse_line(const Output& out, Delimiters& delimiters, const char* p, Line& line, std::string& unquoted,
                   const char*& next, bool& empty) const;
  Cause take(size_t c, const Value& value, Line& line) const;
  Cause take_key(size_t c, const Value& value, Line& line) const;
  Cause take_number_key(size_t c, const Value& value, Line& line) const;
  Cause take_dense(size_t c, const Value& value, Line& line) const;
  static Cause take_label(const Value& value, Line& line);

  // `p` is at the opening quote. Finds the value, in place or, where quotes are doubled, copied to `unquoted`.
  Cause unquote(const Output& out, Delimiters& delimiters, const char* p, std::string& unquoted, Value& value) const;

  // The causes of malformed lines, for people; `p` is the line's first byte.
  std::string describe(const Output& out, const char* p, Cause cause, const Line& line) const;
  size_t count_columns(const Output& out, const char* p) const;

  const ParseOptions options_;
  std::vector<Plan> plans_;  // per column
  std::vector<Run> runs_;
};

}  // namespace thermocline
