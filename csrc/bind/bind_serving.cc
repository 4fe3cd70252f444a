// Python bindings of snapshot files and views; src/thermocline/serving is the Python package.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "dram/initial.h"
#include "serving/snapshot_writer.h"
#include "serving/view.h"
#include "util/fs.h"
#include "util/posix_file.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

using serving::SnapshotFile;
using serving::SnapshotWriter;
using serving::View;
using FloatsOutArg = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

serving::RowFormat row_format(const std::string& name) {
  if (name == "fp32") return serving::RowFormat::kFp32;
  if (name == "fp16") return serving::RowFormat::kFp16;
  if (name == "int8") return serving::RowFormat::kInt8;
  throw Error("precision is '" + name + "'; it must be fp32, fp16 or int8");
}

void append(SnapshotWriter& self, KeysArg keys, RowsInArg rows) {
  require(rows.shape(0) == keys.size() && rows.shape(1) == self.row_bytes(), "rows must be bytes[keys, row_bytes]");
  require(keys.size() == 0 || rows.stride(1) == 1, "rows must be contiguous");
  RowsIn in{rows.data(), static_cast<size_t>(rows.stride(0))};
  unlocked([&, k = keys.data(), n = keys.size()] { self.append(k, n, in); });
}

void lookup(const View& self, KeysArg keys, BytesArg found, FloatsOutArg out) {
  require(found.size() == keys.size() && out.shape(0) == keys.size() && out.shape(1) == self.dim(),
          "found must have one byte per key, out must be float32[keys, dim]");
  unlocked([&, k = keys.data(), n = keys.size(), f = found.data(), o = out.data()] { self.lookup(k, n, f, o); });
}

size_t scan(View::Scan& self, nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> keys,
            nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows) {
  require(rows.shape(0) == keys.size() && rows.shape(1) == self.row_bytes(), "rows must be bytes[keys, row_bytes]");
  return unlocked([&, k = keys.data(), n = keys.size(), r = rows.data()] { return self.next(n, k, r); });
}

void copy_rows(const SnapshotFile& self, uint64_t first,
               nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> keys,
               nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows) {
  require(rows.shape(0) == keys.size() && rows.shape(1) == self.row_bytes(), "rows must be bytes[keys, row_bytes]");
  unlocked([&, k = keys.data(), n = keys.size(), r = rows.data()] { self.copy_rows(first, n, k, r); });
}

// Writes the initial weights of the keys that were not found.
void fill_initial(KeysArg keys, Array<uint8_t> found, FloatsOutArg out, int kind, float scale, uint64_t seed,
                  uint64_t table) {
  require(kind >= 0 && kind <= 2, "unknown initializer");
  require(found.size() == keys.size() && out.shape(0) == keys.size(), "arrays must have one row per key");
  auto dim = static_cast<uint32_t>(out.shape(1));
  InitialRows initial({static_cast<InitialKind>(kind), scale, 0, seed, table},
                      {.dim = dim, .optimizer = Optimizer::kSgd});
  unlocked([&, k = keys.data(), n = keys.size(), f = found.data(), o = out.data()] {
    for (size_t i = 0; i < n; ++i)
      if (!f[i]) initial.write(k[i], o + i * dim);
  });
}

}  // namespace

void bind_serving(nb::module_& m) {
  nb::class_<SnapshotWriter>(m, "SnapshotWriter")
      .def(
          "__init__",
          [](SnapshotWriter* self, const nb::bytes& path, uint32_t row_bytes) {
            // Nothing is read: no ring is needed.
            new (self) SnapshotWriter(make_posix_fs(IoEngine::kPread), to_string(path), row_bytes);
          },
          "path"_a, "row_bytes"_a)
      .def("append", append, "keys"_a, "rows"_a)
      .def(
          "erase",
          [](SnapshotWriter& self, KeysArg keys) {
            unlocked([&, k = keys.data(), n = keys.size()] { self.erase(k, n); });
          },
          "keys"_a)
      .def("finish", [](SnapshotWriter& self) { unlocked([&] { self.finish(); }); })
      .def_prop_ro("rows", &SnapshotWriter::rows)
      .def_prop_ro("deleted", &SnapshotWriter::deleted)
      .def_prop_ro("bytes", &SnapshotWriter::bytes);

  m.def(
      "sync_files",
      [](const std::vector<nb::bytes>& paths) {
        std::vector<std::string> files;
        for (const nb::bytes& path : paths) files.push_back(to_string(path));
        unlocked([&] { sync_files(files); });
      },
      "paths"_a);

  // The lambdas drop the const of the shared pointer: nanobind holds non-const objects, and View has no other methods.
  auto held = [](std::shared_ptr<const View> view) { return std::const_pointer_cast<View>(std::move(view)); };
  nb::class_<View>(m, "SnapshotView")
      .def_static(
          "open",
          [held](const nb::bytes& path, const std::string& precision, uint32_t dim) {
            return held(unlocked([&, file = to_string(path)] { return View::open(file, row_format(precision), dim); }));
          },
          "path"_a, "precision"_a, "dim"_a)
      .def(
          "with_delta",
          [held](const View& self, const nb::bytes& path) {
            return held(unlocked([&, file = to_string(path)] { return self.with_delta(file); }));
          },
          "path"_a)
      .def("with_direct_reads",
           [held](const View& self) { return held(unlocked([&] { return self.with_direct_reads(make_posix_fs()); })); })
      .def("read_floor",
           [](const View& self, KeysArg keys) {
             return unlocked([&, k = keys.data(), n = keys.size()] { return self.read_floor(k, n); });
           })
      .def("lookup", lookup, "keys"_a, "found"_a, "out"_a)
      .def("verify", [](const View& self) { unlocked([&] { self.verify(); }); })
      .def(
          "scan", [](std::shared_ptr<View> self) { return new View::Scan(std::move(self)); },
          nb::rv_policy::take_ownership)
      .def_prop_ro("row_bytes", &View::row_bytes)
      .def_prop_ro("base_rows", &View::base_rows)
      .def_prop_ro("changed_rows", &View::changed_rows)
      .def_prop_ro("mem_bytes", &View::mem_bytes);

  nb::class_<SnapshotFile>(m, "SnapshotFile")
      .def(
          "__init__",
          [](SnapshotFile* self, const nb::bytes& path) {
            unlocked([&, file = to_string(path)] { new (self) SnapshotFile(file); });
          },
          "path"_a)
      .def("copy_rows", copy_rows, "first"_a, "keys"_a, "rows"_a)
      .def("verify", [](const SnapshotFile& self) { unlocked([&] { self.verify(); }); })
      .def_prop_ro("rows", &SnapshotFile::rows)
      .def_prop_ro("row_bytes", &SnapshotFile::row_bytes)
      .def_prop_ro("deleted", [](const SnapshotFile& self) {
        const auto keys = self.deleted();
        return nb::ndarray<nb::numpy, const uint64_t, nb::ndim<1>>(keys.data(), {keys.size()}, nb::find(self));
      });

  nb::class_<View::Scan>(m, "SnapshotScan").def("next", scan, "keys"_a, "rows"_a);
  m.def("fill_initial", fill_initial, "keys"_a, "found"_a, "out"_a, "kind"_a, "scale"_a, "seed"_a, "table"_a);
}

}  // namespace thermocline
