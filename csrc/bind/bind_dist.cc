// Python bindings for ranks of one machine: row exchange, and sequence numbers in shared memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "bind/bind.h"
#include "dram/exchange_rows.h"
#include "util/sequence.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

using IndexArg = Array<int64_t>;
using FloatsArg = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOutArg = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using StridedOutArg = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using SequenceArg = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_index(const IndexArg& index, size_t most) {
  for (size_t i = 0; i < index.shape(0); ++i) {
    require(static_cast<uint64_t>(index.data()[i]) < most,
            "index: an element is negative or not below the number of rows");
  }
}

void bind_take_rows(FloatsOutArg out, FloatsArg rows, IndexArg index) {
  const size_t n = index.shape(0), dim = rows.shape(1);
  require(out.shape(0) == n && out.shape(1) == dim, "take_rows: out must have one row per index, as wide as rows");
  check_index(index, rows.shape(0));
  float* const to = out.data();
  const float* const from = rows.data();
  const int64_t* const chosen = index.data();
  nb::gil_scoped_release release;
  take_rows(to, dim, from, chosen, n);
}

void bind_put_rows(StridedOutArg out, FloatsArg rows, IndexArg index) {
  const size_t n = index.shape(0), dim = rows.shape(1);
  require(rows.shape(0) == n && out.shape(1) == dim, "put_rows: rows must have one row per index, as wide as out");
  if (n == 0) return;  // the strides of an empty array are undefined
  require(dim < 2 || out.stride(1) == 1, "put_rows: each row of out must be contiguous");
  check_index(index, out.shape(0));
  const auto stride = static_cast<size_t>(out.stride(0));
  float* const to = out.data();
  const float* const from = rows.data();
  const int64_t* const chosen = index.data();
  nb::gil_scoped_release release;
  put_rows(to, stride, dim, from, chosen, n);
}

void bind_add_rows(FloatsOutArg totals, BytesArg present, IndexArg index, FloatsArg rows,
                   std::optional<Array<uint8_t>> given) {
  const size_t n = index.shape(0), most = totals.shape(0), dim = totals.shape(1);
  require(present.shape(0) == most && rows.shape(0) == n && rows.shape(1) == dim && (!given || given->shape(0) == n),
          "add_rows: expected one flag per total, one row and one flag per index, rows as wide as totals");
  check_index(index, most);
  float* const sums = totals.data();
  uint8_t* const flags = present.data();
  const int64_t* const to = index.data();
  const float* const from = rows.data();
  const uint8_t* const chosen = given ? given->data() : nullptr;
  nb::gil_scoped_release release;
  add_rows(sums, flags, dim, to, from, chosen, n);
}

void bind_publish_sequence(SequenceArg sequence, uint64_t value) {
  require(sequence.shape(0) > 0, "publish_sequence: the array is empty");
  publish_sequence(sequence.data(), value);
}

bool bind_wait_sequence(SequenceArg sequence, uint64_t value, double seconds) {
  require(sequence.shape(0) > 0, "wait_sequence: the array is empty");
  uint64_t* const shared = sequence.data();
  nb::gil_scoped_release release;
  return wait_sequence(shared, value, seconds);
}

}  // namespace

void bind_dist(nb::module_& m) {
  m.def("take_rows", &bind_take_rows, "out"_a, "rows"_a, "index"_a);
  m.def("put_rows", &bind_put_rows, "out"_a, "rows"_a, "index"_a);
  m.def("add_rows", &bind_add_rows, "totals"_a, "present"_a, "index"_a, "rows"_a, "given"_a.none());
  m.def("publish_sequence", &bind_publish_sequence, "sequence"_a, "value"_a);
  m.def("wait_sequence", &bind_wait_sequence, "sequence"_a, "value"_a, "seconds"_a);
}

}  // namespace thermocline
