#include "data/parse_table.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "data/hash_value.h"
#include "data/parse_number.h"
#include "data/parse_time.h"
#include "util/error.h"

namespace thermocline {

TableParser::TableParser(ParseOptions options) : options_(std::move(options)), records_(options_.line_breaks) {
  check_options();
  for (const Column& column : options_.columns) {
    Plan plan{.role = column.role, .seed = field_seed(column.name)};
    plan.missing = hash_value("", 0, plan.seed);
    fields += column.role == Role::kKey || column.role == Role::kNumberKey || column.role == Role::kTimeKey;
    bags_ |= !column.separator.empty();
    carried_ += column.carry;
    dense += column.role == Role::kDense;
    has_time |= column.role == Role::kTime;
    for (int64_t i = 0; i < kSmall; ++i) {
      int64_t bucket = 0;
      float feature = 0;
      // Values out of range have no entry: parse_line() reports them.
      if (column.role == Role::kNumberKey && column.rule.bucket != Bucket::kNone) {
        if (!number_bucket(column.rule, static_cast<double>(i), bucket)) break;
        plan.small_keys.push_back(hash_number(bucket, plan.seed));
      } else if (column.role == Role::kDense) {
        if (!number_feature(column.rule, static_cast<double>(i), feature)) break;
        plan.small_dense.push_back(feature);
      }
    }
    plans_.push_back(std::move(plan));
    if (runs_.empty() || runs_.back().role != column.role) runs_.push_back({column.role, 0});
    runs_.back().end = plans_.size();
  }
}

void TableParser::parse(Output& out) const {
  const size_t columns = plans_.size();
  const bool plain = !bags_ && carried_ == 0;
  Delimiters delimiters(out.block, options_.delimiter, '\n', '\n', columns);
  std::string unquoted;
  Parsed& to = out.parsed;
  to.carried.resize(carried_);
  std::vector<int64_t> sizes(bags_ ? fields : 0);
  if (bags_) {
    to.offsets.resize(1);
    to.offsets[0] = 0;
  }
  for (const char* p = out.block.data(); p < out.end; ++out.line) {
    // A bag has at most as many values as bytes.
    out.reserve_more(to.ids, fields + (bags_ ? static_cast<size_t>(end_of(out, p) - p) : 0), p);
    out.reserve_more(to.dense, dense, p);
    out.reserve_more(to.labels, 1, p);
    if (has_time) out.reserve_more(to.times, 1, p);
    Line line{to.ids.data() + to.ids.size(),
              to.dense.data() + to.dense.size(),
              to.labels.data() + to.labels.size(),
              has_time ? to.times.data() + to.times.size() : nullptr,
              to.carried.data(),
              bags_ ? sizes.data() : nullptr};
    *line.label = 0;
    const char* next = nullptr;
    bool empty = false;
    Cause cause = Cause::kNone;
    uint32_t* const ahead = plain ? delimiters.ahead(columns) : nullptr;
    if (ahead && parse_plain_line(out, ahead, p, line)) [[likely]] {
      next = out.block.data() + ahead[columns - 1];
      delimiters.skip(columns);
    } else {
      cause = parse_line(out, delimiters, p, line, unquoted, next, empty);
    }
    if (cause != Cause::kNone || out.has_nul(p, next)) [[unlikely]] {
      next = end_of(out, p);
      for (Texts& texts : to.carried) {
        texts.text.resize(texts.ends.empty() ? 0 : static_cast<size_t>(texts.ends.back()));
      }
      if (!out.malformed(describe(out, p, next, cause, line))) break;
      delimiters.seek(next < out.end ? next + 1 : next);
    } else if (!empty) {
      to.ids.resize(bags_ ? static_cast<size_t>(line.ids - to.ids.data()) : to.ids.size() + fields);
      if (bags_) add_offsets(to, sizes);
      for (Texts& texts : to.carried) texts.ends.push_back(static_cast<int64_t>(texts.text.size()));
      to.dense.resize(to.dense.size() + dense);
      to.labels.resize(to.labels.size() + 1);
      if (has_time) to.times.resize(to.times.size() + 1);
    }
    if (records_) out.line += out.lines(p, next);
    p = next < out.end ? next + 1 : next;
  }
  if (bags_) return;
  to.offsets.resize(to.labels.size() * fields + 1);
  for (size_t i = 0; i < to.offsets.size(); ++i) to.offsets[i] = static_cast<int64_t>(i);
}

void TableParser::add_offsets(Parsed& to, const std::vector<int64_t>& sizes) const {
  size_t at = to.offsets.size();
  if (to.offsets.capacity() < at + fields) to.offsets.reserve(std::max(2 * at, at + 64 * fields));
  to.offsets.resize(at + fields);
  for (const int64_t size : sizes) {
    to.offsets[at] = to.offsets[at - 1] + size;
    ++at;
  }
}

const char* TableParser::end_of(const Output& out, const char* p) const {
  return records_ ? record_end(p, out.end) : out.line_end(p);
}

const char* TableParser::record_end(const char* p, const char* end) const {
  for (bool begins = true; p < end; ++p) {
    if (begins && *p == '"') {
      for (++p;; p += 2) {  // to the closing quote; two quotes are one of the value
        p = std::find(p, end, '"');
        if (p == end || p + 1 == end || p[1] != '"') break;
      }
      if (p == end) return end;
      begins = false;
      continue;
    }
    if (*p == '\n') return p;
    begins = *p == options_.delimiter;
  }
  return end;
}

size_t TableParser::whole_records(std::string_view text) const {
  if (!records_) return LineParser::whole_records(text);
  const char *p = text.data(), *const end = p + text.size();
  for (;;) {
    const char* const next = record_end(p, end);
    if (next == end) return static_cast<size_t>(p - text.data());
    p = next + 1;
  }
}

TableParser::Cause TableParser::parse_line(const Output& out, Delimiters& delimiters, const char* p, Line& line,
                                           std::string& unquoted, const char*& next, bool& empty) const {
  const size_t columns = plans_.size();
  for (size_t c = 0;; ++c) {
    const char* const delimiter = delimiters.next();
    Value value{.begin = p, .end = delimiter, .next = delimiter};
    Cause cause = Cause::kNone;
    if (options_.quoting && p < delimiter && *p == '"') [[unlikely]] {
      cause = unquote(out, delimiters, p, unquoted, value);
    }
    const bool last = value.next == out.end || *value.next == '\n';
    if (last && value.begin == p) {
      if (value.end > p && value.end[-1] == '\r') --value.end;
      empty = c == 0 && value.end == p;
    }
    next = value.next;
    if (empty) return Cause::kNone;
    if (cause == Cause::kNone) cause = last == (c + 1 == columns) ? take(c, value, line) : Cause::kColumns;
    if (carried_ > 0 && cause == Cause::kNone && options_.columns[c].carry) {
      (line.carried++)->text.append(value.begin, value.end);
    }
    if (cause != Cause::kNone) [[unlikely]] {
      line.column = c;
      line.value = {value.begin, static_cast<size_t>(value.end - value.begin)};
      return cause;
    }
    if (last) return Cause::kNone;
    p = next + 1;
  }
}

TableParser::Cause TableParser::take(size_t c, const Value& value, Line& line) const {
  switch (plans_[c].role) {
    case Role::kKey:
      if (!options_.columns[c].separator.empty()) return take_bag(c, value, line);
      if (line.sizes != nullptr) *line.sizes++ = 1;
      return take_key(c, value, line);
    case Role::kTimeKey:
      if (line.sizes != nullptr) *line.sizes++ = 1;
      return take_time_key(c, value, line);
    case Role::kNumberKey:
      if (line.sizes != nullptr) *line.sizes++ = 1;
      return take_number_key(c, value, line);
    case Role::kDense:
      return take_dense(c, value, line);
    case Role::kLabel:
      return take_label(value, line);
    case Role::kTime:
      return take_time(value, line);
    case Role::kIgnore:
      return Cause::kNone;
  }
  __builtin_unreachable();
}

TableParser::Cause TableParser::take_key(size_t c, const Value& value, Line& line) const {
  if (!options_.raw_keys) {
    *line.ids++ = hash_value(value.begin, static_cast<size_t>(value.end - value.begin), plans_[c].seed);
    return Cause::kNone;
  }
  switch (parse_key(value.begin, value.end, *line.ids)) {
    case NumberStatus::kOk:
      ++line.ids;
      return Cause::kNone;
    case NumberStatus::kMissing:
      return Cause::kNoKey;
    default:
      return Cause::kBadKey;
  }
}

TableParser::Cause TableParser::take_bag(size_t c, const Value& value, Line& line) const {
  const std::string_view text{value.begin, static_cast<size_t>(value.end - value.begin)};
  const std::string& separator = options_.columns[c].separator;
  const uint64_t* const first = line.ids;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    const Value item{.begin = text.data() + begin, .end = text.data() + end, .next = nullptr};
    if (end > begin) {
      if (const Cause cause = take_key(c, item, line); cause != Cause::kNone) return cause;
    }
    begin = end + separator.size();
  }
  *line.sizes++ = line.ids - first;
  return Cause::kNone;
}

