// Python bindings of the DRAM tier; src/thermocline/tiers/dram.py is the Python class.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/dram_args.h"
#include "bind/to_numpy.h"
#include "dram/horizon.h"
#include "dram/pins.h"
#include "dram/tier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

void init_tier(DramTier* self, uint32_t dim, int optimizer, size_t budget, size_t reserved, int policy, int threads,
               int shards, uint64_t seed, uint64_t table, int initial_kind, float initial_scale, float initial_state,
               const Precision& precision, uint8_t statistics, RowStore* store, std::optional<size_t> write_ahead,
               bool catch_up, const std::vector<std::tuple<uint16_t, int, float>>& initial_parts) {
  require(!catch_up || precision.kind == WeightKind::kFp32, "rows that catch up are fp32");
  TierOptions o;
  o.layout = {dim, static_cast<Optimizer>(optimizer), precision, catch_up, statistics};
  o.initial = {static_cast<InitialKind>(initial_kind), initial_scale, initial_state, seed, table};
  for (const auto& [prefix, kind, scale] : initial_parts) {
    o.initial.parts.push_back({prefix, static_cast<InitialKind>(kind), scale});
  }
  o.budget = budget;
  o.reserved = reserved;
  o.policy = static_cast<Policy>(policy);
  o.threads = threads;
  o.shards = shards;
  o.write_ahead = write_ahead;
  nb::gil_scoped_release release;
  new (self) DramTier(o, store);
}

Precision precision_of(int kind, int bits, bool stochastic, bool row_scaled, float scale, bool learned) {
  const bool is_int = static_cast<WeightKind>(kind) == WeightKind::kInt;
  require(is_int ? (bits >= 2 && bits <= 8) || bits == 16 : bits == (kind == 0 ? 32 : 16),
          "precision: bits must be 32 for fp32, 16 for fp16 and bf16, 2 to 8 or 16 for int");
  return {static_cast<WeightKind>(kind), static_cast<uint8_t>(bits), stochastic, row_scaled, scale, learned};
}

void pull(DramTier& self, KeysArg keys, SlotsOutArg slots) {
  require(keys.size() == slots.size(), "pull: keys and slots differ in length");
  nb::gil_scoped_release release;
  self.pull(keys.data(), keys.size(), slots.data());
}

void unpin(DramTier& self, SlotsArg slots, bool dirty, std::optional<KeysArg> keys) {
  require(!keys || keys->size() == slots.size(), "unpin: keys and slots differ in length");
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  self.unpin(slots.data(), slots.size(), dirty, keys ? keys->data() : nullptr);
}

void init_pins(Pins* self, DramTier& tier, KeysArg keys) {
  nb::gil_scoped_release release;
  new (self) Pins(tier, keys.data(), keys.size());
}

auto pinned_slots(const Pins& self) {
  Recycled<uint32_t> copy(self.slots().size());
  std::copy(self.slots().begin(), self.slots().end(), copy.get());
  return to_numpy(std::move(copy), self.slots().size());
}

void init_pins_ahead(Pins* self, DramTier& tier, std::vector<HorizonBatch*> batches) {
  nb::gil_scoped_release release;
  new (self) Pins(tier, std::move(batches));
}

HorizonBatch* horizon_add(Horizon& self, KeysArg ids) {
  nb::gil_scoped_release release;
  return self.add(ids.data(), ids.size()).release();
}

HorizonPart* horizon_next_part(Horizon& self, size_t max, uint32_t partitions) {
  nb::gil_scoped_release release;
  return self.next_part(max, partitions).release();
}

auto part_keys(const HorizonPart& self) {
  Recycled<uint64_t> keys(self.keys().size());
  std::copy(self.keys().begin(), self.keys().end(), keys.get());
  return to_numpy(std::move(keys), self.keys().size());
}

void horizon_load_part(Horizon& self, HorizonPart& part, std::optional<BytesArg> skip) {
  require(!skip || skip->size() == part.keys().size(), "load_part: skip and keys differ in length");
  nb::gil_scoped_release release;
  self.load_part(part, skip ? skip->data() : nullptr);
}

