// Parser of LibSVM and LibFFM.
#include <charconv>
#include <limits>
#include <vector>

#include "data/hash_value.h"
#include "data/parse_lines.h"
#include "data/parse_number.h"
#include "data/parse_scan.h"
#include "util/error.h"

namespace thermocline {
namespace {

constexpr size_t kMaxFields = 1 << 20;

enum class Shape : uint8_t { kPosition, kOneBag, kFfm };

class SvmParser final : public LineParser {
 public:
  explicit SvmParser(const ParseOptions& options)
      : shape_(options.format == Format::kLibffm ? Shape::kFfm
               : options.one_bag                 ? Shape::kOneBag
                                                 : Shape::kPosition),
        raw_keys_(options.raw_keys),
        binary_labels_(options.binary_labels) {
    fields = shape_ == Shape::kOneBag ? 1 : options.fields;
    if (fields > kMaxFields) {
      throw Error("fields is " + std::to_string(fields) + "; the maximum is " + std::to_string(kMaxFields));
    }
    for (size_t f = 0; f < fields; ++f) seeds_.push_back(field_seed(std::to_string(f)));
  }

  void parse(Output& out) const override {
    Delimiters delimiters(out.block, ' ', '\t', '\n');
    Line line;
    Parsed& to = out.parsed;
    to.offsets.resize(1);
    to.offsets[0] = 0;
    for (const char* p = out.block.data(); p < out.end; ++out.line) {
      line.restart();
      const char* next = nullptr;
      if (!out.nul_in_line(p) && parse_line(out, delimiters, p, line, next)) [[likely]] {
        if (line.tokens > 0) accept(out, line, p);
      } else {
        if (!out.malformed(describe(out, p, line))) break;
        next = out.line_end(p);
        delimiters.seek(next < out.end ? next + 1 : next);
      }
      p = next < out.end ? next + 1 : next;
    }
  }

 private:
  enum class Cause : uint8_t { kNone, kLabel, kBinaryLabel, kField, kFieldRange, kNoColon, kId, kKey, kValue, kCount };

  // State of one line; its ids are written after the accepted ones.
  struct Line {
    size_t tokens = 0;  // label included
    size_t ids = 0;
    float label = 0;
    bool weighted = false;  // some weight is not 1
    bool in_order = true;   // LibFFM: fields do not descend
    std::vector<float> weights;
    std::vector<uint32_t> fields;  // LibFFM: field of each id
    Cause cause = Cause::kNone;
    std::string_view token;  // with the error

    void restart() {
      tokens = ids = 0;
      weighted = false;
      in_order = true;
      weights.clear();
      fields.clear();
      cause = Cause::kNone;
    }
    bool fail(Cause why, const char* begin, const char* end) {
      cause = why;
      token = {begin, static_cast<size_t>(end - begin)};
      return false;
    }
  };

  // Sets `next` to the end of the line. False: the line is malformed.
  bool parse_line(Output& out, Delimiters& delimiters, const char* p, Line& line, const char*& next) const {
    for (;;) {
      const char* const delimiter = delimiters.next();
      const bool last = delimiter == out.end || *delimiter == '\n';
      const char* end = delimiter;
      if (last && end > p && end[-1] == '\r') --end;
      if (end > p) {
        if (line.tokens++ == 0) {
          if (!take_label(p, end, line)) return line.fail(Cause::kLabel, p, end);
          if (binary_labels_ && line.label != 0 && line.label != 1) return line.fail(Cause::kBinaryLabel, p, end);
        } else if (!take_token(out, p, end, line)) [[unlikely]] {
          return false;
        }
      }
      if (last) {
        next = delimiter;
        const bool right = shape_ != Shape::kPosition || line.tokens == 0 || line.ids == fields;
        return right || line.fail(Cause::kCount, p, end);
      }
      p = delimiter + 1;
    }
  }

  static bool take_label(const char* p, const char* end, Line& line) {
    if (end - p == 1 && (*p == '0' || *p == '1')) {
      line.label = static_cast<float>(*p - '0');
      return true;
    }
    if (parse_float(p, end, line.label) != NumberStatus::kOk) return false;
    if (line.label == -1) line.label = 0;
    return true;
  }

  // [field:]id[:value]
  bool take_token(Output& out, const char* p, const char* end, Line& line) const {
    const char* const token = p;
    size_t field = 0;
    if (shape_ == Shape::kFfm) {
      const size_t n = leading_digits(p, end, out.end);
      uint64_t number = 0;
      if (n == 0) return line.fail(Cause::kField, token, end);
      if (p + n == end || p[n] != ':') return line.fail(Cause::kNoColon, token, end);
      if (parse_key(p, p + n, number) != NumberStatus::kOk || number >= fields) {
        return line.fail(Cause::kFieldRange, token, end);
      }
      field = static_cast<size_t>(number);
      line.in_order &= line.fields.empty() || line.fields.back() <= field;
      line.fields.push_back(static_cast<uint32_t>(field));
      p += n + 1;
    } else if (shape_ == Shape::kPosition) {
      field = line.ids;
      if (field >= fields) {  // only counted, for the message
        ++line.ids;
        return true;
      }
    }
    const size_t n = leading_digits(p, end, out.end);
    if (n == 0 || (p + n < end && p[n] != ':')) return line.fail(Cause::kId, token, end);
    Grown<uint64_t>& ids = out.parsed.ids;
    if (ids.capacity() - ids.size() <= line.ids) [[unlikely]]
      out.reserve_more(ids, line.ids + 1, end);
    uint64_t& id = ids[ids.size() + line.ids];
    if (!raw_keys_) {
      id = hash_value(p, n, seeds_[field]);
    } else if (parse_key(p, p + n, id) != NumberStatus::kOk) {
      return line.fail(Cause::kKey, token, end);
    }
    float weight = 1;
    p += n;
    if (p < end && !(end - p == 2 && p[1] == '1')) {
      if (parse_float(p + 1, end, weight) != NumberStatus::kOk) return line.fail(Cause::kValue, token, end);
    }
    line.weighted |= weight != 1;
    line.weights.push_back(weight);
    ++line.ids;
    return true;
  }