TableParser::Cause TableParser::take_time_key(size_t c, const Value& value, Line& line) const {
  int64_t seconds = 0;
  switch (parse_time(value.begin, value.end, seconds)) {
    case NumberStatus::kOk:
      *line.ids++ = hash_number(time_bucket(options_.columns[c].time_bucket, seconds), plans_[c].seed);
      return Cause::kNone;
    case NumberStatus::kMissing:
      *line.ids++ = plans_[c].missing;
      return Cause::kNone;
    case NumberStatus::kNotANumber:
    case NumberStatus::kOutOfRange:
      return Cause::kBadTime;
  }
  __builtin_unreachable();
}

TableParser::Cause TableParser::take_number_key(size_t c, const Value& value, Line& line) const {
  const NumberRule& rule = options_.columns[c].rule;
  double x = 0;
  int64_t bucket = 0;
  switch (parse_number(value.begin, value.end, x)) {
    case NumberStatus::kMissing:
      *line.ids++ = plans_[c].missing;
      return Cause::kNone;
    case NumberStatus::kNotANumber:
      return Cause::kBadNumber;
    case NumberStatus::kOutOfRange:
      return Cause::kTooLarge;
    case NumberStatus::kOk:
      break;
  }
  if (rule.bucket == Bucket::kNone) {
    *line.ids++ = hash_value(value.begin, static_cast<size_t>(value.end - value.begin), plans_[c].seed);
    return Cause::kNone;
  }
  if (!number_bucket(rule, x, bucket)) return Cause::kTooLarge;
  *line.ids++ = hash_number(bucket, plans_[c].seed);
  return Cause::kNone;
}

