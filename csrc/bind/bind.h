// Parts of the Python module, and the types they share.
//
// The Python package checks arguments and reports errors to users. The bindings check again what memory safety depends
// on. Every call that accesses rows or files reads its raw pointers first and then releases the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "util/error.h"

namespace thermocline {

template <typename T>
using Array = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using KeysArg = Array<uint64_t>;
using BytesArg = nanobind::ndarray<uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using RowsInArg = nanobind::ndarray<const uint8_t, nanobind::ndim<2>, nanobind::device::cpu>;
using RowsOutArg = nanobind::ndarray<uint8_t, nanobind::ndim<2>, nanobind::device::cpu>;

inline std::string to_string(const nanobind::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// Runs fn without the GIL.
template <typename Fn>
auto unlocked(Fn&& fn) {
  nanobind::gil_scoped_release release;
  return fn();
}

inline void require(bool condition, const char* message) {
  if (!condition) throw Error(message);
}

void bind_store(nanobind::module_& m);
void bind_dram(nanobind::module_& m);
void bind_dist(nanobind::module_& m);
void bind_data(nanobind::module_& m);
void bind_read(nanobind::module_& m);
void bind_hashing(nanobind::module_& m);
void bind_metrics(nanobind::module_& m);
void bind_serving(nanobind::module_& m);
void bind_admission(nanobind::module_& m);

}  // namespace thermocline
