// What ranks of one machine do with each other's rows, and how one waits for another.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "bind/bind.h"
#include "dram/exchange_rows.h"
#include "util/signal.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

using PlacesArg = Array<int64_t>;
using FloatsArg = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOutArg = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using StridedOutArg = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using NumbersArg = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_places(const PlacesArg& places, size_t most) {
  for (size_t i = 0; i < places.shape(0); ++i) {
    require(static_cast<uint64_t>(places.data()[i]) < most, "rows of ranks: a place beyond the rows");
  }
}

void bind_take_rows(FloatsOutArg out, FloatsArg rows, PlacesArg places) {
  const size_t n = places.shape(0), dim = rows.shape(1);
  require(out.shape(0) == n && out.shape(1) == dim, "take_rows: as many rows as places, as wide");
  check_places(places, rows.shape(0));
  float* const to = out.data();
  const float* const from = rows.data();
  const int64_t* const chosen = places.data();
  nb::gil_scoped_release release;
  take_rows(to, dim, from, chosen, n);
}

void bind_put_rows(StridedOutArg out, FloatsArg rows, PlacesArg places) {
  const size_t n = places.shape(0), dim = rows.shape(1);
  require(rows.shape(0) == n && out.shape(1) == dim, "put_rows: a row per place, as wide");
  if (n == 0) return;  // strides of nothing mean nothing
  require(dim < 2 || out.stride(1) == 1, "put_rows: rows in one piece each");
  check_places(places, out.shape(0));
  const auto stride = static_cast<size_t>(out.stride(0));
  float* const to = out.data();
  const float* const from = rows.data();
  const int64_t* const chosen = places.data();
  nb::gil_scoped_release release;
  put_rows(to, stride, dim, from, chosen, n);
}

void bind_add_rows(FloatsOutArg totals, BytesArg present, PlacesArg places, FloatsArg rows,
                   std::optional<Array<uint8_t>> given) {
  const size_t n = places.shape(0), most = totals.shape(0), dim = totals.shape(1);
  require(present.shape(0) == most && rows.shape(0) == n && rows.shape(1) == dim && (!given || given->shape(0) == n),
          "add_rows: a flag per total, a row and a flag per place, rows as wide as totals");
  check_places(places, most);
  float* const sums = totals.data();
  uint8_t* const flags = present.data();
  const int64_t* const to = places.data();
  const float* const from = rows.data();
  const uint8_t* const chosen = given ? given->data() : nullptr;
  nb::gil_scoped_release release;
  add_rows(sums, flags, dim, to, from, chosen, n);
}

void bind_raise_number(NumbersArg number, uint64_t to) {
  require(number.shape(0) > 0, "publish_sequence: no number");
  raise_number(number.data(), to);
}

bool bind_wait_for_number(NumbersArg number, uint64_t wanted, double seconds) {
  require(number.shape(0) > 0, "wait_sequence: no number");
  uint64_t* const shared = number.data();
  nb::gil_scoped_release release;
  return wait_for_number(shared, wanted, seconds);
}

}  // namespace

void bind_dist(nb::module_& m) {
  m.def("take_rows", &bind_take_rows, "out"_a, "rows"_a, "places"_a);
  m.def("put_rows", &bind_put_rows, "out"_a, "rows"_a, "places"_a);
  m.def("add_rows", &bind_add_rows, "totals"_a, "present"_a, "places"_a, "rows"_a, "given"_a.none());
  m.def("publish_sequence", &bind_raise_number, "number"_a, "to"_a);
  m.def("wait_sequence", &bind_wait_for_number, "number"_a, "wanted"_a, "seconds"_a);
}

}  // namespace thermocline