TableParser::Cause TableParser::take_dense(size_t c, const Value& value, Line& line) const {
  double x = 0;
  float feature = 0;
  switch (parse_number(value.begin, value.end, x)) {
    case NumberStatus::kMissing:
      break;
    case NumberStatus::kNotANumber:
      return Cause::kBadNumber;
    case NumberStatus::kOutOfRange:
      return Cause::kTooLarge;
    case NumberStatus::kOk:
      if (!number_feature(options_.columns[c].rule, x, feature)) return Cause::kTooLarge;
  }
  *line.dense++ = feature;
  return Cause::kNone;
}

TableParser::Cause TableParser::take_label(const Value& value, Line& line) const {
  switch (parse_float(value.begin, value.end, *line.label)) {
    case NumberStatus::kOk:
      return options_.binary_labels && *line.label != 0 && *line.label != 1 ? Cause::kBinaryLabel : Cause::kNone;
    case NumberStatus::kMissing:
      return Cause::kNoLabel;
    case NumberStatus::kNotANumber:
      return Cause::kBadLabel;
    case NumberStatus::kOutOfRange:
      return Cause::kTooLarge;
  }
  __builtin_unreachable();
}

TableParser::Cause TableParser::take_time(const Value& value, Line& line) {
  switch (parse_time(value.begin, value.end, *line.time)) {
    case NumberStatus::kOk:
      return Cause::kNone;
    case NumberStatus::kMissing:
      return Cause::kNoTime;
    case NumberStatus::kNotANumber:
    case NumberStatus::kOutOfRange:
      return Cause::kBadTime;
  }
  __builtin_unreachable();
}

TableParser::Cause TableParser::unquote(const Output& out, Delimiters& delimiters, const char* p, std::string& unquoted,
                                        Value& value) const {
  const char* const line_end = records_ ? out.end : out.line_end(p);
  const char* begin = p + 1;
  bool copied = false;
  value = {.begin = begin, .end = line_end, .next = line_end};
  unquoted.clear();
  for (const char* q = begin;;) {
    const void* found = std::memchr(q, '"', static_cast<size_t>(line_end - q));
    if (found == nullptr) return Cause::kOpenQuote;
    const char* const quote = static_cast<const char*>(found);
    const char* after = quote + 1;
    if (after < line_end && *after == '"') {
      unquoted.append(begin, after);
      begin = q = after + 1;
      copied = true;
      continue;
    }
    if (copied) {
      unquoted.append(begin, quote);
      value.begin = unquoted.data();
      value.end = unquoted.data() + unquoted.size();
    } else {
      value.end = quote;
    }
    if (after < out.end && *after == '\r' && (after + 1 == out.end || after[1] == '\n')) ++after;
    if (after != out.end && *after != '\n' && *after != options_.delimiter) return Cause::kTextAfterQuote;
    value.next = after;
    delimiters.seek(after < out.end ? after + 1 : after);
    return Cause::kNone;
  }
}

