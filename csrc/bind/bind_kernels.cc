// Python bindings of batch planning and training kernels: Dedup, and the methods of DramTier that read or update rows.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/dram_args.h"
#include "bind/to_numpy.h"
#include "dram/dedup.h"
#include "dram/kernels.h"
#include "dram/lookup_plan.h"
#include "dram/statistics.h"
#include "dram/tier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

void require_below(const uint32_t* values, size_t n, size_t limit, const char* name) {
  uint32_t most = 0;
  for (size_t i = 0; i < n; ++i) most = std::max(most, values[i]);
  if (n > 0 && most >= limit) {
    throw Error(std::string(name) + ": index " + std::to_string(most) + " is out of range, the limit is " +
                std::to_string(limit));
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

Bags bags_of(size_t ids, const MaybeOffsets& offsets, const MaybeFloats& weights, bool mean) {
  require(!offsets || offsets->size() >= 1, "offsets: at least one element is needed");
  require(!weights || weights->size() == ids, "weights: expected one per id");
  Bags b{ids, offsets ? offsets->data() : nullptr, offsets ? offsets->size() - 1 : ids,
         weights ? weights->data() : nullptr, mean};
  check_offsets(b);
  return b;
}

// Rows that slots index, and their number.
struct RowSource {
  Rows rows;
  size_t count;
};

RowSource rows_of(DramTier& tier) { return {tier.rows(), tier.capacity()}; }

RowSource rows_of(const DramTier& tier, const FloatsArg& buffer) {
  check_decoded(tier, buffer.shape(0), buffer);
  // Rows is writable for the optimizers; these calls only read.
  auto* base = reinterpret_cast<uint8_t*>(const_cast<float*>(buffer.data()));
  return {{base, tier.layout().floats() * sizeof(float), tier.layout().dim}, buffer.shape(0)};
}

void pool_from(ThreadPool& pool, const RowSource& from, const SlotsArg& slots, const MaybeOffsets& offsets,
               const MaybeFloats& weights, bool mean, FloatsOutArg& out) {
  const Bags b = bags_of(slots.size(), offsets, weights, mean);
  require(out.shape(0) == b.bags && out.shape(1) == from.rows.dim, "out: expected one row of dim floats per bag");
  nb::gil_scoped_release release;
  require_below(slots.data(), slots.size(), from.count, "slots");
  pool_rows(pool, {from.rows, slots.data(), b.ids, b.offsets, b.bags, b.weights, b.mean, out.data()});
}

void pool_tier(DramTier& self, SlotsArg slots, MaybeOffsets offsets, MaybeFloats weights, bool mean, FloatsOutArg out) {
  pool_from(self.pool(), rows_of(self), slots, offsets, weights, mean, out);
}

void pool_buffer(DramTier& self, FloatsArg rows, SlotsArg index, MaybeOffsets offsets, MaybeFloats weights, bool mean,
                 FloatsOutArg out) {
  pool_from(self.pool(), rows_of(self, rows), index, offsets, weights, mean, out);
}

// `rows`: a buffer that `slots` index; without it, the slots of the tier.
void weight_gradient_of(DramTier& self, std::optional<FloatsArg> rows, SlotsArg slots, MaybeOffsets offsets, bool mean,
                        FloatsArg grads, VectorOutArg out) {
  const Bags b = bags_of(slots.size(), offsets, std::nullopt, mean);
  const RowSource from = rows ? rows_of(self, *rows) : rows_of(self);
  require(grads.shape(0) == b.bags && grads.shape(1) == from.rows.dim, "grads: expected one row of dim floats per bag");
  require(out.size() == b.ids, "out: expected one element per id");
  nb::gil_scoped_release release;
  require_below(slots.data(), slots.size(), from.count, "slots");
  const PoolArgs pool{from.rows, slots.data(), b.ids, b.offsets, b.bags, nullptr, b.mean, nullptr};
  weight_gradient(self.pool(), {pool, grads.data(), out.data()});
}

auto plan(DramTier& self, SlotsArg slots, SlotsArg inverse, SlotsArg order, MaybeOffsets offsets, MaybeFloats weights,
          bool mean) {
  const size_t n = inverse.size();
  require(order.size() == n, "order: expected one position per id");
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
  require(starts.size() == keys + 1 && starts(0) == 0 && starts(keys) == n,
          "starts: expected keys + 1 elements, from 0 to the number of ids");
  bool rising = true;
  for (size_t u = 0; u < keys; ++u) rising &= starts(u) < starts(u + 1);
  require(rising, "starts: every key occurs at least once");
  require(!coefs || coefs->size() == n, "coefs: expected one per id");
  require(grads.shape(1) == self.layout().dim, "grads: expected rows of dim floats");
  require_below(grad_rows.data(), n, grads.shape(0), "grad_rows");
  return {starts.data(), keys, grad_rows.data(), coefs ? coefs->data() : nullptr, grads.data()};
}

// `statistics`: the step of the rows' statistics, if they have any. `units`, if clicks are counted: the labels of the
// rows of the gradients in units of 2^-16, one for each or one for equal numbers of consecutive rows.
int64_t update(DramTier& self, SlotsArg slots, SlotsArg starts, SlotsArg grad_rows, MaybeFloats coefs, FloatsArg grads,
               const Step& step, const StatisticsStep* statistics, std::optional<IntsArg> units) {
  require(step.optimizer == self.layout().optimizer, "step: its optimizer is not the optimizer of the tier");
  const uint8_t kinds = self.layout().statistics;
  require((kinds != 0) == (statistics != nullptr), "statistics: expected if, and only if, rows have statistics");
  const size_t labels = units ? units->size() : 0;
  require(units ? grads.shape(0) == 0 || (labels > 0 && grads.shape(0) % labels == 0) : !(kinds & kClick),
          "units: expected one per row of grads, or per equal number of rows");
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  const SegmentArgs segments = segments_of(self, slots.size(), starts, grad_rows, coefs, grads);
  UpdatedKeys updated;
  std::optional<Labels> labels_of_rows;
  if (labels > 0) labels_of_rows.emplace(units->data(), static_cast<uint32_t>(grads.shape(0) / labels));
  if (statistics) {
    updated = [&](size_t begin, size_t end) {
      update_statistics(self.rows(), self.layout(), slots.data(), segments.starts, segments.grad_rows,
                        labels_of_rows ? &*labels_of_rows : nullptr, *statistics, begin, end);
    };
  }
  return update_rows(self.pool(), self.rows(), slots.data(), segments, step, updated);
}

void sum(DramTier& self, SlotsArg starts, SlotsArg grad_rows, MaybeFloats coefs, FloatsArg grads, FloatsOutArg sums) {
  require(starts.size() == sums.shape(0) + 1 && sums.shape(1) == self.layout().dim,
          "sums: expected one row of dim floats per key");
  nb::gil_scoped_release release;
  sum_gradients(self.pool(), self.layout().dim, segments_of(self, sums.shape(0), starts, grad_rows, coefs, grads),
                sums.data());
}

int64_t apply(DramTier& self, SlotsArg slots, FloatsArg sums, const Step& step) {
  require(step.optimizer == self.layout().optimizer, "step: its optimizer is not the optimizer of the tier");
  require(sums.shape(0) == slots.size() && sums.shape(1) == self.layout().dim,
          "sums: expected one row of dim floats per slot");
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  return apply_gradients(self.pool(), self.rows(), slots.data(), slots.size(), sums.data(), step);
}

// Brings pinned rows, or the rows of a buffer, to step `target`. rates: float32[2, limit], see MissedSteps.
void catch_up(DramTier& self, std::optional<SlotsArg> slots, std::optional<FloatsOutArg> rows, FloatsArg rates,
              const Step& step, uint32_t target, uint32_t stamp) {
  const RowLayout& layout = self.layout();
  require(layout.catch_up, "catch_up: the rows have no last step");
  require(slots.has_value() != rows.has_value(), "catch_up: expected slots or rows");
  require(step.optimizer == layout.optimizer, "step: its optimizer is not the optimizer of the tier");
  require(rates.shape(0) == 2 && rates.shape(1) > 0, "rates: expected two rows");
  if (rows) check_decoded(self, rows->shape(0), *rows);
  const auto limit = static_cast<uint32_t>(rates.shape(1));
  nb::gil_scoped_release release;
  const MissedSteps missed{step, rates.data(), rates.data() + limit, limit, target, stamp};
  if (rows) {
    const Rows buffer{reinterpret_cast<uint8_t*>(rows->data()), layout.bytes(), layout.dim};
    return catch_up_rows(self.pool(), buffer, nullptr, rows->shape(0), missed);
  }
  self.check_slots(slots->data(), slots->size());
  catch_up_rows(self.pool(), self.rows(), slots->data(), slots->size(), missed);
}

void decode(DramTier& self, FloatsArg stored, FloatsOutArg rows) {
  check_stored(self, rows.shape(0), stored);
  check_decoded(self, stored.shape(0), rows);
  require(!self.codec().plain(), "decode: fp32 rows have no codes");
  nb::gil_scoped_release release;
  decode_rows(self.pool(), self.codec(), reinterpret_cast<const uint8_t*>(stored.data()), rows.shape(0), rows.data());
}

void encode(DramTier& self, FloatsArg rows, FloatsOutArg stored) {
  check_decoded(self, stored.shape(0), rows);
  check_stored(self, rows.shape(0), stored);
  require(!self.codec().plain(), "encode: fp32 rows have no codes");
  nb::gil_scoped_release release;
  encode_rows(self.pool(), self.codec(), rows.data(), rows.shape(0), reinterpret_cast<uint8_t*>(stored.data()));
}

Step step_of(int optimizer, double lr, double eps, double weight_decay, double beta1, double beta2, uint64_t t,
             double grad_scale) {
  return make_step({static_cast<Optimizer>(optimizer), lr, eps, weight_decay, beta1, beta2}, t, grad_scale);
}

StatisticsStep statistics_step_of(uint32_t number, int64_t time,
                                  const std::vector<std::pair<uint32_t, float>>& decays) {
  StatisticsStep step{number, time, {}};
  for (const auto& [end, factor] : decays) step.decays.push_back({end, factor});
  return step;
}

void sum_clicks_of(DramTier& self, SlotsArg starts, SlotsArg grad_rows, IntsArg units, IntsOutArg clicks) {
  const size_t keys = clicks.size();
  require(starts.size() == keys + 1 && starts(0) == 0 && starts(keys) == grad_rows.size(),
          "starts: expected keys + 1 elements, from 0 to the number of ids");
  nb::gil_scoped_release release;
  require_below(grad_rows.data(), grad_rows.size(), units.size(), "grad_rows");
  sum_clicks(self.pool(), starts.data(), keys, grad_rows.data(), units.data(), clicks.data());
}

void update_statistics_of(DramTier& self, SlotsArg slots, IntsArg counts, std::optional<IntsArg> clicks,
                          const StatisticsStep& step) {
  require(counts.size() == slots.size(), "counts: expected one per slot");
  require(clicks ? clicks->size() == slots.size() : !(self.layout().statistics & kClick),
          "clicks: expected one per slot");
  nb::gil_scoped_release release;
  self.check_slots(slots.data(), slots.size());
  update_statistics(self.pool(), self.rows(), self.layout(), slots.data(), slots.size(), counts.data(),
                    clicks ? clicks->data() : nullptr, step);
}

void decay_of(const StatisticsStep& step, SlotsArg done, VectorOutArg values) {
  require(done.size() == values.size(), "done: expected one per value");
  nb::gil_scoped_release release;
  decay(step.decays, done.data(), done.size(), values.data());
}

}  // namespace

void bind_kernels(nb::module_& m, nb::class_<DramTier>& tier) {
  nb::class_<Dedup>(m, "Dedup").def(nb::init<int>(), "threads"_a).def("run", &dedup, "ids"_a.noconvert());
  nb::class_<Step>(m, "Step");
  m.def("make_step", &step_of, "optimizer"_a, "lr"_a, "eps"_a, "weight_decay"_a, "beta1"_a, "beta2"_a, "t"_a,
        "scale"_a);
  nb::class_<StatisticsStep>(m, "StatisticsStep").def("decay", &decay_of, "done"_a.noconvert(), "values"_a.noconvert());
  m.def("make_statistics_step", &statistics_step_of, "number"_a, "time"_a, "decays"_a);
  tier.def("sum_clicks", &sum_clicks_of, "starts"_a.noconvert(), "grad_rows"_a.noconvert(), "units"_a.noconvert(),
           "clicks"_a.noconvert())
      .def("update_statistics", &update_statistics_of, "slots"_a.noconvert(), "counts"_a.noconvert(),
           "clicks"_a.noconvert().none(), "step"_a)
      .def("decode", &decode, "stored"_a.noconvert(), "rows"_a.noconvert())
      .def("encode", &encode, "rows"_a.noconvert(), "stored"_a.noconvert())
      .def("set_scale", &DramTier::set_scale, "scale"_a)
      .def("plan", &plan, "slots"_a.noconvert(), "inverse"_a.noconvert(), "order"_a.noconvert(),
           "offsets"_a.noconvert().none(), "weights"_a.noconvert().none(), "mean"_a)
      .def("pool", &pool_tier, "slots"_a.noconvert(), "offsets"_a.noconvert().none(), "weights"_a.noconvert().none(),
           "mean"_a, "out"_a.noconvert())
      .def("pool_buffer", &pool_buffer, "rows"_a.noconvert(), "index"_a.noconvert(), "offsets"_a.noconvert().none(),
           "weights"_a.noconvert().none(), "mean"_a, "out"_a.noconvert())
      .def("weight_gradient", &weight_gradient_of, "rows"_a.noconvert().none(), "slots"_a.noconvert(),
           "offsets"_a.noconvert().none(), "mean"_a, "grads"_a.noconvert(), "out"_a.noconvert())
      .def("update", &update, "slots"_a.noconvert(), "starts"_a.noconvert(), "grad_rows"_a.noconvert(),
           "coefs"_a.noconvert().none(), "grads"_a.noconvert(), "step"_a, "statistics"_a.none() = nb::none(),
           "units"_a.noconvert().none() = nb::none())
      .def("sum_gradients", &sum, "starts"_a.noconvert(), "grad_rows"_a.noconvert(), "coefs"_a.noconvert().none(),
           "grads"_a.noconvert(), "sums"_a.noconvert())
      .def("apply_gradients", &apply, "slots"_a.noconvert(), "sums"_a.noconvert(), "step"_a)
      .def("catch_up", &catch_up, "slots"_a.noconvert().none(), "rows"_a.noconvert().none(), "rates"_a.noconvert(),
           "step"_a, "target"_a, "stamp"_a);
}

}  // namespace thermocline