// Returns (ids,), or (ids, keys, inverse, starts, order).
nb::tuple horizon_expand(const HorizonBatch& self, bool working_set) {
  const size_t n = self.ids(), unique = self.unique();
  Recycled<uint64_t> ids(n), keys;
  Recycled<uint32_t> inverse, starts, order;
  {
    nb::gil_scoped_release release;
    if (working_set) {
      keys = Recycled<uint64_t>(unique);
      inverse = Recycled<uint32_t>(n);
      starts = Recycled<uint32_t>(unique + 1);
      order = Recycled<uint32_t>(n);
    }
    self.expand({keys.get(), inverse.get(), starts.get(), order.get(), ids.get()});
  }
  if (!working_set) return nb::make_tuple(to_numpy(std::move(ids), n));
  return nb::make_tuple(to_numpy(std::move(ids), n), to_numpy(std::move(keys), unique), to_numpy(std::move(inverse), n),
                        to_numpy(std::move(starts), unique + 1), to_numpy(std::move(order), n));
}

auto horizon_keys(const HorizonBatch& self) {
  Recycled<uint64_t> keys(self.unique());
  {
    nb::gil_scoped_release release;
    self.expand({.keys = keys.get()});
  }
  return to_numpy(std::move(keys), self.unique());
}

void mark_dirty(DramTier& self, SlotsArg slots) {
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  self.mark_dirty(slots.data(), slots.size());
}

// Returns (rows copied, next slot).
std::pair<size_t, uint32_t> dirty_rows(DramTier& self, uint32_t next, KeysOutArg keys, FloatsOutArg rows, uint64_t lo,
                                       uint64_t hi) {
  check_stored(self, keys.size(), rows);
  nb::gil_scoped_release release;
  size_t n = self.dirty_rows(&next, keys.size(), keys.data(), reinterpret_cast<uint8_t*>(rows.data()), {lo, hi});
  return {n, next};
}

template <typename Slots>
void check_count(const std::optional<Slots>& slots, size_t count) {
  if (!slots || slots->size() == count) return;
  throw Error("slots have " + std::to_string(slots->size()) + " elements, expected " + std::to_string(count));
}

std::pair<size_t, size_t> read(DramTier& self, KeysArg keys, FloatsOutArg rows, std::optional<SlotsOutArg> slots) {
  check_stored(self, keys.size(), rows);
  check_count(slots, keys.size());
  nb::gil_scoped_release release;
  const auto sources =
      self.read(keys.data(), keys.size(), reinterpret_cast<uint8_t*>(rows.data()), slots ? slots->data() : nullptr);
  return {sources.resident, sources.store};
}

void push(DramTier& self, KeysArg keys, FloatsArg rows, bool dirty, bool unique, std::optional<SlotsArg> slots,
          uint64_t version) {
  check_stored(self, keys.size(), rows);
  check_count(slots, keys.size());
  nb::gil_scoped_release release;
  self.push(keys.data(), keys.size(), reinterpret_cast<const uint8_t*>(rows.data()), dirty, unique,
            {slots ? slots->data() : nullptr, version});
}

size_t erase(DramTier& self, KeysArg keys) {
  nb::gil_scoped_release release;
  return self.erase(keys.data(), keys.size());
}

void end_writes(DramTier& self, KeysArg keys) {
  nb::gil_scoped_release release;
  self.end_writes(keys.data(), keys.size());
}

// Returns keys and stored rows, one after the other.
nb::tuple unwritten_rows(DramTier& self, uint64_t lo, uint64_t hi) {
  std::vector<uint64_t> keys;
  std::vector<uint8_t> rows;
  {
    nb::gil_scoped_release release;
    self.unwritten_rows({lo, hi}, [&](uint64_t key, const uint8_t* row, size_t bytes) {
      keys.push_back(key);
      rows.insert(rows.end(), row, row + bytes);
    });
  }
  return nb::make_tuple(to_numpy(std::move(keys)), to_numpy(std::move(rows)));
}

