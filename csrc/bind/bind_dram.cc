// The memory tier for Python; its face is src/thermocline/tables/mem.py and batch.py.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/to_numpy.h"
#include "dram/dedup.h"
#include "dram/kernels.h"
#include "dram/lookup_plan.h"
#include "dram/tier.h"
#include "util/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SlotsArg = Array<const uint32_t>;
using MaybeFloats = std::optional<Array<const float>>;
using MaybeOffsets = std::optional<Array<const int64_t>>;
using FloatsArg = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOutArg = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require_below(const uint32_t* values, size_t n, size_t limit, const char* what) {
  uint32_t most = 0;
  for (size_t i = 0; i < n; ++i) most = std::max(most, values[i]);
  if (n > 0 && most >= limit) {
    throw Error(std::string(what) + ": " + std::to_string(most) + " is not below " + std::to_string(limit));
  }
}

auto dedup(Dedup& self, KeysArg ids) {
  WorkingSet set;
  {
    nb::gil_scoped_release release;
    set = self.run(ids.data(), ids.size());
  }
  return std::make_tuple(to_numpy(std::move(set.keys), set.unique), to_numpy(std::move(set.inverse), set.ids),
                         to_numpy(std::move(set.starts), set.unique + 1), to_numpy(std::move(set.order), set.ids));
}

void init_tier(DramTier* self, uint32_t dim, int optimizer, size_t budget, int policy, int threads, int shards,
               uint64_t seed, uint64_t table, int initial_kind, float initial_scale, float initial_state,
               const Precision& precision, RowStore* store) {
  TierOptions o;
  o.layout = {dim, static_cast<Optimizer>(optimizer), precision};
  o.initial = {static_cast<InitialKind>(initial_kind), initial_scale, initial_state, seed, table};
  o.budget = budget;
  o.policy = static_cast<Policy>(policy);
  o.threads = threads;
  o.shards = shards;
  nb::gil_scoped_release release;
  new (self) DramTier(o, store);
}

template <typename RowsArg>
void check_shape(const RowsArg& rows, size_t count, size_t words) {
  if (rows.shape(0) != count || rows.shape(1) != words) {
    throw Error("rows are " + std::to_string(rows.shape(0)) + " x " + std::to_string(rows.shape(1)) +
                " floats: needed are " + std::to_string(count) + " x " + std::to_string(words));
  }
}

// Rows as they are stored: words of four bytes, whatever they mean.
template <typename RowsArg>
void check_stored(const DramTier& self, size_t count, const RowsArg& rows) {
  check_shape(rows, count, self.layout().bytes() / sizeof(float));
}

// Rows as training sees them: fp32 weights and state.
template <typename RowsArg>
void check_rows(const DramTier& self, size_t count, const RowsArg& rows) {
  check_shape(rows, count, self.layout().floats());
}

void pull(DramTier& self, KeysArg keys, Array<uint32_t> slots) {
  require(keys.size() == slots.size(), "pull: one slot per key");
  nb::gil_scoped_release release;
  self.pull(keys.data(), keys.size(), slots.data());
}

void unpin(DramTier& self, SlotsArg slots, bool dirty, std::optional<KeysArg> keys) {
  require(!keys || keys->size() == slots.size(), "unpin: one key per slot");
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  self.unpin(slots.data(), slots.size(), dirty, keys ? keys->data() : nullptr);
}

// The rows of one pull: pinned until the last holder lets go, or until nobody knows them any more. Python may be
// interrupted between any two of its instructions: so pulling and owning are one call, and so is letting go.
// Thread safety: all calls may run concurrently.
class Pins {
 public:
  Pins(DramTier& tier, const uint64_t* keys, size_t n) : tier_(tier), slots_(n) { tier_.pull(keys, n, slots_.data()); }
  Pins(const Pins&) = delete;
  ~Pins() {
    if (holds_ > 0) tier_.unpin(slots_.data(), slots_.size(), false);
  }

  // One holder more; false: too late, the rows may be elsewhere by now.
  bool acquire() {
    std::lock_guard lock(mutex_);
    if (holds_ > 0) ++holds_;
    return holds_ > 0;
  }

  // One holder less. Holders let go once each; of nothing if nobody is left.
  void release() {
    std::lock_guard lock(mutex_);
    if (holds_ > 0 && --holds_ == 0) tier_.unpin(slots_.data(), slots_.size(), false);
  }

  const std::vector<uint32_t>& slots() const { return slots_; }

 private:
  DramTier& tier_;
  std::vector<uint32_t> slots_;  // constant after construction
  std::mutex mutex_;             // protects holds_
  size_t holds_ = 1;
};

