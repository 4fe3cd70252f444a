// Blocks of text lines -> examples: ids, offsets, weights, dense features, labels. One pass, one thread per block.
//
// A block is whole lines. Lines end with \n or \r\n; the last one may lack it. Empty lines are no examples. Every other
// line is an example or malformed: nothing is guessed, repaired or truncated, and no byte outside the block is read.
//
//   LibSVM  label id[:value] ...           separated by spaces or tabs, any number of them
//   LibFFM  label field:id[:value] ...     field: a number below `fields`; ids of a field keep their order
//   table   one column per delimiter; with quoting, a column that begins with " ends with " and has "" for " inside
//           (RFC 4180, without line breaks inside: blocks are cut at line breaks). All lines have all columns.
//
//   label   any finite float32. LibSVM and LibFFM: -1, the convention for "no", becomes 0. A table's stays as it is.
//   id      decimal digits, as many as you like: their text is hashed (hash_value.h) with the field's name: LibSVM "0",
//           "1", .. by position, "0" in one bag; LibFFM the field's number. raw_keys: the number itself, below 2^64.
//   value   the id's weight, any finite float32; absent: 1. Weights that are all 1 are left out.
//   key     a table's categorical value: any bytes but NUL, hashed with the column's name; empty is a value like
//   others.
//           raw_keys: decimal digits, the number itself.
//   dense   a number (parse_number.h) through its rule (columns.h); empty is missing: 0.
//   number_key  a number through its rule and bucket, hashed as the bucket's number; empty is missing: the key of "".
//           Bucket::kNone hashes the number's text as it stands.
//
// Malformed: a wrong number of columns, or of ids by position; a label, id, value or number that is none, is not finite
// or does not fit; a field out of range; quotes that do not end, or text after them; a NUL byte anywhere in the line.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/columns.h"
#include "data/grown.h"

namespace thermocline {

enum class Format : uint8_t { kLibsvm, kLibffm, kTable };
enum class Role : uint8_t { kLabel, kKey, kDense, kNumberKey, kIgnore };

struct Column {
  Role role;
  std::string name;
  NumberRule rule;
};

struct ParseOptions {
  Format format = Format::kLibsvm;
  char delimiter = '\t';
  bool quoting = false;
  std::vector<Column> columns = {};  // of a table: all, in file order
  size_t fields = 0;                 // LibSVM by position, LibFFM
  bool one_bag = false;              // LibSVM: a line is one bag
  bool raw_keys = false;
};

struct Malformed {
  size_t line;        // in the block, from 0, empty lines counted
  std::string cause;  // names column and value; bytes, not always UTF-8
};
inline constexpr size_t kMaxDescribed = 16;

struct Parsed {
  Grown<uint64_t> ids;
  Grown<int64_t> offsets;  // [labels * fields + 1]
  Grown<float> weights;    // [ids], or empty: all are 1
  Grown<float> dense;      // [labels * dense]
  Grown<float> labels;
  std::vector<Malformed> errors;  // the first kMaxDescribed
  uint64_t malformed = 0;         // all
};

class LineParser;

// Thread safety: constant after construction.
class TextParser {
 public:
  // Throws Error when the options make no sense.
  explicit TextParser(ParseOptions options);
  ~TextParser();
  TextParser(TextParser&&) noexcept;

  // `skip_errors`: malformed lines are left out, counted, and the first of them described. Otherwise parsing ends at
  // the first; the examples before it are returned with it.
  Parsed parse(std::string_view block, bool skip_errors) const;

  size_t fields() const;
  size_t dense() const;

 private:
  std::unique_ptr<const LineParser> lines_;
};

}  // namespace thermocline