void TableParser::check_options() const {
  const auto code = static_cast<uint8_t>(options_.delimiter);
  if (code == 0 || code == '\n' || code == '\r' || (options_.quoting && code == '"')) {
    throw Error("delimiter of a table must not be " + quoted({&options_.delimiter, 1}));
  }
  if (options_.columns.empty()) throw Error("a table needs columns");
  size_t labels = 0, times = 0;
  for (const Column& column : options_.columns) {
    labels += column.role == Role::kLabel;
    times += column.role == Role::kTime;
    if (column.role == Role::kDense || column.role == Role::kNumberKey) check_rule(column.rule, column.name);
  }
  if (options_.line_breaks && !options_.quoting) throw Error("line_breaks needs quoting");
  if (labels > 1) throw Error("a table must have at most one label column, not " + std::to_string(labels));
  if (times > 1) throw Error("a table must have at most one time column, not " + std::to_string(times));
}

std::string TableParser::describe(const Output& out, const char* p, const char* end, Cause cause,
                                  const Line& line) const {
  if (out.has_nul(p, end)) return "the line has a NUL byte: the file is damaged, or is not text";
  const size_t expected = options_.columns.size();
  if (cause != Cause::kOpenQuote && cause != Cause::kTextAfterQuote) {
    // A missing column shifts the values after it: report the number of columns, not the shifted value.
    const size_t columns = count_columns(p, end);
    if (columns != expected) {
      return std::to_string(columns) + (columns == 1 ? " column" : " columns") + " where " + std::to_string(expected) +
             " are expected, separated by " + quoted({&options_.delimiter, 1}) + ": " +
             quoted({p, static_cast<size_t>(end - p)});
    }
  }
  const Column& column = options_.columns[std::min(line.column, expected - 1)];
  const std::string at = "column " + quoted(column.name) + " (" + std::to_string(line.column + 1) + " of " +
                         std::to_string(expected) + "): ";
  const std::string value = quoted(line.value);
  switch (cause) {
    case Cause::kNoLabel:
      return at + "the label is empty";
    case Cause::kBadLabel:
      return at + "the label " + value + " is not a finite number";
    case Cause::kBinaryLabel:
      return at + "the label " + value + " is neither 0 nor 1; data.label_threshold converts ratings";
    case Cause::kBadNumber:
      return at + value + " is not a finite number";
    case Cause::kTooLarge:
      return at + value + " is too large a number";
    case Cause::kNoKey:
      return at + "the key is empty; with raw_keys = true it must be a decimal number below 2^64";
    case Cause::kBadKey:
      return at + value + " is not a key; with raw_keys = true it must be a decimal number below 2^64";
    case Cause::kNoTime:
      return at + "the event time is empty";
    case Cause::kBadTime:
      return at + value + (column.role == Role::kTime ? " is not an event time" : " is not a time") +
             ": use seconds since 1970, or text such as 2026-01-31T23:59:59Z";
    case Cause::kOpenQuote:
      return at + "the quote at " + value +
             (records_ ? " does not end"
                       : " does not end in this line; data.line_breaks = true reads values of several lines");
    case Cause::kTextAfterQuote:
      return at + "text follows the closing quote of " + value;
    case Cause::kNone:
    case Cause::kColumns:
      break;
  }
  __builtin_unreachable();
}

size_t TableParser::count_columns(const char* p, const char* end) const {
  bool inside = false;
  size_t columns = 1;
  for (const char* q = p; q < end; ++q) {
    const bool begins = q == p || q[-1] == options_.delimiter;
    if (options_.quoting && *q == '"' && (inside || begins)) {
      if (inside && q + 1 < end && q[1] == '"') {
        ++q;
      } else {
        inside = !inside;
      }
    } else if (*q == options_.delimiter && !inside) {
      ++columns;
    }
  }
  return columns;
}

std::unique_ptr<const LineParser> make_table_parser(ParseOptions options) {
  return std::make_unique<TableParser>(std::move(options));
}

}  // namespace thermocline
