// Synthetic ads: examples with any number of keys, labelled by a planted model (teacher.h). Example i depends only on
// the configuration and i: any batch can be generated at any time, with any number of threads, with the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "data/stream.h"
#include "data/teacher.h"
#include "data/zipf.h"
#include "util/recycled.h"
#include "util/thread_pool.h"

namespace thermocline {

struct SynthField {
  uint64_t keys = 0;
  double exponent = 1.05;
};

struct SynthOptions {
  uint64_t seed = 0;
  std::vector<SynthField> fields;     // at most 2^63 keys in total
  uint64_t min_ids = 0, max_ids = 0;  // per example, divided evenly among the fields; distinct within a field
  size_t dense = 0;
  double base_rate = 0.2;  // of label 1
  double signal = 2.5;     // standard deviation of the logits
  double label_noise = 0;  // share of labels that are independent of their example
  int threads = 1;
};

struct SynthBatch {
  size_t examples = 0, ids = 0;
  Recycled<uint64_t> keys;
  Recycled<int64_t> offsets;  // examples * fields + 1
  Recycled<float> dense;      // examples x dense
  Recycled<float> labels;     // 0 or 1
  Recycled<float> logits;     // of the teacher, before label noise
};

// Thread safety: all calls may run concurrently.
class Synth {
 public:
  explicit Synth(SynthOptions options);

  // Generates examples first .. first + examples - 1. The last quarter of the 64-bit numbers is used for calibration.
  SynthBatch generate(uint64_t first, size_t examples) const;

  // Key of a rank of a field. A bijection over the ranks of all fields; independent of the seed.
  uint64_t key_of(size_t field, uint64_t rank) const { return key_at(first_key_[field] + rank); }
  // Key by number: numbers count the ranks of all fields, one field after the other.
  static uint64_t key_at(uint64_t number) { return mix64(number ^ kKeySalt); }

  size_t fields() const { return options_.fields.size(); }
  size_t dense() const { return options_.dense; }

 private:
  static constexpr uint64_t kKeySalt = 0x5ca1ab1e0ddba11dULL;
  static constexpr size_t kChunk = 128;  // examples per task

  uint64_t ids_of(Stream& bits) const { return options_.min_ids + bits.below(options_.max_ids - options_.min_ids + 1); }
  void draw_bag(size_t field, size_t count, Stream& bits, uint64_t* out) const;
  Signals draw_example(uint64_t ids, uint64_t* keys, int64_t* offsets, float* dense, Stream& bits) const;
  void calibrate();
  // Allocates a batch and sets the first offset of every example.
  SynthBatch lay_out(uint64_t first, size_t examples) const;
  // Fills keys, offsets and dense features, then calls use(example within the batch, its stream, its signals).
  template <typename Use>
  void draw_all(uint64_t first, SynthBatch& batch, const Use& use) const;

  // Constant after construction:
  SynthOptions options_;
  std::vector<Zipf> zipf_;
  std::vector<uint64_t> first_key_;
  Teacher teacher_;
  mutable ThreadPool pool_;
};

}  // namespace thermocline