void init_pins(Pins* self, DramTier& tier, KeysArg keys) {
  nb::gil_scoped_release release;
  new (self) Pins(tier, keys.data(), keys.size());
}

auto pinned_slots(const Pins& self) {
  Recycled<uint32_t> copy(self.slots().size());
  std::copy(self.slots().begin(), self.slots().end(), copy.get());
  return to_numpy(std::move(copy), self.slots().size());
}

void mark_dirty(DramTier& self, SlotsArg slots) {
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  self.mark_dirty(slots.data(), slots.size());
}

// (rows given, slot to go on from)
std::pair<size_t, uint32_t> dirty_rows(const DramTier& self, uint32_t next, Array<uint64_t> keys, FloatsOutArg rows) {
  check_stored(self, keys.size(), rows);
  nb::gil_scoped_release release;
  size_t n = self.dirty_rows(&next, keys.size(), keys.data(), reinterpret_cast<uint8_t*>(rows.data()));
  return {n, next};
}

std::pair<size_t, size_t> read(DramTier& self, KeysArg keys, FloatsOutArg rows) {
  check_stored(self, keys.size(), rows);
  nb::gil_scoped_release release;
  const auto sources = self.read(keys.data(), keys.size(), reinterpret_cast<uint8_t*>(rows.data()));
  return {sources.here, sources.store};
}