void copy_out(DramTier& self, SlotsArg slots, FloatsOutArg rows) {
  check_stored(self, slots.size(), rows);
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  self.copy_out(slots.data(), slots.size(), reinterpret_cast<uint8_t*>(rows.data()));
}

void write(DramTier& self, SlotsArg slots, FloatsArg rows) {
  check_stored(self, slots.size(), rows);
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  self.write(slots.data(), slots.size(), reinterpret_cast<const uint8_t*>(rows.data()));
}

void flush(DramTier& self, RowStore* to, uint64_t lo, uint64_t hi) {
  nb::gil_scoped_release release;
  self.flush(to, {lo, hi});
}

void check(DramTier& self, bool idle) {
  nb::gil_scoped_release release;
  self.check(idle);
}

size_t write_ahead(DramTier& self, size_t rows) {
  nb::gil_scoped_release release;
  return self.write_ahead(rows);
}

void initial_rows(const DramTier& self, KeysArg keys, FloatsOutArg rows) {
  check_stored(self, keys.size(), rows);
  nb::gil_scoped_release release;
  auto* out = reinterpret_cast<uint8_t*>(rows.data());
  for (size_t i = 0; i < keys.size(); ++i) self.initial().store(keys.data()[i], out + i * self.layout().bytes());
}

nb::dict stats(const DramTier& self) {
  TierStats s;
  {
    nb::gil_scoped_release release;
    s = self.stats();
  }
  nb::dict d;
  d["capacity"] = s.capacity;
  d["resident"] = s.resident;
  d["free"] = s.free;
  d["pinned"] = s.pinned;
  d["dirty"] = s.dirty;
  d["shards"] = s.shards;
  d["hits"] = s.hits;
  d["misses"] = s.misses;
  d["loaded_ahead"] = s.loaded_ahead;
  d["read_ahead"] = s.read_ahead;
  d["from_store"] = s.from_store;
  d["initialised"] = s.initialised;
  d["pushed"] = s.pushed;
  d["reads"] = s.reads;
  d["read_hits"] = s.read_hits;
  d["read_from_store"] = s.read_from_store;
  d["evictions"] = s.evictions;
  d["flushed"] = s.flushed;
  d["puts"] = s.puts;
  d["written_ahead"] = s.written_ahead;
  d["puts_in_pulls"] = s.puts_in_pulls;
  d["bytes_rows"] = s.bytes_rows;
  d["bytes_metadata"] = s.bytes_metadata;
  d["bytes_index"] = s.bytes_index;
  d["bytes_buffers"] = s.bytes_buffers;
  d["bytes_total"] = s.bytes_total;
  d["budget"] = s.budget;
  d["kernels"] = s.kernels;
  return d;
}

}  // namespace

