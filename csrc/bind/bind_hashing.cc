// Python bindings of feature hashing; src/thermocline/data/feature_hashing.py is the Python class.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>
#include <utility>

#include "bind/bind.h"
#include "bind/to_numpy.h"
#include "data/op_osrp.h"
#include "util/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

using WeightsArg = std::optional<Array<float>>;
using Call = HashedBags (OpOsrp::*)(const uint64_t*, const float*, const int64_t*, size_t) const;

HashedBags hash(const OpOsrp& self, Call call, const KeysArg& ids, const WeightsArg& weights,
                const Array<int64_t>& offsets) {
  // Python has checked the CSR arrays; memory safety is checked again.
  const size_t bags = offsets.size() - 1;
  if (offsets.size() == 0 || offsets.data()[0] != 0 || static_cast<size_t>(offsets.data()[bags]) != ids.size() ||
      (weights && weights->size() != ids.size())) {
    throw Error("hashing: offsets or weights do not match the ids");
  }
  const uint64_t* const keys = ids.data();
  const float* const factors = weights ? weights->data() : nullptr;
  const int64_t* const cuts = offsets.data();
  nb::gil_scoped_release release;
  for (size_t b = 0; b < bags; ++b) {
    if (cuts[b] > cuts[b + 1]) throw Error("hashing: offsets decrease");
  }
  return (self.*call)(keys, factors, cuts, bags);
}

auto slots(const OpOsrp& self, KeysArg ids, WeightsArg weights, Array<int64_t> offsets) {
  HashedBags made = hash(self, &OpOsrp::slots, ids, weights, offsets);
  return std::make_tuple(to_numpy(std::move(made.ids)), to_numpy(std::move(made.offsets)));
}

auto sketch(const OpOsrp& self, KeysArg ids, WeightsArg weights, Array<int64_t> offsets) {
  HashedBags made = hash(self, &OpOsrp::sketch, ids, weights, offsets);
  return std::make_tuple(to_numpy(std::move(made.ids)), to_numpy(std::move(made.offsets)),
                         to_numpy(std::move(made.weights)));
}

}  // namespace

void bind_hashing(nb::module_& m) {
  nb::class_<OpOsrp>(m, "OpOsrp")
      .def(nb::init<uint64_t, uint64_t, int>(), "k"_a, "seed"_a, "threads"_a)
      .def("slots", &slots, "ids"_a, "weights"_a.none(), "offsets"_a)
      .def("sketch", &sketch, "ids"_a, "weights"_a.none(), "offsets"_a)
      .def("bin_of", &OpOsrp::bin_of, "key"_a)
      .def("sign_of", &OpOsrp::sign_of, "key"_a);
}

}  // namespace thermocline
