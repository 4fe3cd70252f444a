#include "data/text.h"

#include <charconv>

namespace thermocline {
namespace {

void append_number(std::string& text, uint64_t number) {
  char digits[20];
  text.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

}  // namespace

std::string to_text(const uint64_t* ids, const int64_t* offsets, size_t examples, size_t fields, const float* labels,
                    bool with_fields) {
  std::string text;
  text.reserve(static_cast<size_t>(offsets[examples * fields]) * (with_fields ? 27 : 24) + examples * 2);
  for (size_t e = 0; e < examples; ++e) {
    text += labels[e] > 0.5f ? '1' : '0';
    for (size_t f = 0; f < fields; ++f) {
      for (int64_t i = offsets[e * fields + f]; i < offsets[e * fields + f + 1]; ++i) {
        text += ' ';
        if (with_fields) {
          append_number(text, f);
          text += ':';
        }
        append_number(text, ids[i]);
        text += ":1";
      }
    }
    text += '\n';
  }
  return text;
}

}  // namespace thermocline