void bind_dram(nb::module_& m) {
  nb::class_<Precision>(m, "Precision");
  m.def("make_precision", &precision_of, "kind"_a, "bits"_a, "stochastic"_a, "row_scaled"_a, "scale"_a, "learned"_a);
  nb::class_<DramTier> tier(m, "DramTier");
  tier.def("__init__", &init_tier, "dim"_a, "optimizer"_a, "budget"_a, "reserved"_a, "policy"_a, "threads"_a,
           "shards"_a, "seed"_a, "table"_a, "initial_kind"_a, "initial_scale"_a, "initial_state"_a, "precision"_a,
           "statistics"_a, "store"_a.none(), "write_ahead"_a.none(), "catch_up"_a = false,
           "initial_parts"_a = std::vector<std::tuple<uint16_t, int, float>>(), nb::keep_alive<1, 16>())
      .def("pull", &pull, "keys"_a.noconvert(), "slots"_a.noconvert())
      .def("unpin", &unpin, "slots"_a.noconvert(), "dirty"_a, "keys"_a.noconvert().none())
      .def("mark_dirty", &mark_dirty, "slots"_a.noconvert())
      .def("dirty_rows", &dirty_rows, "next"_a, "keys"_a.noconvert(), "rows"_a.noconvert(), "lo"_a, "hi"_a)
      .def("read", &read, "keys"_a.noconvert(), "rows"_a.noconvert(), "slots"_a.noconvert().none() = nb::none())
      .def("push", &push, "keys"_a.noconvert(), "rows"_a.noconvert(), "dirty"_a, "unique"_a = false,
           "slots"_a.noconvert().none() = nb::none(), "version"_a = 0)
      .def("erase", &erase, "keys"_a.noconvert())
      .def("end_writes", &end_writes, "keys"_a.noconvert())
      .def("unwritten_rows", &unwritten_rows, "lo"_a, "hi"_a)
      .def("copy_out", &copy_out, "slots"_a.noconvert(), "rows"_a.noconvert())
      .def("write", &write, "slots"_a.noconvert(), "rows"_a.noconvert())
      .def("flush", &flush, "to"_a.none(), "lo"_a, "hi"_a)
      .def("write_ahead", &write_ahead, "rows"_a)
      .def("stop_write_ahead", &DramTier::stop_write_ahead, nb::call_guard<nb::gil_scoped_release>())
      .def("check", &check, "idle"_a)
      .def("stats", &stats)
      .def("initial_rows", &initial_rows, "keys"_a.noconvert(), "rows"_a.noconvert())
      .def_prop_ro("capacity", &DramTier::capacity)
      .def_prop_ro("calls_at_once", &DramTier::calls_at_once)
      .def_prop_ro("slots_version", &DramTier::slots_version)
      .def_prop_ro("keeps_slots", &DramTier::keeps_slots)
      .def_prop_ro("pinned", &DramTier::pinned)
      .def_prop_ro("loaded_ahead", &DramTier::loaded_ahead)
      .def_prop_ro("read_from_store", &DramTier::rows_read_from_store)
      .def_prop_ro("row_bytes", [](const DramTier& self) { return self.layout().bytes(); });
  nb::class_<Pins>(m, "Pins")
      .def("__init__", &init_pins, "tier"_a, "keys"_a.noconvert(), nb::keep_alive<1, 2>())
      .def("__init__", &init_pins_ahead, "tier"_a, "batches"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("slots", &pinned_slots)
      .def("acquire", &Pins::acquire)
      .def("release", &Pins::release, nb::call_guard<nb::gil_scoped_release>());
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Horizon>(m, "Horizon")
      .def(nb::init<DramTier&, bool>(), "tier"_a, "training"_a, nb::keep_alive<1, 2>())
      .def("add", &horizon_add, "ids"_a.noconvert(), nb::rv_policy::take_ownership, nb::keep_alive<0, 1>())
      .def("next_part", &horizon_next_part, "max"_a, "partitions"_a, nb::rv_policy::take_ownership,
           nb::keep_alive<0, 1>())
      .def("load_part", &horizon_load_part, "part"_a, "skip"_a.noconvert().none() = nb::none())
      .def("drop", &Horizon::drop, unlocked)
      .def_prop_ro("unique", &Horizon::unique)
      .def_prop_ro("absent", &Horizon::absent)
      .def_prop_ro("pinned", &Horizon::pinned)
      .def_prop_ro("late", &Horizon::late)
      .def_prop_ro("position", &Horizon::position)
      .def_prop_ro("gathered", &Horizon::gathered)
      .def_prop_ro("bytes", &Horizon::bytes)
      .def_prop_ro("partitions", &Horizon::partitions)
      .def_ro_static("SCRATCH_BYTES", &Horizon::kScratchBytes)
      .def_ro_static("PART_BYTES", &Horizon::kPartBytes);
  nb::class_<HorizonPart>(m, "HorizonPart")
      .def("__len__", [](const HorizonPart& self) { return self.keys().size(); })
      .def("keys", &part_keys);
  nb::class_<HorizonBatch>(m, "HorizonBatch")
      .def("expand", &horizon_expand, "working_set"_a)
      .def("keys", &horizon_keys)
      .def("release", &HorizonBatch::release, unlocked)
      .def_prop_ro("unique", &HorizonBatch::unique)
      .def_prop_ro("to_visit", &HorizonBatch::to_visit)
      .def_prop_ro("bytes", &HorizonBatch::bytes);
  bind_kernels(m, tier);
}

}  // namespace thermocline