void push(DramTier& self, KeysArg keys, FloatsArg rows, bool dirty, bool unique) {
  check_stored(self, keys.size(), rows);
  nb::gil_scoped_release release;
  self.push(keys.data(), keys.size(), reinterpret_cast<const uint8_t*>(rows.data()), dirty, unique);
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

void flush(DramTier& self, RowStore* to) {
  nb::gil_scoped_release release;
  self.flush(to);
}

void check(DramTier& self, bool idle) {
  nb::gil_scoped_release release;
  self.check(idle);
}

void make_room(DramTier& self, size_t rows) {
  nb::gil_scoped_release release;
  self.make_room(rows);
}

Bags bags_of(size_t ids, const MaybeOffsets& offsets, const MaybeFloats& weights, bool mean) {
  require(!offsets || offsets->size() >= 1, "offsets: at least one");
  require(!weights || weights->size() == ids, "weights: one per id");
  Bags b{ids, offsets ? offsets->data() : nullptr, offsets ? offsets->size() - 1 : ids,
         weights ? weights->data() : nullptr, mean};
  check_offsets(b);
  return b;
}

void pool_from(ThreadPool& pool, const Rows& rows, size_t row_count, const SlotsArg& slots, const MaybeOffsets& offsets,
               const MaybeFloats& weights, bool mean, FloatsOutArg& out) {
  const Bags b = bags_of(slots.size(), offsets, weights, mean);
  require(out.shape(0) == b.bags && out.shape(1) == rows.dim, "out: one row of dim floats per bag");
  nb::gil_scoped_release release;
  require_below(slots.data(), slots.size(), row_count, "slots");
  pool_rows(pool, {rows, slots.data(), b.ids, b.offsets, b.bags, b.weights, b.mean, out.data()});
}

void pool_tier(DramTier& self, SlotsArg slots, MaybeOffsets offsets, MaybeFloats weights, bool mean, FloatsOutArg out) {
  pool_from(self.pool(), self.rows(), self.capacity(), slots, offsets, weights, mean, out);
}

void pool_buffer(DramTier& self, FloatsArg rows, SlotsArg index, MaybeOffsets offsets, MaybeFloats weights, bool mean,
                 FloatsOutArg out) {
  check_rows(self, rows.shape(0), rows);
  // The kernels take rows they may write; pooling only reads.
  auto* base = reinterpret_cast<uint8_t*>(const_cast<float*>(rows.data()));
  pool_from(self.pool(), {base, self.layout().floats() * sizeof(float), self.layout().dim}, rows.shape(0), index,
            offsets, weights, mean, out);
}

auto plan(DramTier& self, SlotsArg slots, SlotsArg inverse, SlotsArg order, MaybeOffsets offsets, MaybeFloats weights,
          bool mean) {
  const size_t n = inverse.size();
  require(order.size() == n, "order: one position per id");
  const Bags b = bags_of(n, offsets, weights, mean);
  Recycled<uint32_t> id_slots(n), grad_rows(n);
  Recycled<float> coefs;
  if (b.has_coefs()) coefs = Recycled<float>(n);
  {
    nb::gil_scoped_release release;
    require_below(inverse.data(), n, slots.size(), "inverse");
    require_below(order.data(), n, n, "order");
    expand_slots(self.pool(), slots.data(), inverse.data(), n, id_slots.get());
    plan_gradients(self.pool(), b, order.data(), grad_rows.get(), coefs.get());
  }
  using Coefs = std::optional<nb::ndarray<nb::numpy, float, nb::ndim<1>>>;
  return std::make_tuple(to_numpy(std::move(id_slots), n), to_numpy(std::move(grad_rows), n),
                         b.has_coefs() ? Coefs(to_numpy(std::move(coefs), n)) : Coefs());
}

SegmentArgs segments_of(const DramTier& self, size_t keys, const SlotsArg& starts, const SlotsArg& grad_rows,
                        const MaybeFloats& coefs, const FloatsArg& grads) {
  const size_t n = grad_rows.size();
  require(starts.size() == keys + 1 && starts(0) == 0 && starts(keys) == n, "starts: from 0 to the ids, one per key");
  bool rising = true;  // every key occurs
  for (size_t u = 0; u < keys; ++u) rising &= starts(u) < starts(u + 1);
  require(rising, "starts: every key occurs at least once");
  require(!coefs || coefs->size() == n, "coefs: one per id");
  require(grads.shape(1) == self.layout().dim, "grads: rows of dim floats");
  require_below(grad_rows.data(), n, grads.shape(0), "grad_rows");
  return {starts.data(), keys, grad_rows.data(), coefs ? coefs->data() : nullptr, grads.data()};
}

int64_t update(DramTier& self, SlotsArg slots, SlotsArg starts, SlotsArg grad_rows, MaybeFloats coefs, FloatsArg grads,
               const Step& step) {
  require(step.optimizer == self.layout().optimizer, "step: of another optimizer than the tier's");
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  return update_rows(self.pool(), self.rows(), slots.data(),
                     segments_of(self, slots.size(), starts, grad_rows, coefs, grads), step);
}

void sum(DramTier& self, SlotsArg starts, SlotsArg grad_rows, MaybeFloats coefs, FloatsArg grads, FloatsOutArg sums) {
  require(starts.size() == sums.shape(0) + 1 && sums.shape(1) == self.layout().dim, "sums: one row of dim per key");
  nb::gil_scoped_release release;
  sum_gradients(self.pool(), self.layout().dim, segments_of(self, sums.shape(0), starts, grad_rows, coefs, grads),
                sums.data());
}

int64_t apply(DramTier& self, SlotsArg slots, FloatsArg sums, const Step& step) {
  require(step.optimizer == self.layout().optimizer, "step: of another optimizer than the tier's");
  require(sums.shape(0) == slots.size() && sums.shape(1) == self.layout().dim, "sums: one row of dim per slot");
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  return apply_gradients(self.pool(), self.rows(), slots.data(), slots.size(), sums.data(), step);
}

void initial_rows(const DramTier& self, KeysArg keys, FloatsOutArg rows) {
  check_stored(self, keys.size(), rows);
  nb::gil_scoped_release release;
  auto* out = reinterpret_cast<uint8_t*>(rows.data());
  for (size_t i = 0; i < keys.size(); ++i) self.initial().store(keys.data()[i], out + i * self.layout().bytes());
}

void decode(DramTier& self, FloatsArg stored, FloatsOutArg rows) {
  check_stored(self, rows.shape(0), stored);
  check_rows(self, stored.shape(0), rows);
  require(!self.codec().plain(), "decode: fp32 rows are stored as they are");
  nb::gil_scoped_release release;
  decode_rows(self.pool(), self.codec(), reinterpret_cast<const uint8_t*>(stored.data()), rows.shape(0), rows.data());
}

void encode(DramTier& self, FloatsArg rows, FloatsOutArg stored) {
  check_rows(self, stored.shape(0), rows);
  check_stored(self, rows.shape(0), stored);
  require(!self.codec().plain(), "encode: fp32 rows are stored as they are");
  nb::gil_scoped_release release;
  encode_rows(self.pool(), self.codec(), rows.data(), rows.shape(0), reinterpret_cast<uint8_t*>(stored.data()));
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
  d["from_store"] = s.from_store;
  d["initialised"] = s.initialised;
  d["pushed"] = s.pushed;
  d["reads"] = s.reads;
  d["read_hits"] = s.read_hits;
  d["evictions"] = s.evictions;
  d["flushed"] = s.flushed;
  d["puts"] = s.puts;
  d["bytes_rows"] = s.bytes_rows;
  d["bytes_metadata"] = s.bytes_metadata;
  d["bytes_index"] = s.bytes_index;
  d["bytes_buffers"] = s.bytes_buffers;
  d["bytes_total"] = s.bytes_total;
  d["budget"] = s.budget;
  d["kernels"] = s.kernels;
  return d;
}

Precision precision_of(int kind, int bits, bool stochastic, bool row_scaled, float step, bool learned) {
  const bool whole = static_cast<WeightKind>(kind) == WeightKind::kInt;
  require(whole ? (bits >= 2 && bits <= 8) || bits == 16 : bits == (kind == 0 ? 32 : 16), "precision: no such bits");
  return {static_cast<WeightKind>(kind), static_cast<uint8_t>(bits), stochastic, row_scaled, step, learned};
}

Step step_of(int optimizer, double lr, double eps, double weight_decay, double beta1, double beta2, uint64_t t,
             double scale) {
  return make_step({static_cast<Optimizer>(optimizer), lr, eps, weight_decay, beta1, beta2}, t, scale);
}

}  // namespace

