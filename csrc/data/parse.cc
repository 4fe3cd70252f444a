#include "data/parse.h"

#include <utility>

#include "data/parse_lines.h"
#include "util/error.h"

namespace thermocline {

std::string quoted(std::string_view value) {
  constexpr size_t kShown = 40;
  constexpr char kHex[] = "0123456789abcdef";
  std::string text = "\"";
  for (const char c : value.substr(0, kShown)) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte < 0x20 || byte == 0x7f) {
      text += "\\x";
      text += kHex[byte >> 4];
      text += kHex[byte & 15];
    } else {
      text += c;
    }
  }
  text += value.size() > kShown ? "...\" (" + std::to_string(value.size()) + " bytes)" : "\"";
  return text;
}

TextParser::TextParser(ParseOptions options)
    : lines_(options.format == Format::kTable ? make_table_parser(std::move(options)) : make_svm_parser(options)) {}
TextParser::~TextParser() = default;
TextParser::TextParser(TextParser&&) noexcept = default;

size_t TextParser::whole_records(std::string_view text) const { return lines_->whole_records(text); }

size_t TextParser::fields() const { return lines_->fields; }
size_t TextParser::dense() const { return lines_->dense; }
bool TextParser::has_time() const { return lines_->has_time; }

Parsed TextParser::parse(std::string_view block, bool skip_errors) const {
  if (block.size() > UINT32_MAX) {
    throw Error("parse: a block has " + std::to_string(block.size()) + " bytes; split it into blocks below 4 GiB");
  }
  Output out(block, skip_errors);
  lines_->parse(out);
  Parsed& parsed = out.parsed;
  parsed.ids.shrink();
  parsed.offsets.shrink();
  parsed.weights.shrink();
  parsed.dense.shrink();
  parsed.labels.shrink();
  parsed.times.shrink();
  return std::move(parsed);
}

}  // namespace thermocline
