#include "data/op_osrp.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "testing/test.h"
#include "util/error.h"

namespace thermocline {
namespace {

struct Bags {
  std::vector<uint64_t> ids;
  std::vector<float> weights;  // empty: all 1
  std::vector<int64_t> offsets = {0};

  const float* weights_or_null() const { return weights.empty() ? nullptr : weights.data(); }
  size_t count() const { return offsets.size() - 1; }
};

// Keys below `keys` if it is not 0: many keys share a bin, and some repeat.
Bags random_bags(uint64_t seed, size_t bags, size_t longest, uint64_t keys, bool weighted) {
  std::mt19937_64 random(seed);
  Bags made;
  for (size_t b = 0; b < bags; ++b) {
    const size_t n = random() % (longest + 1);
    for (size_t i = 0; i < n; ++i) {
      made.ids.push_back(keys ? random() % keys : random());
      if (weighted) made.weights.push_back(static_cast<float>(static_cast<int>(random() % 9) - 4) * 0.37f);
    }
    made.offsets.push_back(static_cast<int64_t>(made.ids.size()));
  }
  return made;
}

HashedBags slots(const OpOsrp& hasher, const Bags& bags) {
  return hasher.slots(bags.ids.data(), bags.weights_or_null(), bags.offsets.data(), bags.count());
}
HashedBags sketch(const OpOsrp& hasher, const Bags& bags) {
  return hasher.sketch(bags.ids.data(), bags.weights_or_null(), bags.offsets.data(), bags.count());
}

bool same(const HashedBags& a, const HashedBags& b) {
  const auto equal = [](const auto& x, const auto& y) {
    return x.size() == y.size() && std::equal(x.data(), x.data() + x.size(), y.data());
  };
  return equal(a.ids, b.ids) && equal(a.offsets, b.offsets) && equal(a.weights, b.weights);
}

TEST(Permutation, IsABijection) {
  for (int bits = 2; bits <= 16; ++bits) {
    for (uint64_t seed : {0u, 1u, 77u}) {
      const Permutation permute(seed, bits);
      std::vector<bool> seen(size_t{1} << bits);
      for (size_t x = 0; x < seen.size(); ++x) {
        const uint64_t y = permute(x);
        CHECK(y < seen.size() && !seen[y]);
        seen[y] = true;
      }
    }
  }
  const Permutation wide(5);  // 64 bits: every step is inverted
  const auto inverse = [](uint64_t odd) {
    uint64_t x = odd;
    for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
    return x;
  };
  Stream keys(5, 64);
  const uint64_t key[2] = {keys(), keys()};
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    const uint64_t x = random();
    uint64_t y = wide(x);
    for (int round = 1; round >= 0; --round) {
      y ^= y >> 33;
      y *= inverse(0xc4ceb9fe1a85ec53ULL);
      y ^= y >> 33;
      y *= inverse(0xff51afd7ed558ccdULL);
      y ^= y >> 33;
      y ^= key[round];
    }
    CHECK_EQ(y, x);
  }
}

TEST(OpOsrp, BinsAreEvenAndSeedsIndependent) {
  const OpOsrp one(1000, 1, 1), two(1000, 2, 1);
  std::vector<int> counts(1000), signs(1000);
  int meet = 0;
  for (uint64_t key = 0; key < 100000; ++key) {  // consecutive keys, the worst case of a poor permutation
    ++counts[one.bin_of(key)];
    signs[one.bin_of(key)] += one.sign_of(key);
    meet += one.bin_of(key) == two.bin_of(key);
  }
  double chi = 0, sum = 0;
  for (size_t b = 0; b < 1000; ++b) {
    chi += (counts[b] - 100.0) * (counts[b] - 100.0) / 100.0;
    sum += signs[b];
  }
  CHECK(std::abs(chi - 999) < 5 * std::sqrt(2 * 999.0));
  CHECK(std::abs(sum) < 5 * std::sqrt(1e5));
  CHECK(std::abs(meet - 100) < 50);
}

TEST(OpOsrp, EqualsAPlainImplementation) {
  for (uint64_t k : {uint64_t{1}, uint64_t{2}, uint64_t{7}, uint64_t{50}, uint64_t{1000}, OpOsrp::kMaxBins}) {
    for (bool weighted : {false, true}) {
      const OpOsrp hasher(k, 9, 1);
      const Bags bags = random_bags(k, 60, 200, 300, weighted);
      const HashedBags made = slots(hasher, bags), drawn = sketch(hasher, bags);
      size_t at = 0, drawn_at = 0;
      for (size_t b = 0; b < bags.count(); ++b) {
        std::map<uint64_t, std::map<uint64_t, double>> bins;  // bin -> key -> u
        for (auto i = bags.offsets[b]; i < bags.offsets[b + 1]; ++i) {
          bins[hasher.bin_of(bags.ids[i])][bags.ids[i]] += weighted ? bags.weights[i] : 1;
        }
        for (const auto& [bin, entries] : bins) {
          double z = 0;
          for (const auto& [key, u] : entries) z += u * hasher.sign_of(key);
          if (std::abs(z) < 1e-9) {  // weights are multiples of 0.37f: other sums are not near zero
            CHECK(at == static_cast<size_t>(made.offsets[b + 1]) || made.ids[at] / 2 != bin);
            continue;
          }
          CHECK_EQ(made.ids[at++], 2 * bin + (z > 0));
          CHECK_EQ(drawn.ids[drawn_at], bin);
          CHECK(std::abs(drawn.weights[drawn_at++] - z) < 1e-5);
        }
        CHECK_EQ(made.offsets[b + 1], static_cast<int64_t>(at));
        CHECK_EQ(drawn.offsets[b + 1], static_cast<int64_t>(drawn_at));
      }
      CHECK_EQ(made.ids.size(), at);
    }
  }
}

TEST(OpOsrp, DoesNotDependOnOrderOrThreads) {
  std::mt19937_64 random(3);
  for (bool weighted : {false, true}) {
    Bags bags = random_bags(4, 3000, 60, 500, weighted);
    for (float& w : bags.weights) w *= static_cast<float>(random() % 1000) * 1e-3f;  // sums with rounding
    const OpOsrp one(97, 5, 1), three(97, 5, 3);
    const HashedBags expected = slots(one, bags), expected_sketch = sketch(one, bags);
    CHECK(same(slots(three, bags), expected));
    CHECK(same(sketch(three, bags), expected_sketch));
    for (size_t b = 0; b < bags.count(); ++b) {
      for (auto i = bags.offsets[b]; i < bags.offsets[b + 1]; ++i) {
        const auto j = bags.offsets[b] + static_cast<int64_t>(random() % (bags.offsets[b + 1] - bags.offsets[b]));
        std::swap(bags.ids[i], bags.ids[j]);
        if (weighted) std::swap(bags.weights[i], bags.weights[j]);
      }
    }
    CHECK(same(slots(three, bags), expected));
    CHECK(same(sketch(three, bags), expected_sketch));
  }
}

TEST(OpOsrp, NegatedVectorsHaveTheOtherSlots) {
  Bags bags = random_bags(8, 500, 100, 150, true);
  for (size_t i = 0; i < bags.weights.size(); ++i) bags.weights[i] *= 1 + 1e-3f * static_cast<float>(i % 17);
  Bags negated = bags;
  for (float& w : negated.weights) w = -w;
  const OpOsrp hasher(40, 11, 1);
  const HashedBags made = slots(hasher, bags), mirrored = slots(hasher, negated);
  CHECK_EQ(made.ids.size(), mirrored.ids.size());
  for (size_t i = 0; i < made.ids.size(); ++i) CHECK_EQ(made.ids[i] ^ 1, mirrored.ids[i]);
  const auto up = std::count_if(made.ids.data(), made.ids.data() + made.ids.size(), [](uint64_t s) { return s & 1; });
  CHECK(std::abs(static_cast<double>(up) / static_cast<double>(made.ids.size()) - 0.5) < 0.05);
}

TEST(OpOsrp, SketchIsUnbiasedForInnerProducts) {
  const Bags bags = random_bags(21, 2, 80, 60, true);
  std::map<uint64_t, double> u, v;
  for (auto i = bags.offsets[0]; i < bags.offsets[1]; ++i) u[bags.ids[i]] += bags.weights[i];
  for (auto i = bags.offsets[1]; i < bags.offsets[2]; ++i) v[bags.ids[i]] += bags.weights[i];
  double exact = 0;
  for (const auto& [key, weight] : u) exact += v.contains(key) ? weight * v[key] : 0;
  const int seeds = 4000;
  double sum = 0, squares = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    const HashedBags z = sketch(OpOsrp(13, static_cast<uint64_t>(seed), 1), bags);
    std::map<uint64_t, double> first;
    for (auto i = z.offsets[0]; i < z.offsets[1]; ++i) first[z.ids[i]] = z.weights[i];
    double product = 0;
    for (auto i = z.offsets[1]; i < z.offsets[2]; ++i) {
      product += first.contains(z.ids[i]) ? first[z.ids[i]] * z.weights[i] : 0;
    }
    sum += product;
    squares += product * product;
  }
  const double mean = sum / seeds, deviation = std::sqrt((squares / seeds - mean * mean) / seeds);
  CHECK(deviation > 0 && std::abs(mean - exact) < 4.5 * deviation);
}