void bind_mem(nb::module_& m) {
  nb::class_<Dedup>(m, "Dedup").def(nb::init<int>(), "threads"_a).def("run", &dedup, "ids"_a.noconvert());
  nb::class_<Step>(m, "Step");
  m.def("make_step", &step_of, "optimizer"_a, "lr"_a, "eps"_a, "weight_decay"_a, "beta1"_a, "beta2"_a, "t"_a,
        "scale"_a);
  nb::class_<Precision>(m, "Precision");
  m.def("make_precision", &precision_of, "kind"_a, "bits"_a, "stochastic"_a, "row_scaled"_a, "step"_a, "learned"_a);
  nb::class_<DramTier>(m, "DramTier")
      .def("__init__", &init_tier, "dim"_a, "optimizer"_a, "budget"_a, "policy"_a, "threads"_a, "shards"_a, "seed"_a,
           "table"_a, "initial_kind"_a, "initial_scale"_a, "initial_state"_a, "precision"_a, "store"_a.none(),
           nb::keep_alive<1, 14>())
      .def("pull", &pull, "keys"_a.noconvert(), "slots"_a.noconvert())
      .def("unpin", &unpin, "slots"_a.noconvert(), "dirty"_a, "keys"_a.noconvert().none())
      .def("mark_dirty", &mark_dirty, "slots"_a.noconvert())
      .def("dirty_rows", &dirty_rows, "next"_a, "keys"_a.noconvert(), "rows"_a.noconvert())
      .def("read", &read, "keys"_a.noconvert(), "rows"_a.noconvert())
      .def("push", &push, "keys"_a.noconvert(), "rows"_a.noconvert(), "dirty"_a, "unique"_a = false)
      .def("copy_out", &copy_out, "slots"_a.noconvert(), "rows"_a.noconvert())
      .def("write", &write, "slots"_a.noconvert(), "rows"_a.noconvert())
      .def("flush", &flush, "to"_a.none())
      .def("make_room", &make_room, "rows"_a)
      .def("check", &check, "idle"_a)
      .def("stats", &stats)
      .def("initial_rows", &initial_rows, "keys"_a.noconvert(), "rows"_a.noconvert())
      .def("decode", &decode, "stored"_a.noconvert(), "rows"_a.noconvert())
      .def("encode", &encode, "rows"_a.noconvert(), "stored"_a.noconvert())
      .def("set_scale", &DramTier::set_scale, "step"_a)
      .def("plan", &plan, "slots"_a.noconvert(), "inverse"_a.noconvert(), "order"_a.noconvert(),
           "offsets"_a.noconvert().none(), "weights"_a.noconvert().none(), "mean"_a)
      .def("pool", &pool_tier, "slots"_a.noconvert(), "offsets"_a.noconvert().none(), "weights"_a.noconvert().none(),
           "mean"_a, "out"_a.noconvert())
      .def("pool_buffer", &pool_buffer, "rows"_a.noconvert(), "index"_a.noconvert(), "offsets"_a.noconvert().none(),
           "weights"_a.noconvert().none(), "mean"_a, "out"_a.noconvert())
      .def("update", &update, "slots"_a.noconvert(), "starts"_a.noconvert(), "grad_rows"_a.noconvert(),
           "coefs"_a.noconvert().none(), "grads"_a.noconvert(), "step"_a)
      .def("sum_gradients", &sum, "starts"_a.noconvert(), "grad_rows"_a.noconvert(), "coefs"_a.noconvert().none(),
           "grads"_a.noconvert(), "sums"_a.noconvert())
      .def("apply_gradients", &apply, "slots"_a.noconvert(), "sums"_a.noconvert(), "step"_a)
      .def_prop_ro("capacity", &DramTier::capacity)
      .def_prop_ro("row_bytes", [](const DramTier& self) { return self.layout().bytes(); });
  nb::class_<Pins>(m, "Pins")
      .def("__init__", &init_pins, "tier"_a, "keys"_a.noconvert(), nb::keep_alive<1, 2>())
      .def("slots", &pinned_slots)
      .def("acquire", &Pins::acquire)
      .def("release", &Pins::release, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace thermocline
