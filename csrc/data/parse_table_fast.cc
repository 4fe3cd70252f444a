// Fast path of TableParser for lines without quotes and with all columns. Other lines, and all error messages, are left
// to parse_line().
#include <cstring>

#include "data/hash_value.h"
#include "data/parse_number.h"
#include "data/parse_table.h"

namespace thermocline {
namespace {

uint64_t load(const char* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

// Returns b if `other`, else a, without a branch: it would be mispredicted if every other value is empty.
uint64_t choose(bool other, uint64_t a, uint64_t b) { return a ^ ((a ^ b) & (0 - static_cast<uint64_t>(other))); }

}  // namespace

bool TableParser::parse_plain_line(const Output& out, uint32_t* delimiters, const char* p, Line line) const {
  const char* const text = out.block.data();
  const size_t columns = plans_.size();
  const uint32_t newline = delimiters[columns - 1];
  // Eight bytes are loaded at the start of every value.
  if (text[newline] != '\n' || out.block.size() - newline < 8) return false;
  const bool cr = text + newline > p && text[newline - 1] == '\r';
  if (text + newline - cr == p) return false;  // empty
  delimiters[columns - 1] = newline - cr;

  const char delimiter = options_.delimiter;
  const bool quoting = options_.quoting, raw_keys = options_.raw_keys;
  size_t ends = 0;  // columns that do not end with the delimiter: in a complete line only the last one
  bool odd = false;
  size_t c = 0;
  // Calls f(plan, begin, size) for the columns of a run until it returns false.
  const auto each = [&](size_t end, auto f) {
    for (; c < end; ++c) {
      const char* const value_end = text + delimiters[c];
      ends += *value_end != delimiter;
      odd |= quoting && *p == '"';
      const auto n = static_cast<size_t>(value_end - p);
      if (!f(plans_[c], p, n)) {
        const Value value{.begin = p, .end = value_end, .next = value_end};
        if (take(c, value, line) != Cause::kNone) return false;
      }
      p = value_end + 1;
    }
    return true;
  };
  const auto key = [&](const Plan& plan, const char* begin, size_t n) {
    if ((n & ~size_t{8}) != 0 || raw_keys) return false;
    *line.ids++ = choose(n == 0, hash_eight(load(begin), plan.seed), plan.missing);
    return true;
  };
  const auto number_key = [&](const Plan& plan, const char* begin, size_t n) {
    uint32_t number = 0;
    if (n > 8 || !parse_up_to_8(begin, n, begin + 8, number) || number >= plan.small_keys.size()) return false;
    *line.ids++ = choose(n == 0, plan.small_keys[number], plan.missing);
    return true;
  };
  const auto dense_number = [&](const Plan& plan, const char* begin, size_t n) {
    uint32_t number = 0;
    if (n > 8 || !parse_up_to_8(begin, n, begin + 8, number) || number >= plan.small_dense.size()) return false;
    *line.dense++ = n == 0 ? 0 : plan.small_dense[number];
    return true;
  };
  const auto label = [&](const Plan&, const char* begin, size_t n) {
    if (n != 1 || (*begin != '0' && *begin != '1')) return false;
    *line.label = static_cast<float>(*begin - '0');
    return true;
  };

  bool plain = true;
  for (const Run& run : runs_) {
    switch (run.role) {
      case Role::kKey:
        plain = each(run.end, key);
        break;
      case Role::kNumberKey:
        plain = each(run.end, number_key);
        break;
      case Role::kDense:
        plain = each(run.end, dense_number);
        break;
      case Role::kLabel:
        plain = each(run.end, label);
        break;
      case Role::kTime:
      case Role::kTimeKey:
        plain = each(run.end, [](const Plan&, const char*, size_t) { return false; });
        break;
      case Role::kIgnore:
        plain = each(run.end, [](const Plan&, const char*, size_t) { return true; });
        break;
    }
    if (!plain) break;
  }
  delimiters[columns - 1] = newline;
  return plain && ends == 1 && !odd;
}

}  // namespace thermocline
