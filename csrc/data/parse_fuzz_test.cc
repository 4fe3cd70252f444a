// Arbitrary bytes through every parser: the output is consistent, equals that of single lines, and no byte outside the
// block is read.
//
// `make test-cpp` replays the corpus (tests/data/corpus) and seeded mutations of it, `make test-sanitize` does so under
// ASan; `make fuzz` builds this file with libFuzzer. The first byte of an input selects the parser, the rest is the
// block.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/parse.h"
#include "data/parse_scan.h"

#ifndef THERMOCLINE_LIBFUZZER
#include "testing/corpus.h"
#include "testing/test.h"
#endif

namespace thermocline {
namespace {

[[noreturn]] void broken(const char* what, int line, std::string_view block) {
  std::fprintf(stderr, "parse_fuzz_test.cc:%d: %s, for a block of %zu bytes\n", line, what, block.size());
  std::abort();
}
#define HOLDS(...)                                             \
  do {                                                         \
    if (!(__VA_ARGS__)) broken(#__VA_ARGS__, __LINE__, block); \
  } while (0)

std::vector<TextParser> make_parsers() {
  const NumberRule plain{}, log{.log = true, .mean = 1.5, .inverse_deviation = 0.25};
  const NumberRule square{.bucket = Bucket::kLogSquare}, width{.log = true, .bucket = Bucket::kWidth, .width = 0.5};
  const std::vector<Column> columns = {
      {Role::kLabel, "label", plain},  {Role::kNumberKey, "I1", square}, {Role::kNumberKey, "I2", width},
      {Role::kNumberKey, "I3", plain}, {Role::kDense, "D1", plain},      {Role::kDense, "D2", log},
      {Role::kKey, "C1", plain},       {Role::kIgnore, "x", plain},      {Role::kKey, "C2", plain}};
  std::vector<TextParser> parsers;
  const auto add = [&](ParseOptions options) { parsers.emplace_back(std::move(options)); };
  add({.format = Format::kLibsvm, .fields = 3});
  add({.format = Format::kLibsvm, .one_bag = true});
  add({.format = Format::kLibsvm, .fields = 3, .raw_keys = true});
  add({.format = Format::kLibffm, .fields = 4});
  add({.format = Format::kLibffm, .fields = 4, .raw_keys = true});
  add({.format = Format::kTable, .columns = columns});
  add({.format = Format::kTable, .delimiter = ',', .quoting = true, .columns = columns});
  add({.format = Format::kTable, .delimiter = ';', .quoting = true, .columns = columns, .raw_keys = true});
  add({.format = Format::kTable, .quoting = true, .columns = {{Role::kDense, "only", log}}});
  add({.format = Format::kTable,
       .delimiter = ',',
       .quoting = true,
       .columns = {{Role::kLabel, "label", plain}, {Role::kTime, "at", plain}, {Role::kKey, "C1", plain}}});
  std::vector<Column> mixed = columns;
  mixed[6].separator = "|";
  mixed[7].role = Role::kTimeKey;
  mixed[8].carry = true;
  add({.format = Format::kTable, .delimiter = ',', .quoting = true, .columns = mixed, .binary_labels = true});
  add({.format = Format::kTable, .delimiter = ',', .quoting = true, .columns = mixed, .line_breaks = true});
  add({.format = Format::kTable, .delimiter = ',', .quoting = true, .columns = columns, .line_breaks = true});
  return parsers;
}

// A buffer of exactly the input size, so that ASan detects every read outside.
Parsed parse_copy(const TextParser& parser, std::string_view block, bool skip_errors) {
  const std::unique_ptr<char[]> copy(new char[block.size()]);
  std::memcpy(copy.get(), block.data(), block.size());
  return parser.parse({copy.get(), block.size()}, skip_errors);
}

template <typename T>
bool finite(const Grown<T>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) return false;
  }
  return true;
}

void check_whole(const TextParser& parser, const Parsed& parsed, std::string_view block) {
  const size_t examples = parsed.labels.size();
  HOLDS(parsed.times.size() == (parser.has_time() ? examples : 0));
  HOLDS(parsed.offsets.size() == examples * parser.fields() + 1);
  HOLDS(parsed.dense.size() == examples * parser.dense());
  HOLDS(parsed.weights.size() == 0 || parsed.weights.size() == parsed.ids.size());
  HOLDS(parsed.offsets[0] == 0);
  for (size_t i = 1; i < parsed.offsets.size(); ++i) HOLDS(parsed.offsets[i - 1] <= parsed.offsets[i]);
  HOLDS(static_cast<size_t>(parsed.offsets[parsed.offsets.size() - 1]) == parsed.ids.size());
  for (const Texts& texts : parsed.carried) {
    HOLDS(texts.ends.size() == examples);
    HOLDS(texts.text.size() == (examples ? static_cast<size_t>(texts.ends.back()) : 0));
  }
  HOLDS(finite(parsed.labels) && finite(parsed.weights) && finite(parsed.dense));
  HOLDS(parsed.errors.size() == std::min<uint64_t>(parsed.malformed, kMaxDescribed));
  for (const Malformed& error : parsed.errors) HOLDS(!error.cause.empty() && error.cause.size() < 400);
}

// True if examples [0, n) of `part` equal examples [first, first + n) of `whole`, to the bit.
void check_part(const TextParser& parser, const Parsed& whole, size_t first, const Parsed& part,
                std::string_view block) {
  const size_t fields = parser.fields(), n = part.labels.size();
  HOLDS(first + n <= whole.labels.size());
  const auto id = static_cast<size_t>(whole.offsets[first * fields]);
  for (size_t i = 0; i < n; ++i) {
    HOLDS(std::bit_cast<uint32_t>(whole.labels[first + i]) == std::bit_cast<uint32_t>(part.labels[i]));
  }
  for (size_t i = 0; i < n * parser.dense(); ++i) {
    HOLDS(std::bit_cast<uint32_t>(whole.dense[first * parser.dense() + i]) == std::bit_cast<uint32_t>(part.dense[i]));
  }
  for (size_t i = 0; i <= n * fields; ++i) {
    HOLDS(whole.offsets[first * fields + i] - whole.offsets[first * fields] == part.offsets[i]);
  }
  for (size_t i = 0; i < part.ids.size(); ++i) {
    HOLDS(whole.ids[id + i] == part.ids[i]);
    const float a = whole.weights.size() ? whole.weights[id + i] : 1, b = part.weights.size() ? part.weights[i] : 1;
    HOLDS(a == b);
  }
}

// Length of the first line, or of the first record of several lines.
size_t first_record(const TextParser& parser, std::string_view text) {
  for (size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n', end + 1)) {
    if (parser.whole_records(text.substr(0, end + 1)) == end + 1) return end + 1;
  }
  return text.size();
}

void check_block(const TextParser& parser, std::string_view block) {
  const Parsed all = parse_copy(parser, block, true);
  check_whole(parser, all, block);
  bool weighted = all.weights.size() == 0;
  for (size_t i = 0; i < all.weights.size(); ++i) weighted |= all.weights[i] != 1;
  HOLDS(weighted);

  // Every line as one block.
  size_t line = 0, examples = 0;
  uint64_t malformed = 0;
  for (size_t at = 0; at < block.size();) {
    const size_t end = at + first_record(parser, block.substr(at));
    const Parsed one = parse_copy(parser, block.substr(at, end - at), true);
    check_whole(parser, one, block);
    HOLDS(one.labels.size() + one.malformed <= 1);
    check_part(parser, all, examples, one, block);
    examples += one.labels.size();
    if (one.malformed && malformed < kMaxDescribed) {
      HOLDS(all.errors[malformed].line == line && all.errors[malformed].cause == one.errors[0].cause);
    }
    malformed += one.malformed;
    line += static_cast<size_t>(
        std::count(block.begin() + static_cast<ptrdiff_t>(at), block.begin() + static_cast<ptrdiff_t>(end), '\n'));
    at = end;
  }
  HOLDS(examples == all.labels.size() && malformed == all.malformed);

  // Up to the first malformed line.
  const Parsed first = parse_copy(parser, block, false);
  check_whole(parser, first, block);
  check_part(parser, all, 0, first, block);
  HOLDS(first.malformed == (all.malformed > 0));
  if (all.malformed) {
    HOLDS(first.errors[0].line == all.errors[0].line && first.errors[0].cause == all.errors[0].cause);
  } else {
    HOLDS(first.labels.size() == all.labels.size());
  }
}

void check_scans(std::string_view block) {
  const auto scan = [&](ScanFunction function) {
    std::vector<uint32_t> positions(block.size() + kScanSlack);
    positions.resize(function(block.data(), block.size(), 5, '\t', '\n', ':', positions.data()));
    return positions;
  };
  std::vector<uint32_t> expected;
  for (size_t i = 0; i < block.size(); ++i) {
    if (block[i] == '\t' || block[i] == '\n' || block[i] == ':') expected.push_back(static_cast<uint32_t>(i) + 5);
  }
  HOLDS(scan(scan_base) == expected);
  HOLDS(scan(best_scan()) == expected);
}

void check_input(std::string_view input) {
  static const std::vector<TextParser> parsers = make_parsers();
  if (input.empty()) return;
  const auto chosen = static_cast<uint8_t>(input[0] - '0') % parsers.size();
  check_block(parsers[chosen], input.substr(1));
  check_scans(input.substr(1));
}

}  // namespace
}  // namespace thermocline

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thermocline::check_input({reinterpret_cast<const char*>(data), size});
  return 0;
}

