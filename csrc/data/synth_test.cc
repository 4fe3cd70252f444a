#include "data/synth.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <thread>

#include "data/text.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline {
namespace {

SynthOptions options(size_t fields, uint64_t keys, uint64_t min_ids, uint64_t max_ids) {
  SynthOptions o;
  o.fields.assign(fields, {keys, 1.05});
  o.min_ids = min_ids;
  o.max_ids = max_ids;
  return o;
}

uint64_t digest(const SynthBatch& b, size_t fields, size_t dense) {
  uint64_t h = xxh64(b.keys.get(), b.ids * 8, 0);
  h = xxh64(b.offsets.get(), (b.examples * fields + 1) * 8, h);
  h = xxh64(b.dense.get(), b.examples * dense * 4, h);
  h = xxh64(b.logits.get(), b.examples * 4, h);
  return xxh64(b.labels.get(), b.examples * 4, h);
}

TEST(Synth, DoesNotDependOnThreads) {
  SynthOptions o = options(7, 1000, 20, 60);
  o.dense = 3;
  const Synth one(o);
  o.threads = 4;
  const Synth four(o);
  const uint64_t expected = digest(one.generate(100, 3001), 7, 3);
  CHECK_EQ(digest(four.generate(100, 3001), 7, 3), expected);
  std::vector<uint64_t> found(3);
  std::vector<std::thread> callers;  // one object, several callers
  for (uint64_t& h : found) callers.emplace_back([&] { h = digest(four.generate(100, 3001), 7, 3); });
  for (auto& caller : callers) caller.join();
  for (uint64_t h : found) CHECK_EQ(h, expected);
}

TEST(Synth, ExamplesDependOnTheirNumberOnly) {
  SynthOptions o = options(5, 500, 5, 25);
  o.dense = 2;
  const Synth synth(o);
  const uint64_t first = uint64_t{1} << 62;
  const SynthBatch all = synth.generate(first, 300);
  for (size_t e : {0, 1, 127, 128, 299}) {
    const SynthBatch one = synth.generate(first + e, 1);
    const int64_t begin = all.offsets[e * 5];
    for (size_t f = 0; f <= 5; ++f) CHECK_EQ(one.offsets[f], all.offsets[e * 5 + f] - begin);
    CHECK(std::equal(one.keys.get(), one.keys.get() + one.ids, all.keys.get() + begin));
    CHECK_EQ(one.dense[1], all.dense[e * 2 + 1]);
    CHECK_EQ(one.labels[0], all.labels[e]);
    CHECK_EQ(one.logits[0], all.logits[e]);
  }
}

TEST(Synth, IdsAreEvenOverFieldsAndDistinctWithinAField) {
  const Synth synth(options(6, 12, 30, 70));  // up to 12 ids of a field with 12 keys
  const SynthBatch b = synth.generate(0, 2000);
  std::set<uint64_t> lengths;
  for (size_t e = 0; e < b.examples; ++e) {
    const auto ids = static_cast<uint64_t>(b.offsets[(e + 1) * 6] - b.offsets[e * 6]);
    CHECK(ids >= 30 && ids <= 70);
    lengths.insert(ids);
    for (size_t f = 0; f < 6; ++f) {
      const int64_t begin = b.offsets[e * 6 + f], end = b.offsets[e * 6 + f + 1];
      CHECK(end - begin >= static_cast<int64_t>(ids / 6) && end - begin <= static_cast<int64_t>((ids + 5) / 6));
      const std::set<uint64_t> bag(b.keys.get() + begin, b.keys.get() + end);
      CHECK_EQ(bag.size(), static_cast<size_t>(end - begin));
      for (uint64_t key : bag) {
        bool is_of_field = false;
        for (uint64_t rank = 0; rank < 12; ++rank) is_of_field |= key == synth.key_of(f, rank);
        CHECK(is_of_field);
      }
    }
  }
  CHECK_EQ(lengths.size(), 41u);
}

TEST(Synth, OneHot) {
  const Synth synth(options(26, uint64_t{1} << 58, 26, 26));
  const SynthBatch b = synth.generate(12345, 100);
  CHECK_EQ(b.ids, 2600u);
  for (size_t i = 0; i <= 2600; ++i) CHECK_EQ(b.offsets[i], static_cast<int64_t>(i));
}

TEST(Synth, LabelsFollowTheTeacherAndTheBaseRate) {
  for (double noise : {0.0, 0.5}) {
    SynthOptions o = options(10, 10000, 10, 10);
    o.base_rate = 0.15;
    o.signal = 1.5;
    o.label_noise = noise;
    const Synth synth(o);
    const SynthBatch b = synth.generate(0, 100000);
    double clicks = 0, mean = 0, squares = 0, excess = 0, variance = 0;
    for (size_t e = 0; e < b.examples; ++e) {
      const double p = noise * 0.15 + (1 - noise) * probability(b.logits[e]);
      clicks += b.labels[e];
      mean += b.logits[e] / 1e5;
      squares += b.logits[e] * b.logits[e] / 1e5;
      excess += (b.labels[e] - p) * b.logits[e];
      variance += p * (1 - p) * b.logits[e] * b.logits[e];
    }
    CHECK(std::abs(clicks / 1e5 - 0.15) < 0.008);
    CHECK(std::abs(std::sqrt(squares - mean * mean) - 1.5) < 0.1);
    CHECK(std::abs(excess) < 5 * std::sqrt(variance));  // labels are drawn with the teacher's probabilities
  }
}

TEST(Synth, ResultsNeverChange) {
  // Golden values: a change would make earlier data sets irreproducible.
  SynthOptions o = options(9, 100003, 20, 50);
  o.seed = 42;
  o.dense = 4;
  o.label_noise = 0.05;
  CHECK_EQ(digest(Synth(o).generate(1u << 20, 1000), 9, 4), 150224245148272492ULL);
}

TEST(Synth, InvalidArgumentsThrow) {
  CHECK_THROWS(Error, Synth(options(0, 10, 1, 1)));
  CHECK_THROWS(Error, Synth(options(2, 4, 1, 9)));
  CHECK_THROWS(Error, Synth(options(2, uint64_t{1} << 63, 2, 2)));
  CHECK_THROWS(Error, Synth(options(2, 10, 3, 2)));
  const Synth synth(options(2, 10, 2, 2));
  CHECK_THROWS(Error, synth.generate(uint64_t{3} << 62, 1));
  CHECK_THROWS(Error, synth.generate((uint64_t{3} << 62) - 1, 2));
  CHECK_EQ(synth.generate(5, 0).ids, 0u);
}

TEST(Text, LibsvmAndLibffm) {
  const uint64_t ids[] = {5, ~uint64_t{0}, 7};
  const int64_t offsets[] = {0, 1, 2, 2, 3};
  const float labels[] = {1, 0};
  CHECK_EQ(to_text(ids, offsets, 2, 2, labels, false), std::string("1 5:1 18446744073709551615:1\n0 7:1\n"));
  CHECK_EQ(to_text(ids, offsets, 2, 2, labels, true), std::string("1 0:5:1 1:18446744073709551615:1\n0 1:7:1\n"));
}

}  // namespace
}  // namespace thermocline
