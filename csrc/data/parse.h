// Text parsers: blocks of lines to examples (ids, offsets, weights, dense features, labels), in one pass.
//
// A block consists of whole lines. Lines end with \n or \r\n, optional for the last one. Empty lines are skipped. Every
// other line is an example or malformed: values are never repaired or truncated, and no byte outside the block is read.
//
//   LibSVM  label id[:value] ...           separated by spaces or tabs, any number of them
//   LibFFM  label field:id[:value] ...     field: a number below `fields`; ids of a field keep their order
//   table   columns separated by the delimiter; with quoting, a column that starts with " ends with " and has "" for "
//           inside (RFC 4180). `line_breaks`: also line breaks inside; an example is then a record of several lines.
//           Every line, or record, has all columns.
//
//   label   any finite float32. LibSVM and LibFFM: -1 (negative class) becomes 0. `binary_labels`: only 0 and 1.
//   id      decimal digits, any number of them: the text is hashed (hash_value.h) with the field name: LibSVM "0",
//           "1", .. by position, "0" for one_bag; LibFFM the field number. raw_keys: the number itself, below 2^64.
//   value   weight of the id, any finite float32; absent: 1. Weights are omitted if all are 1.
//   key     categorical value of a table: any bytes except NUL, hashed with the column name; the empty text is a value
//           too. raw_keys: decimal digits, the number itself. With a separator, the column is a bag of the values
//           between separators; empty ones are left out, so that an empty column is an empty bag.
//   time_key  a time (parse_time.h); its bucket is hashed; empty means missing: the key of "".
//   dense   a number (parse_number.h), transformed by its rule (columns.h); empty means missing: 0.
//   time    event time of the example (parse_time.h), at most one column; must not be empty.
//   number_key  a number, transformed by its rule; the number of its bucket is hashed; empty means missing: the key of
//           "". Bucket::kNone hashes the text of the number.
//
// Values of columns with `carry` are returned as text, too.
//
// Malformed: a wrong number of columns, or of ids by position; a label, id, value, time or number that is invalid, not
// finite or out of range; a field out of range; an unclosed quote, or text after a closing quote; a NUL byte.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/columns.h"
#include "data/grown.h"
#include "data/parse_time.h"

namespace thermocline {

enum class Format : uint8_t { kLibsvm, kLibffm, kTable };
enum class Role : uint8_t { kLabel, kKey, kDense, kNumberKey, kTime, kTimeKey, kIgnore };

struct Column {
  Role role;
  std::string name;
  NumberRule rule = {};
  std::string separator = {};                       // key: not empty for a bag of values
  TimeBucket time_bucket = TimeBucket::kHourOfDay;  // time_key
  bool carry = false;                               // return the text of the values
};

struct ParseOptions {
  Format format = Format::kLibsvm;
  char delimiter = '\t';
  bool quoting = false;
  std::vector<Column> columns = {};  // table: all columns in file order
  size_t fields = 0;                 // LibSVM by position, LibFFM
  bool one_bag = false;              // LibSVM: all ids of a line are one bag
  bool raw_keys = false;
  bool binary_labels = false;  // other labels than 0 and 1 are malformed
  bool line_breaks = false;    // table with quoting: quoted values may have line breaks
};

struct Malformed {
  size_t line;        // in the block, from 0, including empty lines
  std::string cause;  // with column and value; may not be valid UTF-8
};
inline constexpr size_t kMaxDescribed = 16;

// Texts of one column: example i has text[ends[i - 1], ends[i]).
struct Texts {
  std::string text;
  std::vector<int64_t> ends;
};

struct Parsed {
  Grown<uint64_t> ids;
  Grown<int64_t> offsets;  // [labels * fields + 1]
  Grown<float> weights;    // [ids], or empty: all are 1
  Grown<float> dense;      // [labels * dense]
  Grown<float> labels;
  Grown<int64_t> times;           // [labels], or empty: no time column
  std::vector<Texts> carried;     // per column with `carry`
  std::vector<Malformed> errors;  // the first kMaxDescribed
  uint64_t malformed = 0;         // number of malformed lines
};

class LineParser;

// Thread safety: constant after construction.
class TextParser {
 public:
  // Throws Error if the options are invalid.
  explicit TextParser(ParseOptions options);
  ~TextParser();
  TextParser(TextParser&&) noexcept;

  // `skip_errors`: skips and counts malformed lines, and describes the first ones. Otherwise parsing stops at the first
  // one; the result has the examples before it.
  Parsed parse(std::string_view block, bool skip_errors) const;

  // Length of the longest part of `text`, which begins with a record, that consists of whole records. The last record
  // of a file may lack its line break: it is not counted here.
  size_t whole_records(std::string_view text) const;

  size_t fields() const;
  size_t dense() const;
  bool has_time() const;

 private:
  std::unique_ptr<const LineParser> lines_;
};

}  // namespace thermocline
