// Quantized rows: every instruction set and number of threads must have the same bytes, and training must equal decode,
// train, encode. Python tests compare the bytes with embedding/reference_codec.py (tests/embedding).
#include "dram/codec.h"

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "dram/kernels.h"
#include "testing/all_kernels.h"
#include "testing/test.h"

namespace thermocline {
namespace {

constexpr uint32_t kRows = 300;  // more than are decoded at once

std::vector<Precision> all_precisions() {
  std::vector<Precision> all;
  for (bool stochastic : {false, true}) {
    for (WeightKind kind : {WeightKind::kFp16, WeightKind::kBf16}) all.push_back({kind, 16, stochastic, false, 0});
    for (uint8_t bits : {2, 3, 4, 5, 6, 7, 8, 16}) {
      all.push_back({WeightKind::kInt, bits, stochastic, true, 0});
      all.push_back({WeightKind::kInt, bits, stochastic, false, 1.7f / static_cast<float>(1 << bits)});
    }
  }
  return all;
}

struct Setup {
  Codec codec;
  std::vector<float> floats;
  std::vector<uint64_t> keys, streams;
  std::vector<uint32_t> slots;
  std::vector<uint8_t> stored;

  Setup(uint32_t dim, const Precision& precision, Optimizer optimizer)
      : codec{{dim, optimizer, precision}, table_mix(1, 2)}, keys(kRows), slots(kRows) {
    std::mt19937_64 random(dim);
    std::iota(slots.begin(), slots.end(), 0);
    for (uint32_t r = 0; r < kRows; ++r) {
      keys[r] = random();
      streams.push_back(codec.stream(keys[r], 5));
      const float size = std::ldexp(1.0f, static_cast<int>(random() % 40) - 30);
      for (size_t i = 0; i < codec.layout.floats(); ++i) {
        const float x = static_cast<float>(static_cast<int64_t>(random() % 20001) - 10000) * 1e-4f * size;
        floats.push_back(i < dim ? x : std::abs(x));
      }
    }
    stored.resize(kRows * codec.layout.bytes(), 0xee);
  }
  Rows rows(std::vector<uint8_t>& bytes) const {
    return {
        bytes.data(),    codec.layout.bytes(), codec.layout.dim, &codec, reinterpret_cast<const uint8_t*>(keys.data()),
        sizeof(uint64_t)};
  }
  std::vector<uint8_t> encoded(const Kernels& k, const std::vector<float>& from, bool by_chance) const {
    std::vector<uint8_t> bytes(kRows * codec.layout.bytes(), 0xee);  // every byte must be written
    std::vector<int32_t> codes(codec.layout.dim);
    k.encode(codec, rows(bytes), slots.data(), kRows, by_chance ? streams.data() : nullptr, from.data(),
             codec.layout.floats(), codes.data(), nullptr);
    return bytes;
  }
  std::vector<float> decoded(const Kernels& k, std::vector<uint8_t>& from) const {
    std::vector<float> out(kRows * codec.layout.floats());
    k.decode(codec, rows(from), slots.data(), kRows, kRows, true, out.data(), codec.layout.floats());
    return out;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(Codec, EveryInstructionSetHasTheSameBytes) {
  for (const Precision& precision : all_precisions()) {
    for (uint32_t dim : {1, 3, 7, 8, 9, 16, 17, 33, 64, 100}) {
      const Setup s(dim, precision, Optimizer::kRowWiseAdagrad);
      std::vector<uint8_t> want = s.encoded(kKernelsBase, s.floats, precision.stochastic);
      const std::vector<float> floats = s.decoded(kKernelsBase, want);
      for (const Kernels* k : all_kernels()) {
        CHECK(s.encoded(*k, s.floats, precision.stochastic) == want);
        CHECK(same(s.decoded(*k, want), floats));
      }
      // Encoding a decoded row returns the same codes.
      CHECK(s.encoded(kKernelsBase, floats, false) == want || precision.row_scaled);
      for (int threads : {1, 3}) {
        ThreadPool pool(threads);
        std::vector<float> got(floats.size());
        decode_rows(pool, s.codec, want.data(), kRows, got.data());
        CHECK(same(got, floats));
        std::vector<uint8_t> bytes(want.size(), 0xee);
        encode_rows(pool, s.codec, s.floats.data(), kRows, bytes.data());
        CHECK(bytes == s.encoded(kKernelsBase, s.floats, false));
      }
    }
  }
}

// Segments of 1 to 5 occurrences, and one hot key.
struct Gradients {
  std::vector<uint32_t> starts{0}, rows;
  std::vector<float> grads;
  explicit Gradients(uint32_t dim) {
    for (uint32_t u = 0; u < kRows; ++u) {
      const uint32_t n = u == 130 ? 64 * 64 + 7 : u % 5 + 1;
      for (uint32_t j = 0; j < n; ++j) rows.push_back((static_cast<uint32_t>(rows.size()) * 31) % 97);
      starts.push_back(starts.back() + n);
    }
    std::mt19937_64 random(3);
    for (uint32_t i = 0; i < 97 * dim; ++i) grads.push_back(static_cast<float>(random() % 2001) * 1e-3f - 1.0f);
  }
  SegmentArgs segments() const { return {starts.data(), kRows, rows.data(), nullptr, grads.data()}; }
};

TEST(Codec, TrainingEqualsDecodeTrainEncode) {
  for (const Precision& precision : all_precisions()) {
    for (Optimizer optimizer :
         {Optimizer::kSgd, Optimizer::kRowWiseAdagrad, Optimizer::kAdam, Optimizer::kPartialRowWiseAdam}) {
      const uint32_t dim = precision.bits % 2 ? 9 : 8;
      const Setup s(dim, precision, optimizer);
      const Gradients g(dim);
      const Step step = make_step({optimizer, 0.05, 1e-8, 0.01, 0.9, 0.999}, 5, 0.5);
      std::vector<uint8_t> start = s.encoded(kKernelsBase, s.floats, false);

      std::vector<float> trained = s.decoded(kKernelsBase, start);
      ThreadPool one(1);
      const Rows plain{reinterpret_cast<uint8_t*>(trained.data()), s.codec.layout.floats() * sizeof(float), dim};
      std::vector<float> pooled(100 * dim), sums(kRows * dim);
      std::vector<int64_t> offsets(101);
      for (int64_t b = 0; b <= 100; ++b) offsets[b] = b < 50 ? b : b < 60 ? 50 : b == 60 ? 250 : 210 + b - 20;
      offsets[100] = kRows;
      const PoolArgs args{plain, s.slots.data(), kRows, offsets.data(), 100, nullptr, true, pooled.data()};
      pool_rows(one, args);
      sum_gradients(one, dim, g.segments(), sums.data());
      update_rows(one, plain, s.slots.data(), g.segments(), step);
      const std::vector<uint8_t> want = s.encoded(kKernelsBase, trained, precision.stochastic);

      for (int threads : {1, 3}) {
        ThreadPool pool(threads);
        std::vector<uint8_t> bytes = start;
        std::vector<float> out(pooled.size());
        PoolArgs coded = args;
        coded.rows = s.rows(bytes);
        coded.out = out.data();
        pool_rows(pool, coded);
        CHECK(same(out, pooled));
        update_rows(pool, s.rows(bytes), s.slots.data(), g.segments(), step);
        CHECK(bytes == want);
        bytes = start;
        apply_gradients(pool, s.rows(bytes), s.slots.data(), kRows, sums.data(), step);
        CHECK(bytes == want);
      }
    }
  }
}

}  // namespace
}  // namespace thermocline
