// Python bindings of the admission filter; src/thermocline/embedding/admission.py uses it.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "admission/filter.h"
#include "admission/split.h"
#include "bind/bind.h"
#include "bind/dram_args.h"
#include "bind/to_numpy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

template <typename T>
std::vector<T> to_vector(const Array<T>& values) {
  return {values.data(), values.data() + values.size()};
}

uint64_t plan(AdmissionFilter& self, KeysArg ids, BytesArg refused, std::optional<Array<uint8_t>> counted) {
  require(ids.size() < UINT32_MAX && refused.size() == ids.size() && (!counted || counted->size() == ids.size()),
          "refused and counted must have one byte per id");
  return unlocked([&, k = ids.data(), n = ids.size(), r = refused.data(), c = counted ? counted->data() : nullptr] {
    return self.plan(k, n, r, c);
  });
}

uint64_t plan_keys(AdmissionFilter& self, KeysArg keys, Array<uint32_t> counted, Array<uint32_t> all,
                   BytesArg refused) {
  const size_t n = keys.size();
  require(n < UINT32_MAX && counted.size() == n && all.size() == n && refused.size() == n,
          "counted, all and refused must have one element per key");
  return unlocked([&, k = keys.data(), c = counted.data(), a = all.data(), r = refused.data()] {
    return self.plan_keys(k, c, a, n, r);
  });
}

// A working set whose indices are in range, given its arrays from Python.
WorkingSetView view_of(const KeysArg& keys, const Array<uint32_t>& inverse, const Array<uint32_t>& starts,
                       const Array<uint32_t>& order) {
  require(order.size() == inverse.size() && starts.size() == keys.size() + 1,
          "a working set has arrays of other lengths");
  return {inverse.size(), keys.size(), keys.data(), inverse.data(), starts.data(), order.data()};
}

void check(const WorkingSetView& set) {
  bool valid = set.starts[0] == 0 && set.starts[set.unique] == set.ids;
  for (size_t u = 0; u < set.unique; ++u) valid &= set.starts[u] < set.starts[u + 1];
  for (size_t i = 0; i < set.ids; ++i) valid &= (set.inverse[i] < set.unique) & (set.order[i] < set.ids);
  require(valid, "a working set has an index out of range");
}

uint64_t plan_working_set(AdmissionFilter& self, KeysArg keys, Array<uint32_t> inverse, Array<uint32_t> starts,
                          Array<uint32_t> order, BytesArg refused) {
  const WorkingSetView set = view_of(keys, inverse, starts, order);
  require(refused.size() == set.ids, "refused must have one byte per id");
  return unlocked([&, r = refused.data()] {
    check(set);
    return self.plan_working_set(set, r);
  });
}

void draw(const AdmissionFilter& self, KeysArg ids, uint64_t batch, uint64_t first, BytesArg drawn) {
  require(drawn.size() == ids.size(), "drawn must have one byte per id");
  unlocked([&, k = ids.data(), n = ids.size(), d = drawn.data()] { self.draw(k, n, batch, first, d); });
}

void peek(const AdmissionFilter& self, KeysArg keys, BytesArg refused) {
  require(refused.size() == keys.size(), "refused must have one byte per key");
  unlocked([&, k = keys.data(), n = keys.size(), r = refused.data()] { self.peek(k, n, r); });
}

void read(const AdmissionFilter& self, KeysArg ids, BytesArg refused) {
  require(refused.size() == ids.size(), "refused must have one byte per id");
  unlocked([&, k = ids.data(), n = ids.size(), r = refused.data()] { self.read(k, n, r); });
}

auto split(KeysArg ids, std::optional<Array<int64_t>> offsets, std::optional<Array<float>> weights,
           Array<uint8_t> refused) {
  require(ids.size() < UINT32_MAX && refused.size() == ids.size() && (!weights || weights->size() == ids.size()) &&
              (!offsets || offsets->size() != 0),
          "refused and weights must have one element per id, and offsets one more than there are bags");
  const Bags bags{.ids = ids.size(),
                  .offsets = offsets ? offsets->data() : nullptr,
                  .bags = offsets ? offsets->size() - 1 : ids.size(),
                  .weights = weights ? weights->data() : nullptr,
                  .mean = false};
  SplitBags out = unlocked([&, k = ids.data(), r = refused.data()] {
    check_offsets(bags);
    return split_bags(k, bags, r);
  });
  using Weights = std::optional<decltype(to_numpy(Recycled<float>(), 0))>;
  Weights kept, others;
  if (weights) {
    kept = to_numpy(std::move(out.weights), out.kept);
    others = to_numpy(std::move(out.other_weights), out.others);
  }
  return std::make_tuple(to_numpy(std::move(out.ids), out.kept), to_numpy(std::move(out.offsets), bags.bags + 1), kept,
                         to_numpy(std::move(out.other_ids), out.others),
                         to_numpy(std::move(out.other_offsets), out.places + 1), others,
                         to_numpy(std::move(out.place), out.places));
}

auto split_set(KeysArg keys, Array<uint32_t> inverse, Array<uint32_t> starts, Array<uint32_t> order,
               Array<uint8_t> refused) {
  const WorkingSetView all = view_of(keys, inverse, starts, order);
  require(refused.size() == all.ids, "refused must have one byte per id");
  WorkingSet out = unlocked([&, r = refused.data()] {
    check(all);
    return split_working_set(all, r);
  });
  return std::make_tuple(to_numpy(std::move(out.keys), out.unique), to_numpy(std::move(out.inverse), out.ids),
                         to_numpy(std::move(out.starts), out.unique + 1), to_numpy(std::move(out.order), out.ids));
}