TEST(OpOsrp, BagsOfAnySize) {
  const OpOsrp hasher(uint64_t{1} << 40, 0, 2);
  const int64_t none[] = {0};
  CHECK_EQ(hasher.slots(nullptr, nullptr, none, 0).offsets.size(), 1u);
  const int64_t empty[] = {0, 0, 0};
  CHECK_EQ(hasher.slots(nullptr, nullptr, empty, 2).offsets[2], 0);
  Bags many = random_bags(2, 40, 3000, 0, false);  // 64-bit keys, many bins: few collisions
  const HashedBags made = slots(hasher, many);
  CHECK_EQ(made.ids.size(), many.ids.size());
  for (size_t b = 0; b < many.count(); ++b) {
    for (auto i = made.offsets[b] + 1; i < made.offsets[b + 1]; ++i) CHECK(made.ids[i - 1] < made.ids[i]);
  }
  Bags one_key = many;  // one repeated key: a vector with one large entry
  std::fill(one_key.ids.begin(), one_key.ids.end(), 7);
  const HashedBags single = sketch(hasher, one_key);
  for (size_t b = 0; b < many.count(); ++b) {
    const int64_t n = many.offsets[b + 1] - many.offsets[b];
    CHECK_EQ(single.offsets[b + 1] - single.offsets[b], n ? 1 : 0);
    if (n) CHECK_EQ(single.weights[single.offsets[b]], static_cast<float>(n * hasher.sign_of(7)));
  }
}

TEST(OpOsrp, ResultsNeverChange) {
  // Golden values: a change would make trained tables unusable with new batches.
  const HashedBags made = slots(OpOsrp(1000003, 42, 1), random_bags(6, 100, 100, 0, true));
  CHECK_EQ(xxh64(made.ids.data(), made.ids.size() * 8, xxh64(made.offsets.data(), made.offsets.size() * 8, 0)),
           12268413927330883018ULL);
}

TEST(OpOsrp, InvalidArgumentsThrow) {
  CHECK_THROWS(Error, OpOsrp(0, 1, 1));
  CHECK_THROWS(Error, OpOsrp(OpOsrp::kMaxBins + 1, 1, 1));
  const OpOsrp hasher(10, 1, 1);
  const uint64_t ids[] = {1, 2};
  const int64_t offsets[] = {0, 2};
  const float weights[] = {1, NAN}, large[] = {3e38f, 3e38f};
  CHECK_THROWS(Error, hasher.slots(ids, weights, offsets, 1));
  const uint64_t twice[] = {1, 1};
  CHECK_THROWS(Error, hasher.sketch(twice, large, offsets, 1));
}

}  // namespace
}  // namespace thermocline