#ifndef THERMOCLINE_LIBFUZZER
namespace thermocline {
namespace {

std::vector<std::string> read_corpus() {
  return testing::read_corpus(testing::beside_source(__FILE__, "../../tests/data/corpus"));
}

struct Random {
  uint64_t state;
  // Returns a number below n.
  size_t operator()(size_t n) {
    state += 0x9e3779b97f4a7c15ULL;
    uint64_t x = state;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return static_cast<size_t>((x ^ (x >> 31)) % n);
  }
};

std::string mutate(std::string text, const std::string& other, Random& random) {
  static const std::vector<std::string> kWords = {"\n",
                                                  "\r\n",
                                                  "\t",
                                                  ",",
                                                  ";",
                                                  "\"",
                                                  "\"\"",
                                                  ":",
                                                  " ",
                                                  "0",
                                                  "-1",
                                                  "1",
                                                  "+1",
                                                  "1e39",
                                                  "1e308",
                                                  "1e309",
                                                  "1e-400",
                                                  "nan",
                                                  "inf",
                                                  "-0",
                                                  ".5",
                                                  "5.",
                                                  "0x1",
                                                  "18446744073709551615",
                                                  "18446744073709551616",
                                                  "9223372036854775807",
                                                  std::string("\0", 1),
                                                  "\xff\xfe",
                                                  "2047",
                                                  "2048",
                                                  "-16",
                                                  "-17",
                                                  std::string(70, 'a'),
                                                  std::string(70, '7'),
                                                  std::string(9, '\n')};
  for (size_t edits = 1 + random(4); edits > 0; --edits) {
    const size_t at = random(text.size() + 1), n = std::min(text.size() - at, random(12));
    switch (random(6)) {
      case 0:
        text.insert(at, kWords[random(kWords.size())]);
        break;
      case 1:
        text.replace(at, n, kWords[random(kWords.size())]);
        break;
      case 2:
        text.erase(at, n);
        break;
      case 3:
        text.insert(at, text.substr(at, 1 + random(80)));
        break;
      case 4:
        if (at < text.size()) text[at] = static_cast<char>(random(256));
        break;
      case 5:
        text.insert(at, other.substr(random(other.size() + 1), random(100)));
        break;
    }
  }
  return text;
}

TEST(ParseFuzz, Corpus) {
  const std::vector<std::string> corpus = read_corpus();
  CHECK(corpus.size() >= 20);
  // Every input through every parser.
  for (const std::string& input : corpus) {
    for (char parser = '0'; parser <= '8'; ++parser)
      check_input(parser + input.substr(std::min<size_t>(input.size(), 1)));
  }
}

TEST(ParseFuzz, Mutations) {
  const std::vector<std::string> corpus = read_corpus();
  Random random{2021};
  for (uint64_t i = 0; i < testing::scaled(20'000, 5'000'000); ++i) {
    std::string input = corpus[random(corpus.size())];
    const std::string& other = corpus[random(corpus.size())];
    for (size_t rounds = 1 + random(3); rounds > 0; --rounds) input = mutate(std::move(input), other, random);
    check_input(input);
  }
}

// Blocks longer than the look-ahead of the scanner, split anywhere.
TEST(ParseFuzz, LongBlocks) {
  const std::vector<std::string> corpus = read_corpus();
  Random random{7};
  for (uint64_t i = 0; i < testing::scaled(30, 1000); ++i) {
    std::string input(1, static_cast<char>('0' + random(9)));
    while (input.size() < 20'000) {
      const std::string& other = corpus[random(corpus.size())];
      input += other.substr(std::min<size_t>(1, other.size()));
    }
    input.resize(1 + random(input.size()));
    check_input(input);
  }
}

}  // namespace
}  // namespace thermocline
#endif