void add(Array<int64_t> places, FloatsArg rows, FloatsOutArg out) {
  require(rows.shape(0) == places.size() && rows.shape(1) == out.shape(1), "rows: expected one row per place");
  unlocked([&, p = places.data(), n = places.size()] {
    bool valid = true;
    for (size_t i = 0; i < n; ++i) valid &= static_cast<uint64_t>(p[i]) < out.shape(0);
    require(valid, "places: a row does not exist");
    add_at_places(p, n, out.shape(1), rows.data(), out.data());
  });
}

auto save(const AdmissionFilter& self) {
  AdmissionState state = unlocked([&] { return self.save(); });
  return std::make_tuple(state.batches, state.dropped, to_numpy(std::move(state.keys)),
                         to_numpy(std::move(state.counts)), to_numpy(std::move(state.cells)),
                         to_numpy(std::move(state.admitted)));
}

void load(AdmissionFilter& self, uint64_t batches, uint64_t dropped, KeysArg keys, Array<uint32_t> counts,
          Array<uint16_t> cells, KeysArg admitted) {
  const AdmissionState state{.batches = batches,
                             .dropped = dropped,
                             .keys = to_vector(keys),
                             .counts = to_vector(counts),
                             .cells = to_vector(cells),
                             .admitted = to_vector(admitted)};
  unlocked([&] { self.load(state); });
}

}  // namespace

void bind_admission(nb::module_& m) {
  nb::class_<AdmissionStats>(m, "AdmissionStats")
      .def_ro("batches", &AdmissionStats::batches)
      .def_ro("keys_admitted", &AdmissionStats::keys_admitted)
      .def_ro("ids_admitted", &AdmissionStats::ids_admitted)
      .def_ro("ids_refused", &AdmissionStats::ids_refused)
      .def_ro("counters", &AdmissionStats::counters)
      .def_ro("counters_dropped", &AdmissionStats::counters_dropped)
      .def_ro("counter_bytes", &AdmissionStats::counter_bytes)
      .def_ro("admitted_bytes", &AdmissionStats::admitted_bytes)
      .def_ro("log_bytes", &AdmissionStats::log_bytes)
      .def_ro("working_bytes", &AdmissionStats::working_bytes)
      .def_ro("peak_working_bytes", &AdmissionStats::peak_working_bytes);
  nb::class_<AdmissionFilter>(m, "AdmissionFilter")
      .def(
          "__init__",
          [](AdmissionFilter* self, int kind, uint32_t count, double probability, uint64_t memory, uint64_t seed,
             uint64_t table) {
            require(kind >= 0 && kind <= 2, "unknown kind of admission");
            require(count >= 1, "count must be at least 1");
            new (self) AdmissionFilter({static_cast<AdmissionKind>(kind), count, probability, memory, seed, table});
          },
          "kind"_a, "count"_a, "probability"_a, "memory"_a, "seed"_a, "table"_a)
      .def("plan", &plan, "ids"_a, "refused"_a, "counted"_a = nb::none())
      .def("plan_keys", &plan_keys, "keys"_a, "counted"_a, "all"_a, "refused"_a)
      .def("plan_working_set", &plan_working_set, "keys"_a, "inverse"_a, "starts"_a, "order"_a, "refused"_a)
      .def("draw", &draw, "ids"_a, "batch"_a, "first"_a, "drawn"_a)
      .def("peek", &peek, "keys"_a, "refused"_a)
      .def("read", &read, "ids"_a, "refused"_a)
      .def(
          "set_stored",
          [](AdmissionFilter& self, KeysArg keys) {
            unlocked([&, k = keys.data(), n = keys.size()] { self.set_stored(k, n); });
          },
          "keys"_a)
      .def(
          "train",
          [](AdmissionFilter& self, uint64_t batch, bool stored) { unlocked([&] { self.train(batch, stored); }); },
          "batch"_a, "stored"_a)
      .def(
          "roll_back", [](AdmissionFilter& self, uint64_t batch) { unlocked([&] { self.roll_back(batch); }); },
          "batch"_a)
      .def(
          "admit",
          [](AdmissionFilter& self, KeysArg keys) {
            unlocked([&, k = keys.data(), n = keys.size()] { self.admit(k, n); });
          },
          "keys"_a)
      .def(
          "forget",
          [](AdmissionFilter& self, KeysArg keys) {
            unlocked([&, k = keys.data(), n = keys.size()] { self.forget(k, n); });
          },
          "keys"_a)
      .def("clear_admitted", [](AdmissionFilter& self) { unlocked([&] { self.clear_admitted(); }); })
      .def("save", &save)
      .def("load", &load, "batches"_a, "dropped"_a, "keys"_a, "counts"_a, "cells"_a, "admitted"_a)
      .def("admitted", [](const AdmissionFilter& self) { return to_numpy(unlocked([&] { return self.admitted(); })); })
      .def_prop_ro("planned", &AdmissionFilter::planned)
      .def_prop_ro("stats", &AdmissionFilter::stats);
  m.def("split_bags", &split, "ids"_a, "offsets"_a.none(), "weights"_a.none(), "refused"_a);
  m.def("add_at_places", &add, "places"_a, "rows"_a, "out"_a);
  m.def("split_working_set", &split_set, "keys"_a, "inverse"_a, "starts"_a, "order"_a, "refused"_a);
}

}  // namespace thermocline
