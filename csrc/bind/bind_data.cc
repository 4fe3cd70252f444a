// Python bindings of synthetic data; src/thermocline/data/synthetic.py is the Python class.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/to_numpy.h"
#include "data/synth.h"
#include "data/text.h"
#include "util/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

void init_synth(Synth* self, uint64_t seed, const std::vector<uint64_t>& keys, const std::vector<double>& exponents,
                uint64_t min_ids, uint64_t max_ids, size_t dense, double base_rate, double signal, double label_noise,
                int threads) {
  if (keys.size() != exponents.size()) throw Error("synthetic ads: keys and exponents differ in length");
  SynthOptions o;
  o.seed = seed;
  for (size_t f = 0; f < keys.size(); ++f) o.fields.push_back({keys[f], exponents[f]});
  o.min_ids = min_ids;
  o.max_ids = max_ids;
  o.dense = dense;
  o.base_rate = base_rate;
  o.signal = signal;
  o.label_noise = label_noise;
  o.threads = threads;
  nb::gil_scoped_release release;
  new (self) Synth(std::move(o));
}

auto generate(const Synth& self, uint64_t first, size_t examples) {
  SynthBatch b;
  {
    nb::gil_scoped_release release;
    b = self.generate(first, examples);
  }
  return std::make_tuple(to_numpy(std::move(b.keys), b.ids),
                         to_numpy(std::move(b.offsets), examples * self.fields() + 1),
                         to_numpy(std::move(b.dense), examples * self.dense()), to_numpy(std::move(b.labels), examples),
                         to_numpy(std::move(b.logits), examples));
}

uint64_t key_of(const Synth& self, size_t field, uint64_t rank) {
  if (field >= self.fields()) throw Error("synthetic ads: no field " + std::to_string(field));
  return self.key_of(field, rank);
}

auto keys(const Synth&, uint64_t first, size_t count) {
  Recycled<uint64_t> made(count);
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < count; ++i) made[i] = Synth::key_at(first + i);
  }
  return to_numpy(std::move(made), count);
}

nb::bytes text(KeysArg ids, Array<int64_t> offsets, size_t fields, Array<float> labels, bool with_fields) {
  const size_t examples = labels.size();
  // The Batch has checked its offsets against its ids.
  if (offsets.size() != examples * fields + 1 || static_cast<size_t>(offsets.data()[examples * fields]) != ids.size()) {
    throw Error("to_text: offsets do not match the ids and labels");
  }
  std::string lines;
  {
    nb::gil_scoped_release release;
    lines = to_text(ids.data(), offsets.data(), examples, fields, labels.data(), with_fields);
  }
  return nb::bytes(lines.data(), lines.size());
}

}  // namespace

void bind_data(nb::module_& m) {
  nb::class_<Synth>(m, "Synth")
      .def("__init__", &init_synth, "seed"_a, "keys"_a, "exponents"_a, "min_ids"_a, "max_ids"_a, "dense"_a,
           "base_rate"_a, "signal"_a, "label_noise"_a, "threads"_a)
      .def("generate", &generate, "first"_a, "examples"_a)
      .def("key_of", &key_of, "field"_a, "rank"_a)
      .def("keys", &keys, "first"_a, "count"_a);
  m.def("to_text", &text, "ids"_a, "offsets"_a, "fields"_a, "labels"_a, "with_fields"_a);
}

}  // namespace thermocline
