#include "data/parse.h"

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "data/hash_value.h"
#include "data/parse_number.h"
#include "data/parse_scan.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline {
namespace {

struct Random {
  uint64_t state;
  // Returns a number below n.
  size_t operator()(size_t n) { return static_cast<size_t>(mix64(state += 0x9e3779b97f4a7c15ULL) % n); }
};

NumberStatus number(const std::string& text, double& out) {
  return parse_number(text.data(), text.data() + text.size(), out);
}

double number(const std::string& text) {
  double out = 0;
  CHECK(number(text, out) == NumberStatus::kOk);
  return out;
}

NumberStatus status(const std::string& text) {
  double out = 0;
  return number(text, out);
}

TEST(ParseNumber, EqualsStrtod) {
  Random random{1};
  for (uint64_t i = 0; i < testing::scaled(50'000, 10'000'000); ++i) {
    std::string text = random(3) == 0 ? "-" : "";
    for (size_t digits = 1 + random(22); digits > 0; --digits) text += static_cast<char>('0' + random(10));
    if (random(2)) {
      text += '.';
      for (size_t digits = random(22); digits > 0; --digits) text += static_cast<char>('0' + random(10));
    }
    if (random(2)) text.append("e").append(std::to_string(static_cast<int>(random(640)) - 330));
    const double expected = std::strtod(text.c_str(), nullptr);
    double got = 0;
    if (std::isinf(expected)) {
      CHECK(number(text, got) == NumberStatus::kOutOfRange);
    } else {
      CHECK(number(text, got) == NumberStatus::kOk);
      CHECK_EQ(std::bit_cast<uint64_t>(got), std::bit_cast<uint64_t>(expected));
    }
  }
}

TEST(ParseNumber, GrammarIsStrict) {
  for (const char* text : {"nan", "inf", "-inf", "0x10", "1_000", "1,5", "e5", "1e", "1e+", ".", "-", "+", "--1",
                           "1.2.3", "1 2", "\t1", "1\r", "1f", "Infinity"}) {
    CHECK(status(text) == NumberStatus::kNotANumber);
  }
  CHECK(status("") == NumberStatus::kMissing);
  CHECK(status("   ") == NumberStatus::kMissing);
  CHECK_EQ(number("+1.5"), 1.5);
  CHECK_EQ(number(" 7 "), 7.0);
  CHECK_EQ(number(".5"), 0.5);
  CHECK_EQ(number("5."), 5.0);
  CHECK_EQ(number("1e-999999999999999999999"), 0.0);
  CHECK_EQ(number("0e999999999999999999999"), 0.0);
  CHECK_EQ(number("0." + std::string(400, '0') + "1e401"), 1.0);
  CHECK(status("1e999999999999999999999") == NumberStatus::kOutOfRange);
  CHECK(status("1" + std::string(400, '0')) == NumberStatus::kOutOfRange);
  CHECK(std::signbit(number("-0")));
}

TEST(ParseNumber, KeysOfAllLengths) {
  Random random{2};
  const auto key = [](const std::string& text, uint64_t& out) {
    return parse_key(text.data(), text.data() + text.size(), out);
  };
  uint64_t got = 0;
  for (int i = 0; i < 20'000; ++i) {
    const uint64_t expected = mix64(random.state++) >> random(64);
    const std::string text = std::string(random(30), '0') + std::to_string(expected);
    CHECK(key(text, got) == NumberStatus::kOk);
    CHECK_EQ(got, expected);
    std::string bad = text;
    bad[random(bad.size())] = "a:/ \xff"[random(5)];
    CHECK(key(bad, got) == NumberStatus::kNotANumber);
    CHECK_EQ(leading_digits(bad.data(), bad.data() + bad.size(), bad.data() + bad.size()),
             bad.find_first_not_of("0123456789"));
  }
  CHECK(key("18446744073709551615", got) == NumberStatus::kOk);
  CHECK_EQ(got, ~uint64_t{0});
  for (const char* large : {"18446744073709551616", "99999999999999999999", "100000000000000000000"}) {
    CHECK(key(large, got) == NumberStatus::kOutOfRange);
  }
  CHECK(key("", got) == NumberStatus::kMissing);
}

// Values of the specification: keys are persisted in models.
TEST(HashValue, IsXxh64) {
  CHECK_EQ(hash_value("", 0, 0), 0xef46db3751d8e999ULL);
  CHECK_EQ(hash_value("a", 1, 0), 0xd24ec4f1a98c6e5bULL);
  CHECK_EQ(hash_value("abc", 3, 0), 0x44bc2cf5ad770999ULL);
  CHECK_EQ(field_seed(""), 0xef46db3751d8e999ULL);
  const std::string text = "68fd1e64 and what follows, more than 32 bytes of it";
  for (size_t n = 0; n <= text.size(); ++n) CHECK_EQ(hash_value(text.data(), n, 7), xxh64(text.data(), n, 7));
}

TEST(Scan, SeekSkips) {
  std::string text(20'000, 'x');
  for (size_t i = 0; i < text.size(); i += 7) text[i] = ',';
  Delimiters delimiters(text, ',', '\n', '\n');
  const auto position = [&] { return static_cast<size_t>(delimiters.next() - text.data()); };
  CHECK_EQ(position(), 0u);
  CHECK_EQ(position(), 7u);
  delimiters.seek(text.data() + 15);
  CHECK_EQ(position(), 21u);
  delimiters.seek(text.data() + 15'002);
  CHECK_EQ(position(), 15'008u);
  delimiters.seek(text.data() + text.size());
  CHECK_EQ(position(), text.size());
  CHECK_EQ(position(), text.size());
}

Parsed parse(ParseOptions options, std::string_view block, bool skip_errors = false) {
  return TextParser(std::move(options)).parse(block, skip_errors);
}

TEST(Parse, LibsvmByPosition) {
  const Parsed parsed = parse({.format = Format::kLibsvm, .fields = 2}, "-1 12:1 7\r\n\n1\t3:0.5  4:1 \n");
  CHECK_EQ(parsed.malformed, 0u);
  CHECK_EQ(parsed.labels.size(), 2u);
  CHECK_EQ(parsed.labels[0], 0.0f);
  CHECK_EQ(parsed.labels[1], 1.0f);
  CHECK_EQ(parsed.ids[0], hash_value("12", 2, field_seed("0")));
  CHECK_EQ(parsed.ids[3], hash_value("4", 1, field_seed("1")));
  CHECK_EQ(parsed.weights.size(), 4u);
  CHECK_EQ(parsed.weights[2], 0.5f);
  CHECK_EQ(parsed.weights[3], 1.0f);
}

TEST(Parse, WeightsOfMalformedLinesAreDropped) {
  const Parsed parsed = parse({.format = Format::kLibsvm, .fields = 2}, "1 1 2\n1 1:0.5 x\n0 3 4\n", true);
  CHECK_EQ(parsed.malformed, 1u);
  CHECK_EQ(parsed.errors[0].line, 1u);
  CHECK_EQ(parsed.labels.size(), 2u);
  CHECK_EQ(parsed.weights.size(), 0u);
}

TEST(Parse, LibffmGroupsByField) {
  const Parsed parsed =
      parse({.format = Format::kLibffm, .fields = 3, .raw_keys = true}, "1 2:9:1 0:1:2 2:8:1 0:2\n0\n");
  CHECK_EQ(parsed.labels.size(), 2u);
  const std::vector<uint64_t> ids(parsed.ids.data(), parsed.ids.data() + parsed.ids.size());
  CHECK(ids == std::vector<uint64_t>{1, 2, 9, 8});
  const std::vector<int64_t> offsets(parsed.offsets.data(), parsed.offsets.data() + parsed.offsets.size());
  CHECK(offsets == std::vector<int64_t>{0, 2, 2, 4, 4, 4, 4});
  CHECK_EQ(parsed.weights[0], 2.0f);
  CHECK_EQ(parsed.weights[1], 1.0f);
}

// The precomputed table of small integers equals the general path.
TEST(Parse, SmallIntegersEqualTheGeneralPath) {
  for (const Bucket bucket : {Bucket::kLogSquare, Bucket::kWidth}) {
    const NumberRule rule{
        .log = bucket == Bucket::kWidth, .mean = 0.5, .inverse_deviation = 3, .bucket = bucket, .width = 0.25};
    const TextParser parser({.format = Format::kTable,
                             .delimiter = ',',
                             .columns = {{Role::kNumberKey, "a", rule}, {Role::kDense, "b", rule}}});
    for (int i = -40; i < 4000; ++i) {
      const std::string text = std::to_string(i);
      const Parsed a = parser.parse(text + "," + text, false), b = parser.parse(text + ".0," + text + "e0", false);
      CHECK_EQ(a.malformed + b.malformed, 0u);
      CHECK_EQ(a.ids[0], b.ids[0]);
      CHECK_EQ(a.dense[0], b.dense[0]);
    }
  }
}

TEST(Parse, CriteoBuckets) {
  const TextParser parser(
      {.format = Format::kTable, .columns = {{Role::kNumberKey, "I1", {.bucket = Bucket::kLogSquare}}}});
  const auto same = [&](const std::string& text, const std::string& bucket) {
    return parser.parse(text + "\n", false).ids[0] == hash_value(bucket.data(), bucket.size(), field_seed("I1"));
  };
  CHECK(same("-2", "-2"));
  CHECK(same("0", "0"));
  CHECK(same("2", "2"));
  CHECK(same("3", "1"));          // ln(3)^2 = 1.2
  CHECK(same("100", "21"));       // 21.2
  CHECK(same("5000", "72"));      // 72.5
  CHECK(same("1000000", "190"));  // 190.9
  CHECK(same("2.5", "0"));
}

TEST(Parse, EventTimes) {
  const TextParser parser({.format = Format::kTable,
                           .delimiter = ',',
                           .quoting = true,
                           .columns = {{Role::kTime, "at", {}}, {Role::kKey, "C1", {}}}});
  // The second line goes the fast way if the block goes on for eight bytes.
  const auto time = [&](const std::string& text) {
    const Parsed parsed = parser.parse(text + ",a\n" + text + ",a\n0,aaaaaaaaaa\n", true);
    if (parsed.malformed == 2) return int64_t{-1};
    CHECK_EQ(parsed.times.size(), 3u);
    CHECK_EQ(parsed.times[0], parsed.times[1]);
    return parsed.times[0];
  };
  CHECK_EQ(time("1700000000"), 1'700'000'000);
  CHECK_EQ(time(" 9007199254740992 "), int64_t{1} << 53);
  CHECK_EQ(time("-1.5"), -2);
  CHECK_EQ(time("1700000000.99"), 1'700'000'000);
  CHECK_EQ(time("1970-01-02"), 86400);
  CHECK_EQ(time("2000-02-29T23:59:59Z"), 951'868'799);
  CHECK_EQ(time("2000-02-29 23:59"), 951'868'740);
  CHECK_EQ(time("\"2000-03-01 01:29:59.999+01:30\""), 951'868'799);
  CHECK_EQ(time("2000-02-29T21:59:59-0200"), 951'868'799);
  CHECK_EQ(time("1969-12-31T23:59:58"), -2);
  for (const char* bad : {"", "x", "1e300", "9007199254740994", "2000-02-30", "2001-02-29", "2000-13-01", "2000-1-1",
                          "2000-01-01T24:00", "2000-01-01T00:60", "2000-01-01T00:00:61", "2000-01-01T00:00:00.",
                          "2000-01-01T00:00:00+1", "2000-01-01T00:00Zx", "2000-01-01x00:00", "2000-01-01T"}) {
    CHECK_EQ(time(bad), -1);
  }
  CHECK_EQ(parser.parse("y,a\n", true).errors[0].cause,
           "column \"at\" (1 of 2): \"y\" is not an event time: use seconds since 1970, or text such as "
           "2026-01-31T23:59:59Z");
  CHECK_THROWS(Error,
               TextParser({.format = Format::kTable, .columns = {{Role::kTime, "a", {}}, {Role::kTime, "b", {}}}}));
}

TEST(Parse, TimeBuckets) {
  // 2026-11-16 is a Monday.
  const int64_t monday = 1794787200 + 11 * 3600 + 59 * 60;
  CHECK_EQ(time_bucket(TimeBucket::kHourOfDay, monday), 11);
  CHECK_EQ(time_bucket(TimeBucket::kWeekday, monday), 0);
  CHECK_EQ(time_bucket(TimeBucket::kHourOfWeek, monday - 3600 * 12), 6 * 24 + 23);
  CHECK_EQ(time_bucket(TimeBucket::kDayOfMonth, monday), 16);
  CHECK_EQ(time_bucket(TimeBucket::kMonth, monday), 11);
  CHECK_EQ(time_bucket(TimeBucket::kHourOfDay, -1), 23);  // 31 December 1969, a Wednesday
  CHECK_EQ(time_bucket(TimeBucket::kWeekday, -1), 2);
  CHECK_EQ(time_bucket(TimeBucket::kDayOfMonth, -1), 31);
  CHECK_EQ(time_bucket(TimeBucket::kMonth, -1), 12);
  for (const int64_t seconds : {-(int64_t{1} << 53), int64_t{1} << 53}) {
    CHECK(time_bucket(TimeBucket::kHourOfWeek, seconds) >= 0 && time_bucket(TimeBucket::kHourOfWeek, seconds) < 168);
    CHECK(time_bucket(TimeBucket::kMonth, seconds) >= 1 && time_bucket(TimeBucket::kMonth, seconds) <= 12);
  }
}

TEST(Parse, Bags) {
  const TextParser parser({.format = Format::kTable,
                           .delimiter = ',',
                           .quoting = true,
                           .columns = {{Role::kKey, "tags", {}, ", "}, {Role::kKey, "C", {}, "", {}, true}}});
  const Parsed parsed = parser.parse("\"a, b\",x\n,y\n\", , c, \",\"z,\"\"\"\n", false);
  CHECK_EQ(parsed.malformed, 0u);
  const auto key = [](const char* field, std::string_view value) {
    return hash_value(value.data(), value.size(), field_seed(field));
  };
  const std::vector<uint64_t> ids(parsed.ids.data(), parsed.ids.data() + parsed.ids.size());
  CHECK(ids == (std::vector<uint64_t>{key("tags", "a"), key("tags", "b"), key("C", "x"), key("C", "y"),
                                      key("tags", "c"), key("C", "z,\"")}));
  const std::vector<int64_t> offsets(parsed.offsets.data(), parsed.offsets.data() + parsed.offsets.size());
  CHECK(offsets == (std::vector<int64_t>{0, 2, 3, 3, 4, 5, 6}));
  CHECK_EQ(parsed.carried[0].text, "xyz,\"");
  CHECK(parsed.carried[0].ends == (std::vector<int64_t>{1, 2, 5}));
}

TEST(Parse, LineBreaksInQuotes) {
  const std::vector<Column> columns = {{Role::kDense, "d", {}}, {Role::kKey, "C", {}, "", {}, true}};
  const auto parser = [&](bool line_breaks) {
    return TextParser(
        {.format = Format::kTable, .delimiter = ',', .quoting = true, .columns = columns, .line_breaks = line_breaks});
  };
  const std::string text = "1,\"a\nb\"\n\n2,c\"d\nx,\"e\n5,f\"\r\n3,\"g\r\n\"\"\n\"\r\n";
  const Parsed parsed = parser(true).parse(text, true);
  CHECK_EQ(parsed.carried[0].text, "a\nbc\"dg\r\n\"\n");
  CHECK_EQ(parsed.malformed, 1u);
  CHECK_EQ(parsed.errors[0].line, 4u);
  CHECK_EQ(parsed.errors[0].cause, "column \"d\" (1 of 2): \"x\" is not a finite number");
  CHECK_EQ(parser(true).whole_records(text), text.size());
  CHECK_EQ(parser(true).whole_records(text + "4,\"h\n\n"), text.size());
  CHECK_EQ(parser(false).whole_records(text + "4,\"h\n\n"), text.size() + 6);
  CHECK(parser(false)
            .parse(text, false)
            .errors[0]
            .cause.ends_with("does not end in this line; data.line_breaks = true reads values of several lines"));
  CHECK_EQ(parser(true).parse("1,\"a\n\n", true).errors[0].cause,
           "column \"C\" (2 of 2): the quote at \"a\\x0a\\x0a\" does not end");
  CHECK_THROWS(Error, TextParser({.format = Format::kTable, .columns = columns, .line_breaks = true}));
}

TEST(Parse, BinaryLabels) {
  const TextParser table({.format = Format::kTable,
                          .delimiter = ',',
                          .columns = {{Role::kLabel, "y", {}}, {Role::kKey, "C", {}}},
                          .binary_labels = true});
  const Parsed parsed = table.parse("0,aaaaaaaaa\n1,a\n1.0,a\n-1,a\n0.5,a\n2,a\n", true);
  CHECK_EQ(parsed.labels.size(), 3u);
  CHECK_EQ(parsed.malformed, 3u);
  CHECK_EQ(parsed.errors[0].line, 3u);
  CHECK_EQ(parsed.errors[2].cause,
           "column \"y\" (1 of 2): the label \"2\" is neither 0 nor 1; data.label_threshold converts ratings");
  const TextParser svm({.format = Format::kLibsvm, .fields = 1, .binary_labels = true});
  CHECK_EQ(svm.parse("-1 5\n1 5\n0 5\n2 5\n", true).labels.size(), 3u);
}

TEST(Parse, InvalidOptionsThrow) {
  CHECK_THROWS(Error, TextParser({.format = Format::kTable}));
  CHECK_THROWS(Error, TextParser({.format = Format::kLibffm, .fields = size_t{1} << 40}));
  CHECK_THROWS(Error, TextParser({.format = Format::kTable, .delimiter = '\r', .columns = {{Role::kKey, "a", {}}}}));
}

}  // namespace
}  // namespace thermocline