  void accept(Output& out, Line& line, const char* at) const {
    Parsed& to = out.parsed;
    const size_t before = to.ids.size();
    if (!line.in_order) sort_by_field(to.ids.data() + before, line);
    if (line.weighted && to.weights.size() == 0 && before > 0) {
      to.weights.resize(before);
      std::fill_n(to.weights.data(), before, 1.0f);
    }
    to.ids.resize(before + line.ids);
    if (line.weighted || to.weights.size() > 0) {
      out.reserve_more(to.weights, line.ids, at);
      to.weights.resize(to.ids.size());
      std::copy(line.weights.begin(), line.weights.end(), to.weights.data() + before);
    }
    out.reserve_more(to.labels, 1, at);
    to.labels.resize(to.labels.size() + 1);
    to.labels[to.labels.size() - 1] = line.label;
    add_offsets(out, line, at);
  }

  void add_offsets(Output& out, const Line& line, const char* at) const {
    Grown<int64_t>& offsets = out.parsed.offsets;
    const size_t first = offsets.size();
    // A block of short lines with a million fields must not exhaust memory.
    const size_t most = 64 * out.block.size() + (1 << 20);
    if (first + fields > most) {
      throw Error("lines have so few ids that the offsets of " + std::to_string(fields) + " fields are " +
                  std::to_string(first / out.block.size()) + " times the text: the number of fields is wrong");
    }
    out.reserve_more(offsets, fields, at, most);
    offsets.resize(first + fields);
    int64_t id = offsets[first - 1];
    if (shape_ == Shape::kFfm) {
      size_t i = 0;
      for (size_t f = 0; f < fields; ++f) {
        for (; i < line.ids && line.fields[i] == f; ++i) ++id;
        offsets[first + f] = id;
      }
    } else if (shape_ == Shape::kPosition) {
      for (size_t f = 0; f < fields; ++f) offsets[first + f] = ++id;
    } else {
      offsets[first] = id + static_cast<int64_t>(line.ids);
    }
  }

  // Stable: the ids of a field keep their order.
  static void sort_by_field(uint64_t* ids, Line& line) {
    std::vector<uint32_t> order(line.ids);
    for (size_t i = 0; i < line.ids; ++i) order[i] = static_cast<uint32_t>(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return line.fields[a] < line.fields[b]; });
    const std::vector<uint64_t> old_ids(ids, ids + line.ids);
    const std::vector<float> old_weights = line.weights;
    const std::vector<uint32_t> old_fields = line.fields;
    for (size_t i = 0; i < line.ids; ++i) {
      ids[i] = old_ids[order[i]];
      line.weights[i] = old_weights[order[i]];
      line.fields[i] = old_fields[order[i]];
    }
  }

  std::string describe(const Output& out, const char* p, const Line& line) const {
    if (out.nul_in_line(p)) return "the line has a NUL byte: the file is damaged, or is not text";
    const std::string token = quoted(line.token);
    const std::string at = line.tokens > 1 ? "id " + std::to_string(line.tokens - 1) + ", " + token + ": " : "";
    const char* const form = shape_ == Shape::kFfm ? "field:id or field:id:value" : "id or id:value";
    switch (line.cause) {
      case Cause::kLabel:
        return "the label " + token + " is not a finite number that fits float32";
      case Cause::kBinaryLabel:
        return "the label " + token + " is neither 0 nor 1 (nor -1); data.label_threshold converts ratings";
      case Cause::kField:
        return at + "the field is not a decimal number; expected " + form;
      case Cause::kNoColon:
        return at + "no colon after the field number; expected " + form;
      case Cause::kFieldRange:
        return at + "the field is out of range: there are " + std::to_string(fields) +
               " fields, numbered from 0; set data.num_fields to their number";
      case Cause::kId:
        return at + "the id is not a decimal number; expected " + form;
      case Cause::kKey:
        return at + "the id is not a key; with raw_keys = true it must be a decimal number below 2^64";
      case Cause::kValue:
        return at + "the value is not a finite number that fits float32; expected " + form;
      case Cause::kCount:
        return "the line has " + std::to_string(line.ids) + " ids, not " + std::to_string(fields) +
               ": with fields = \"position\" all lines must have the same number; fields = \"one\" makes a line one "
               "bag";
      case Cause::kNone:
        break;
    }
    __builtin_unreachable();
  }

  const Shape shape_;
  const bool raw_keys_, binary_labels_;
  std::vector<uint64_t> seeds_;
};

}  // namespace

std::unique_ptr<const LineParser> make_svm_parser(const ParseOptions& options) {
  return std::make_unique<SvmParser>(options);
}

}  // namespace thermocline
