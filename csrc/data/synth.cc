#include "data/synth.h"

#include <algorithm>
#include <string>
#include <utility>

#include "util/error.h"

namespace thermocline {
namespace {

constexpr uint64_t kCalibrationFirst = uint64_t{3} << 62;
constexpr int kDrawsPerId = 16;  // then the most popular key that the bag does not have is taken

size_t largest_bag(const SynthOptions& o) {
  return o.fields.empty() ? 0 : static_cast<size_t>((o.max_ids + o.fields.size() - 1) / o.fields.size());
}

SynthOptions checked(SynthOptions o) {
  const auto fail = [](const std::string& rule) { throw Error("synthetic ads: " + rule); };
  if (o.fields.empty() || o.fields.size() > 65536) fail("the number of fields must be 1 to 65536");
  if (o.min_ids < 1 || o.min_ids > o.max_ids || o.max_ids > (1u << 24))
    fail("min_ids and max_ids must be 1 to 2^24, with min_ids <= max_ids");
  if (!(o.base_rate > 0 && o.base_rate < 1)) fail("base_rate must be between 0 and 1");
  if (!(o.signal >= 0 && o.signal <= 20)) fail("signal must be from 0 to 20");
  if (!(o.label_noise >= 0 && o.label_noise <= 1)) fail("label_noise must be from 0 to 1");
  uint64_t total = 0;
  for (size_t f = 0; f < o.fields.size(); ++f) {
    if (o.fields[f].keys < largest_bag(o)) {
      fail("field " + std::to_string(f) + " has " + std::to_string(o.fields[f].keys) +
           " keys, but an example can have " + std::to_string(largest_bag(o)) +
           " different ones of it: more keys, more fields or fewer ids are needed");
    }
    if (o.fields[f].keys > Zipf::kMaxRanks - total) fail("the fields have more than 2^63 keys in total");
    total += o.fields[f].keys;
  }
  return o;
}

}  // namespace

Synth::Synth(SynthOptions options)
    : options_(checked(std::move(options))),
      teacher_(options_.seed, options_.fields.size(), options_.dense, largest_bag(options_)),
      pool_(options_.threads) {
  uint64_t first = 0;
  for (const SynthField& field : options_.fields) {
    zipf_.emplace_back(field.keys, field.exponent);
    first_key_.push_back(first);
    first += field.keys;
  }
  calibrate();
}

void Synth::draw_bag(size_t field, size_t count, Stream& bits, uint64_t* out) const {
  for (size_t i = 0; i < count; ++i) {
    const auto is_new = [&](uint64_t key) {  // no early exit: bags are short, and a mispredicted branch costs more
      bool seen = false;
      for (size_t j = 0; j < i; ++j) seen |= out[j] == key;
      return !seen;
    };
    uint64_t key = key_of(field, zipf_[field](bits));
    for (int draw = 1; draw < kDrawsPerId && !is_new(key); ++draw) key = key_of(field, zipf_[field](bits));
    for (uint64_t rank = 0; !is_new(key); ++rank) key = key_of(field, rank);
    out[i] = key;
  }
}

// `bits` is positioned after the draw of the number of ids. offsets[0] is set; the result for offsets[fields] must
// equal the layout.
Signals Synth::draw_example(uint64_t ids, uint64_t* keys, int64_t* offsets, float* dense, Stream& bits) const {
  const size_t fields = options_.fields.size();
  // Field f gets the number of integers in (f, f + 1] * ids / fields + start: even shares with the sum `ids`.
  const uint64_t start = bits.below(fields);
  const int64_t first = offsets[0];
  for (size_t f = 0; f < fields; ++f) {
    const int64_t end = first + static_cast<int64_t>((ids * (f + 1) + start) / fields);
    draw_bag(f, static_cast<size_t>(end - offsets[f]), bits, keys + offsets[f]);
    offsets[f + 1] = end;
  }
  for (size_t d = 0; d < options_.dense; ++d) dense[d] = bits.normal();
  return teacher_.signals(keys, offsets, dense);
}

SynthBatch Synth::lay_out(uint64_t first, size_t examples) const {
  const size_t fields = options_.fields.size();
  SynthBatch batch;
  batch.examples = examples;
  batch.offsets = Recycled<int64_t>(examples * fields + 1);
  for (size_t e = 0; e < examples; ++e) {
    Stream bits(options_.seed, first + e);
    batch.offsets[e * fields] = static_cast<int64_t>(batch.ids);
    batch.ids += ids_of(bits);
  }
  batch.offsets[examples * fields] = static_cast<int64_t>(batch.ids);
  batch.keys = Recycled<uint64_t>(batch.ids);
  batch.dense = Recycled<float>(examples * options_.dense);
  return batch;
}

template <typename Use>
void Synth::draw_all(uint64_t first, SynthBatch& batch, const Use& use) const {
  const size_t fields = options_.fields.size();
  pool_.parallel((batch.examples + kChunk - 1) / kChunk, [&](size_t chunk) {
    std::vector<int64_t> offsets(fields + 1);
    for (size_t e = chunk * kChunk; e < std::min(batch.examples, (chunk + 1) * kChunk); ++e) {
      Stream bits(options_.seed, first + e);
      const uint64_t ids = ids_of(bits);
      // Through a copy: the last offset of an example is the first of the next, which another thread may write.
      offsets[0] = batch.offsets[e * fields];
      const Signals signals =
          draw_example(ids, batch.keys.get(), offsets.data(), batch.dense.get() + e * options_.dense, bits);
      std::copy_n(offsets.data() + 1, fields - 1, batch.offsets.get() + e * fields + 1);
      use(e, bits, signals);
    }
  });
}

void Synth::calibrate() {
  constexpr uint64_t kIds = uint64_t{1} << 22;
  const size_t examples = std::clamp<uint64_t>(kIds / options_.max_ids, 4096, 16384);
  SynthBatch batch = lay_out(kCalibrationFirst, examples);
  std::vector<Signals> sample(examples);
  draw_all(kCalibrationFirst, batch, [&](size_t e, Stream&, const Signals& signals) { sample[e] = signals; });
  teacher_.calibrate(sample, options_.base_rate, options_.signal);
}

SynthBatch Synth::generate(uint64_t first, size_t examples) const {
  if (first >= kCalibrationFirst || examples > kCalibrationFirst - first) {
    throw Error("synthetic ads: example " + std::to_string(first) + " + " + std::to_string(examples) +
                " is beyond the last one");
  }
  SynthBatch batch = lay_out(first, examples);
  batch.labels = Recycled<float>(examples);
  batch.logits = Recycled<float>(examples);
  draw_all(first, batch, [&](size_t e, Stream& bits, const Signals& signals) {
    const double logit = teacher_.logit(signals);
    const double rate = bits.uniform() < options_.label_noise ? options_.base_rate : probability(logit);
    batch.labels[e] = bits.uniform() < rate ? 1.0f : 0.0f;
    batch.logits[e] = static_cast<float>(logit);
  });
  return batch;
}

}  // namespace thermocline
