// Parser of tables (CSV, TSV, the Criteo format). parse_table.cc parses any line; parse_table_fast.cc is the fast path
// for lines without quotes and with all columns.
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
  size_t whole_records(std::string_view text) const override;

 private:
  // Cause of a malformed value; describe() makes the message.
  enum class Cause : uint8_t {
    kNone,
    kNoLabel,
    kBadLabel,
    kBinaryLabel,
    kBadNumber,
    kTooLarge,
    kNoKey,
    kBadKey,
    kNoTime,
    kBadTime,
    kColumns,
    kOpenQuote,
    kTextAfterQuote,
  };

  struct Plan {
    Role role;
    uint64_t seed = 0;
    uint64_t missing = 0;  // the key of ""
    // Precomputed features of the integers 0 .. kSmall - 1, which are most numbers in logs; may be empty.
    std::vector<uint64_t> small_keys = {};  // number_key in buckets
    std::vector<float> small_dense = {};    // dense
  };
  static constexpr int64_t kSmall = 2048;

  // Neighbouring columns of one role, up to (not including) column `end`.
  struct Run {
    Role role;
    size_t end;
  };

  // The value of one column.
  struct Value {
    const char* begin;
    const char* end;
    const char* next;  // its delimiter, the \n of the line, or the end of the block
  };

  // Output pointers of the next values of a line; after a failure, the column and value that caused it.
  struct Line {
    uint64_t* ids;
    float* dense;
    float* label;
    int64_t* time;  // null: no time column
    Texts* carried;
    int64_t* sizes;  // keys per field; null: one each
    size_t column = 0;
    std::string_view value = {};
  };

  void check_options() const;
  // Appends the offsets of an accepted line with bags.
  void add_offsets(Parsed& to, const std::vector<int64_t>& sizes) const;

  // End of the line, or record, that begins at `p`.
  const char* end_of(const Output& out, const char* p) const;
  // End of the record that begins at `p`: its \n, or `end` if it has none. Quotes are those that parse_line() reads.
  const char* record_end(const char* p, const char* end) const;

  // Fast path. `delimiters`: those of the line and its \n. Returns false if the line is malformed or needs
  // parse_line(), which then overwrites the values written here.
  bool parse_plain_line(const Output& out, uint32_t* delimiters, const char* p, Line line) const;

  // Sets `next` to the end of the line, and `empty` for an empty line.
  Cause parse_line(const Output& out, Delimiters& delimiters, const char* p, Line& line, std::string& unquoted,
                   const char*& next, bool& empty) const;
  Cause take(size_t c, const Value& value, Line& line) const;
  Cause take_key(size_t c, const Value& value, Line& line) const;
  Cause take_bag(size_t c, const Value& value, Line& line) const;
  Cause take_time_key(size_t c, const Value& value, Line& line) const;
  Cause take_number_key(size_t c, const Value& value, Line& line) const;
  Cause take_dense(size_t c, const Value& value, Line& line) const;
  Cause take_label(const Value& value, Line& line) const;
  static Cause take_time(const Value& value, Line& line);

  // `p` is at the opening quote. The value is in the block or, if it has doubled quotes, copied to `unquoted`.
  Cause unquote(const Output& out, Delimiters& delimiters, const char* p, std::string& unquoted, Value& value) const;

  // Message of a malformed line, or record, [p, end).
  std::string describe(const Output& out, const char* p, const char* end, Cause cause, const Line& line) const;
  size_t count_columns(const char* p, const char* end) const;

  const ParseOptions options_;
  std::vector<Plan> plans_;  // per column
  std::vector<Run> runs_;
  bool bags_ = false;     // some column is a bag
  size_t carried_ = 0;    // columns with `carry`
  bool records_ = false;  // a record may have several lines
};

}  // namespace thermocline
