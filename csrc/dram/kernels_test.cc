// Every instruction set and number of threads must have the same bits as the plain loops here. Python tests compare the
// kernels with embedding/reference.py (tests/embedding).
#include "dram/kernels.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "dram/initial.h"
#include "testing/all_kernels.h"
#include "testing/test.h"

namespace thermocline {
namespace {

std::vector<float> random_floats(size_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> x(n);
  for (float& v : x) v = static_cast<float>(static_cast<int64_t>(random() % 20001) - 10000) * 1.37e-4f;
  return x;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Keys with 1, 2, 63, 64, 65, 128, 129 and (hot) 64 * 64 + 1 occurrences.
struct Batch {
  std::vector<uint32_t> starts{0}, grad_rows, slots;
  std::vector<float> grads, coefs;
  uint32_t rows = 0;
  explicit Batch(uint32_t dim, bool hot) {
    for (uint32_t n : {1, 2, 63, 64, 65, 128, 129, 1, 1, 3}) add(n);
    if (hot) add(64 * 64 + 1);
    for (uint32_t n : {5, 1}) add(n);
    rows = 32;
    grads = random_floats(size_t{997} * dim, 5);
    coefs = random_floats(grad_rows.size(), 6);
  }
  void add(uint32_t n) {
    for (uint32_t j = 0; j < n; ++j) grad_rows.push_back(static_cast<uint32_t>((grad_rows.size() * 31) % 997));
    starts.push_back(starts.back() + n);
    slots.push_back(static_cast<uint32_t>(slots.size() * 5 % 11 + (slots.size() >= 11 ? 11 : 0)));
  }
  SegmentArgs segments(bool weighted) const {
    return {starts.data(), slots.size(), grad_rows.data(), weighted ? coefs.data() : nullptr, grads.data()};
  }
};

std::vector<float> plain_sum(const Batch& b, uint32_t dim, size_t u, bool weighted) {
  std::vector<float> total(dim);
  for (size_t lo = b.starts[u]; lo < b.starts[u + 1]; lo += kBlock) {
    std::vector<float> block(dim);
    for (size_t j = lo; j < std::min<size_t>(lo + kBlock, b.starts[u + 1]); ++j) {
      for (uint32_t i = 0; i < dim; ++i) {
        float g = b.grads[size_t{b.grad_rows[j]} * dim + i];
        if (weighted) g = g * b.coefs[j];
        block[i] = j == lo ? g : block[i] + g;
      }
    }
    for (uint32_t i = 0; i < dim; ++i) total[i] = lo == b.starts[u] ? block[i] : total[i] + block[i];
  }
  return total;
}

const std::vector<uint32_t> kDims{1, 3, 4, 7, 8, 10, 15, 16, 17, 32, 33, 64, 100, 128, 200};
const std::vector<Optimizer> kOptimizers{Optimizer::kSgd, Optimizer::kAdagrad, Optimizer::kRowWiseAdagrad,
                                         Optimizer::kAdam, Optimizer::kPartialRowWiseAdam};

TEST(Kernels, SumsKeepTheOrderOnEveryInstructionSet) {
  for (uint32_t dim : kDims) {
    const Batch b(dim, false);
    for (bool weighted : {false, true}) {
      std::vector<float> want, scratch(2 * dim);
      for (size_t u = 0; u < b.slots.size(); ++u) {
        for (float x : plain_sum(b, dim, u, weighted)) want.push_back(x);
      }
      for (const Kernels* k : all_kernels()) {
        std::vector<float> got(want.size());
        k->sum(dim, b.segments(weighted), 0, b.slots.size(), 1 << 20, got.data(), scratch.data());
        CHECK(same_bits(got, want));
      }
      for (int threads : {1, 3}) {
        ThreadPool pool(threads);
        std::vector<float> got(want.size());
        sum_gradients(pool, dim, b.segments(weighted), got.data());
        CHECK(same_bits(got, want));
      }
    }
  }
}

// A fused update equals sum and apply, on every instruction set, with hot keys and threads.
TEST(Kernels, UpdatesHaveTheSameBitsEverywhere) {
  for (uint32_t dim : kDims) {
    for (Optimizer optimizer : kOptimizers) {
      const Batch b(dim, true);
      const RowLayout layout{dim, optimizer};
      std::vector<float> start = random_floats(b.rows * layout.floats(), 9);
      for (float& x : start) x = std::abs(x);  // states are sums of squares
      const Step step = make_step({optimizer, 0.05, 1e-8, dim % 2 ? 0.01 : 0.0, 0.9, 0.999}, 7, dim % 3 ? 1.0 : 0.5);
      const SegmentArgs s = b.segments(dim % 2);
      std::vector<float> scratch(2 * dim), sums(b.slots.size() * dim), want;
      const auto rows_of = [&](std::vector<float>& x) {
        return Rows{reinterpret_cast<uint8_t*>(x.data()), layout.bytes(), dim};
      };
      kKernelsBase.sum(dim, s, 0, b.slots.size(), 1 << 20, sums.data(), scratch.data());
      want = start;
      kKernelsBase.apply(rows_of(want), b.slots.data(), sums.data(), step, 0, b.slots.size(), scratch.data());
      CHECK(!same_bits(want, start));
      for (const Kernels* k : all_kernels()) {
        auto got = start;
        k->apply(rows_of(got), b.slots.data(), sums.data(), step, 0, b.slots.size(), scratch.data());
        CHECK(same_bits(got, want));
        got = start;
        k->update(rows_of(got), b.slots.data(), s, step, 0, b.slots.size(), 1 << 20, scratch.data());
        CHECK(same_bits(got, want));
      }
      for (int threads : {1, 2, 4}) {
        ThreadPool pool(threads);
        auto got = start;
        update_rows(pool, rows_of(got), b.slots.data(), s, step);
        CHECK(same_bits(got, want));
        got = start;
        std::vector<float> parallel_sums(sums.size());
        sum_gradients(pool, dim, s, parallel_sums.data());
        CHECK(same_bits(parallel_sums, sums));
        apply_gradients(pool, rows_of(got), b.slots.data(), b.slots.size(), sums.data(), step);
        CHECK(same_bits(got, want));
      }
    }
  }
}

// A row is caught up by the steps it missed, applied with gradient 0: at most the last `limit`, older ones not at all.
TEST(Kernels, CatchingUpAppliesTheMissedSteps) {
  constexpr uint32_t kRows = 40, kTarget = 30, kLimit = 12;
  for (uint32_t dim : {1u, 3u, 8u, 16u, 33u, 128u}) {
    for (Optimizer optimizer : kOptimizers) {
      const RowLayout layout{dim, optimizer, {}, true};
      const size_t last_word = layout.floats() - 1;
      std::vector<float> start = random_floats(kRows * layout.floats(), 9), rates(kLimit), biases(kLimit);
      for (float& x : start) x = std::abs(x);  // states are sums of squares
      for (uint32_t r = 0; r < kRows; ++r) {   // as of steps 0 to 39: some newer than the target
        std::memcpy(&start[r * layout.floats() + last_word], &r, sizeof(r));
      }
      const auto step_of = [&](uint32_t n) { return make_step({optimizer, 0.01 * n, 1e-8, 0.02, 0.9, 0.999}, n, 1.0); };
      for (uint32_t n = kTarget - kLimit + 1; n <= kTarget; ++n) {
        const Step step = step_of(n);
        rates[n % kLimit] = has_moments(optimizer) ? step.step_size : step.lr;
        biases[n % kLimit] = step.sqrt_bias2;
      }
      const auto rows_of = [&](std::vector<float>& x) {
        return Rows{reinterpret_cast<uint8_t*>(x.data()), layout.bytes(), dim};
      };
      std::vector<float> want = start, scratch(2 * dim), zeros(dim);
      for (uint32_t r = 0; r < kTarget; ++r) {
        for (uint32_t n = std::max(r, kTarget - kLimit) + 1; n <= kTarget; ++n) {
          kKernelsBase.apply(rows_of(want), &r, zeros.data(), step_of(n), 0, 1, scratch.data());
        }
        std::memcpy(&want[r * layout.floats() + last_word], &kTarget, sizeof(kTarget));
      }
      CHECK(!same_bits(want, start));
      MissedSteps missed{step_of(1), rates.data(), biases.data(), kLimit, kTarget, kTarget};
      std::vector<uint32_t> slots(kRows);
      for (uint32_t i = 0; i < kRows; ++i) slots[i] = i * 7 % kRows;
      for (const Kernels* k : all_kernels()) {
        auto got = start;
        k->catch_up(rows_of(got), slots.data(), missed, 0, kRows, scratch.data());
        CHECK(same_bits(got, want));
      }
      ThreadPool pool(3);
      auto got = start;
      catch_up_rows(pool, rows_of(got), nullptr, kRows, missed);
      CHECK(same_bits(got, want));
      // Before step 31: the same rows, stamped with it.
      missed.stamp = kTarget + 1;
      for (uint32_t r = 0; r <= kTarget; ++r) {
        std::memcpy(&want[r * layout.floats() + last_word], &missed.stamp, sizeof(missed.stamp));
      }
      got = start;
      catch_up_rows(pool, rows_of(got), slots.data(), kRows, missed);
      CHECK(same_bits(got, want));
    }
  }
}

TEST(InitialRows, AreAsOfStepZero) {
  const RowLayout layout{4, Optimizer::kAdagrad, {}, true};
  std::vector<float> row(9, 7.0f);
  InitialRows(Initial{InitialKind::kUniform, 1.0f, 0.25f, 1, 2}, layout).write(3, row.data());
  CHECK_EQ(row[7], 0.25f);
  CHECK_EQ(row[8], 0.0f);
}

TEST(Kernels, PoolingHasTheSameBitsEverywhere) {
  for (uint32_t dim : kDims) {
    std::vector<float> table = random_floats(size_t{500} * (dim + 1), 4);  // rows of dim + 1: unaligned
    std::vector<uint32_t> slots;
    std::vector<int64_t> offsets{0};
    for (int64_t n : {0, 1, 2, 0, 0, 30, 5, 1, 0}) {
      for (int64_t i = 0; i < n; ++i) slots.push_back(static_cast<uint32_t>(slots.size() * 77 % 500));
      offsets.push_back(offsets.back() + n);
    }
    const auto weights = random_floats(slots.size(), 8);
    for (int mode = 0; mode < 6; ++mode) {
      const bool none = mode >= 4, weighted = mode % 2, mean = mode / 2 == 1;
      const size_t bags = none ? slots.size() : offsets.size() - 1;
      PoolArgs a{{reinterpret_cast<uint8_t*>(table.data()), (dim + 1) * sizeof(float), dim},
                 slots.data(),
                 slots.size(),
                 none ? nullptr : offsets.data(),
                 bags,
                 weighted ? weights.data() : nullptr,
                 mean,
                 nullptr};
      std::vector<float> want(bags * dim), scratch(2 * dim);
      for (size_t b = 0; b < bags; ++b) {
        const size_t lo = none ? b : offsets[b], hi = none ? b + 1 : offsets[b + 1];
        for (uint32_t i = 0; i < dim; ++i) {
          float sum = 0;
          for (size_t p = lo; p < hi; ++p) {
            float x = table[size_t{slots[p]} * (dim + 1) + i];
            if (weighted) x = x * weights[p];
            sum = p == lo ? x : sum + x;
          }
          if (mean && hi > lo) sum = sum / static_cast<float>(hi - lo);
          want[b * dim + i] = sum;
        }
      }
      for (const Kernels* k : all_kernels()) {
        std::vector<float> got(want.size(), NAN);
        a.out = got.data();
        k->pool(a, 0, bags, scratch.data());
        CHECK(same_bits(got, want));
      }
      ThreadPool pool(3);
      std::vector<float> got(want.size(), NAN);
      a.out = got.data();
      pool_rows(pool, a);
      CHECK(same_bits(got, want));
    }
  }
}

TEST(InitialRows, DependOnSeedTableKeyAndElement) {
  const RowLayout layout{16, Optimizer::kAdagrad};
  std::vector<float> a(32), b(32);
  for (InitialKind kind : {InitialKind::kUniform, InitialKind::kNormal}) {
    InitialRows(Initial{kind, 1.0f, 0.25f, 1, 2}, layout).write(3, a.data());
    for (Initial other : {Initial{kind, 1.0f, 0.25f, 2, 2}, Initial{kind, 1.0f, 0.25f, 1, 3}}) {
      InitialRows(other, layout).write(3, b.data());
      CHECK(a[0] != b[0]);
      CHECK_EQ(b[16], 0.25f);
    }
    InitialRows(Initial{kind, 1.0f, 0.25f, 1, 2}, layout).write(4, b.data());
    CHECK(a[0] != b[0]);
    CHECK(a[0] != a[1]);
  }
}

TEST(InitialRows, HaveTheWeightsOfTheirPart) {
  const RowLayout layout{4, Optimizer::kAdagrad};
  const Initial whole{InitialKind::kUniform, 1.0f, 0.25f, 1, 2};
  Initial parts = whole;
  parts.parts = {{0xffff, InitialKind::kUniform, 0.5f}, {7, InitialKind::kConstant, 3.0f}};
  const InitialRows rows(parts, layout);
  std::vector<float> row(layout.floats()), other(layout.floats());
  for (const uint64_t key : {uint64_t{5}, ~uint64_t{5}, uint64_t{7} << 48 | 5}) {
    rows.write(key, row.data());
    InitialRows(whole, layout).write(key, other.data());
    for (uint32_t i = 0; i < 4; ++i) {
      CHECK_EQ(row[i], key >> 48 == 0xffff ? other[i] / 2 : key >> 48 == 7 ? 3.0f : other[i]);
    }
    CHECK_EQ(row[4], 0.25f);
  }
}

TEST(InitialRows, HaveTheRequestedDeviation) {
  const RowLayout layout{64, Optimizer::kSgd};
  std::vector<float> row(64);
  for (auto [kind, deviation, most] :
       {std::tuple{InitialKind::kUniform, 0.2 / std::sqrt(3.0), 0.2}, std::tuple{InitialKind::kNormal, 0.2, 1.2}}) {
    InitialRows rows(Initial{kind, 0.2f, 0, 1, 2}, layout);
    double sum = 0, squares = 0, largest = 0;
    for (uint64_t key = 0; key < 2000; ++key) {
      rows.write(key, row.data());
      for (float x : row) {
        sum += x;
        squares += double{x} * x;
        largest = std::max(largest, std::abs(double{x}));
      }
    }
    const double n = 2000 * 64;
    CHECK(std::abs(sum / n) < 4 * deviation / std::sqrt(n));
    CHECK(std::abs(std::sqrt(squares / n) / deviation - 1) < 0.01);
    CHECK(largest <= most * 1.0001);
  }
}

}  // namespace
}  // namespace thermocline
