// Argument types and checks shared by the bindings of the DRAM tier.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>
#include <string>

#include "bind/bind.h"
#include "dram/tier.h"
#include "util/error.h"

namespace thermocline {

using SlotsArg = Array<uint32_t>;
using SlotsOutArg = nanobind::ndarray<uint32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using KeysOutArg = nanobind::ndarray<uint64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using IntsArg = Array<int64_t>;
using IntsOutArg = nanobind::ndarray<int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using MaybeFloats = std::optional<Array<float>>;
using MaybeOffsets = std::optional<Array<int64_t>>;
using FloatsArg = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using FloatsOutArg = nanobind::ndarray<float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using VectorOutArg = nanobind::ndarray<float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <typename RowsArg>
void check_shape(const RowsArg& rows, size_t count, size_t words) {
  if (rows.shape(0) != count || rows.shape(1) != words) {
    throw Error("rows have shape (" + std::to_string(rows.shape(0)) + ", " + std::to_string(rows.shape(1)) +
                "), expected (" + std::to_string(count) + ", " + std::to_string(words) + ")");
  }
}

// Stored rows: words of four bytes, fp32 or codes.
template <typename RowsArg>
void check_stored(const DramTier& tier, size_t count, const RowsArg& rows) {
  check_shape(rows, count, tier.layout().bytes() / sizeof(float));
}

// Decoded rows: fp32 weights and state.
template <typename RowsArg>
void check_decoded(const DramTier& tier, size_t count, const RowsArg& rows) {
  check_shape(rows, count, tier.layout().floats());
}

// Adds the training kernels to the class DramTier (bind_kernels.cc).
void bind_kernels(nanobind::module_& m, nanobind::class_<DramTier>& tier);

}  // namespace thermocline
