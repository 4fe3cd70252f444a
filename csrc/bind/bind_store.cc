// Python bindings of SsdStore; src/thermocline/tiers/ssd.py is the Python class.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "bind/bind.h"
#include "ssd/repair.h"
#include "ssd/store.h"
#include "util/error.h"
#include "util/fs.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

template <typename Rows>
void check_rows(const SsdStore& store, size_t keys, const Rows& rows) {
  if (rows.shape(0) != keys || rows.shape(1) != store.row_bytes() || (keys > 0 && rows.stride(1) != 1)) {
    throw Error("rows have shape (" + std::to_string(rows.shape(0)) + ", " + std::to_string(rows.shape(1)) +
                ") in bytes, expected (" + std::to_string(keys) + ", " + std::to_string(store.row_bytes()) +
                ") with contiguous rows");
  }
}

IoEngine engine_named(const std::string& name) {
  if (name == "auto") return IoEngine::kAuto;
  if (name == "io_uring") return IoEngine::kUring;
  if (name == "pread") return IoEngine::kPread;
  throw Error("io_engine is '" + name + "'; it must be auto, io_uring or pread");
}

std::unique_ptr<SsdStore> open_store(const nb::bytes& path, const StoreOptions& options, const std::string& io_engine,
                                     int io_workers, int io_depth) {
  return unlocked([&, folder = to_string(path)] {
    return SsdStore::open(make_posix_fs(engine_named(io_engine), io_workers, io_depth), folder, options);
  });
}

void get(SsdStore& self, KeysArg keys, BytesArg found, RowsOutArg rows) {
  check_rows(self, keys.size(), rows);
  if (found.size() != keys.size()) throw Error("found must have one byte per key");
  RowsOut out{rows.data(), static_cast<size_t>(rows.stride(0))};
  unlocked([&, k = keys.data(), n = keys.size(), f = found.data()] { self.get(k, n, f, out); });
}

void put(SsdStore& self, KeysArg keys, RowsInArg rows) {
  check_rows(self, keys.size(), rows);
  RowsIn in{rows.data(), static_cast<size_t>(rows.stride(0))};
  unlocked([&, k = keys.data(), n = keys.size()] { self.put(k, n, in); });
}

void load(SsdStore& self, KeysArg keys, RowsInArg rows) {
  check_rows(self, keys.size(), rows);
  RowsIn in{rows.data(), static_cast<size_t>(rows.stride(0))};
  unlocked([&, k = keys.data(), n = keys.size()] { self.load(k, n, in); });
}

void erase(SsdStore& self, KeysArg keys) {
  unlocked([&, k = keys.data(), n = keys.size()] { self.erase(k, n); });
}

double read_floor(SsdStore& self, KeysArg keys) {
  return unlocked([&, k = keys.data(), n = keys.size()] { return self.read_floor(k, n); });
}

nb::dict stats(const SsdStore& self) {
  StoreStats s = unlocked([&] { return self.stats(); });
  nb::dict d;
  d["epoch"] = s.epoch;
  d["rows_in_base"] = s.rows_in_base;
  d["rows_in_log"] = s.rows_in_log;
  d["disk_bytes"] = s.disk_bytes;
  d["live_files"] = s.live_files;
  d["partitions"] = s.partitions;
  d["log_bytes"] = s.log_bytes;
  d["base_bytes"] = s.base_bytes;
  d["mem_index"] = s.mem_index;
  d["mem_buffers"] = s.mem_buffers;
  d["mem_total"] = s.mem_total;
  d["mem_spare"] = s.mem_spare;
  d["mem_budget"] = s.mem_budget;
  d["keys_read"] = s.keys_read;
  d["pages_read"] = s.pages_read;
  d["reads"] = s.reads;
  d["bytes_read"] = s.bytes_read;
  d["false_pages"] = s.false_pages;
  d["get_scratch_peak"] = s.get_scratch_peak;
  d["bytes_put"] = s.bytes_put;
  d["bytes_written"] = s.bytes_written;
  d["merges"] = s.merges;
  d["merge_bytes_read"] = s.merge_bytes_read;
  d["merge_bytes_written"] = s.merge_bytes_written;
  d["merge_threads"] = s.merge_threads;
  d["merges_running"] = s.merges_running;
  d["merge_seconds"] = s.merge_seconds;
  d["stall_seconds"] = s.stall_seconds;
  d["read_cost_us"] = s.read_cost_us;
  d["page_cost_us"] = s.page_cost_us;
  d["engine"] = s.engine;
  d["damage"] = s.damage;
  d["damaged_partitions"] = s.damaged_partitions;
  d["set_aside_log_bytes"] = s.set_aside_log_bytes;
  d["set_aside_log_bound"] = s.set_aside_log_bound;
  d["filter_given_up"] = s.filter_given_up;
  return d;
}

nb::dict repair(const nb::bytes& path, bool dry_run, bool keep_older, size_t mem_budget) {
  const RepairOptions options{dry_run, keep_older, mem_budget};
  const RepairReport report =
      unlocked([&, folder = to_string(path)] { return repair_store(make_posix_fs(), folder, options); });
  nb::list rebuilt, losses, commits;
  for (auto& r : report.rebuilt) {
    nb::dict d;
    d["file"] = r.file;
    d["cause"] = r.cause;
    rebuilt.append(d);
  }
  for (auto& l : report.losses) {
    nb::dict d;
    d["file"] = l.file;
    d["cause"] = l.cause;
    d["first_page"] = l.first_page;
    d["pages"] = l.pages;
    d["rows"] = l.rows;
    d["lo"] = l.lo;
    d["hi"] = l.hi;
    d["epochs"] = l.epochs;
    losses.append(d);
  }
  for (auto& c : report.lost_commits) {
    nb::dict d;
    d["epoch"] = c.epoch;
    d["cause"] = c.cause;
    commits.append(d);
  }
  nb::dict out;
  out["epoch"] = report.epoch;
  out["rebuilt"] = rebuilt;
  out["losses"] = losses;
  out["lost_commits"] = commits;
  out["rows_hidden"] = report.rows_hidden;
  out["set_aside"] = report.set_aside;
  return out;
}

// A scan and its row size.
struct BoundScan {
  std::unique_ptr<SsdStore::Scan> scan;  // null: closed
  size_t row_bytes;

  SsdStore::Scan& opened() const {
    if (!scan) throw Error("scan: it is closed");
    return *scan;
  }

  size_t next(nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> keys,
              nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows) {
    if (rows.shape(0) != keys.size() || rows.shape(1) > row_bytes)
      throw Error("scan: rows must have shape (keys, row_bytes), or fewer bytes: the last ones of a row");
    return unlocked([&, k = keys.data(), n = keys.size(), r = rows.data(), skip = row_bytes - rows.shape(1)] {
      return opened().next(n, k, r, skip);
    });
  }

  std::optional<size_t> changed(uint64_t lo, uint64_t hi,
                                nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> keys,
                                nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows,
                                BytesArg deleted) {
    if (rows.shape(0) != keys.size() || rows.shape(1) != row_bytes || deleted.size() != keys.size())
      throw Error("scan: rows must have shape (keys, row_bytes), deleted one byte per key");
    return unlocked([&, k = keys.data(), n = keys.size(), r = rows.data(), d = deleted.data()] {
      return opened().changed({lo, hi}, n, k, r, d);
    });
  }
};

BoundScan scan(SsdStore& self, uint64_t lo, uint64_t hi) {
  return unlocked([&] { return BoundScan{self.scan({lo, hi}), self.row_bytes()}; });
}

std::optional<BoundScan> follow(SsdStore& self, uint64_t lo, uint64_t hi, uint64_t kept, uint64_t buffers) {
  return unlocked([&] {
    auto scan = self.follow({lo, hi}, kept, buffers);
    return scan ? std::optional(BoundScan{std::move(scan), self.row_bytes()}) : std::nullopt;
  });
}

// Changes since a position, and their row size.
struct BoundChanges {
  std::unique_ptr<SsdStore::Changes> changes;
  size_t row_bytes;

  size_t next(nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> keys,
              nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows, BytesArg deleted) {
    if (rows.shape(0) != keys.size() || rows.shape(1) != row_bytes || deleted.size() != keys.size())
      throw Error("changes: rows must have shape (keys, row_bytes), deleted one byte per key");
    return unlocked([&, k = keys.data(), n = keys.size(), r = rows.data(), d = deleted.data()] {
      return changes->next(n, k, r, d);
    });
  }
};

using PositionTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t>;

PositionTuple position(SsdStore& self) {
  const StorePosition p = unlocked([&] { return self.position(); });
  return {p.store_id[0], p.store_id[1], p.seq, p.nonce, p.first_page};
}

StorePosition position_of(const PositionTuple& given) {
  StorePosition p;
  std::tie(p.store_id[0], p.store_id[1], p.seq, p.nonce, p.first_page) = given;
  return p;
}

void keep_log(SsdStore& self, const PositionTuple& since, bool replace) {
  unlocked([&] { self.keep_log(position_of(since), replace); });
}

std::variant<BoundChanges, std::string> changes_since(SsdStore& self, const PositionTuple& since) {
  const StorePosition from = position_of(since);
  std::string cause;
  auto changes = unlocked([&] { return self.changes_since(from, &cause); });
  if (!changes) return cause;
  return BoundChanges{std::move(changes), self.row_bytes()};
}

void bind_options(nb::module_& m) {
  nb::class_<StoreOptions>(m, "StoreOptions")
      .def(nb::init<>())
      .def_rw("row_bytes", &StoreOptions::row_bytes)
      .def_rw("create", &StoreOptions::create)
      .def_rw("read_only", &StoreOptions::read_only)
      .def_rw("epoch", &StoreOptions::epoch)
      .def_rw("mem_budget", &StoreOptions::mem_budget)
      .def_rw("expected_rows", &StoreOptions::expected_rows)
      .def_rw("max_log_ratio", &StoreOptions::max_log_ratio)
      .def_rw("filter_bits", &StoreOptions::filter_bits)
      .def_rw("write_buffer", &StoreOptions::write_buffer)
      .def_rw("segment_bytes", &StoreOptions::segment_bytes)
      .def_rw("partition_bytes", &StoreOptions::partition_bytes)
      .def_rw("min_log_bytes", &StoreOptions::min_log_bytes)
      .def_rw("background_merge", &StoreOptions::background_merge)
      .def_rw("merge_threads", &StoreOptions::merge_threads);
}

}  // namespace

void bind_store(nb::module_& m) {
  bind_options(m);
  m.def("repair_store", &repair, "path"_a, "dry_run"_a, "keep_older"_a, "mem_budget"_a);
  nb::class_<BoundScan>(m, "Scan")
      .def("next", &BoundScan::next, "keys"_a.noconvert(), "rows"_a.noconvert())
      .def("changed", &BoundScan::changed, "lo"_a, "hi"_a, "keys"_a.noconvert(), "rows"_a.noconvert(),
           "deleted"_a.noconvert())
      .def_prop_ro("lost", [](const BoundScan& self) { return self.opened().lost(); })
      .def("close", [](BoundScan& self) { unlocked([&] { self.scan.reset(); }); });
  nb::class_<BoundChanges>(m, "StoreChanges")
      .def("next", &BoundChanges::next, "keys"_a.noconvert(), "rows"_a.noconvert(), "deleted"_a.noconvert())
      .def_prop_ro("rows", [](const BoundChanges& self) { return self.changes->rows(); });
  nb::class_<RowStore>(m, "RowStore").def_prop_ro("row_bytes", &RowStore::row_bytes);
  nb::class_<SsdStore, RowStore>(m, "SsdStore")
      .def_static("open", &open_store, "path"_a, "options"_a, "io_engine"_a, "io_workers"_a, "io_depth"_a)
      .def("get", &get, "keys"_a.noconvert(), "found"_a.noconvert(), "rows"_a.noconvert())
      .def("put", &put, "keys"_a.noconvert(), "rows"_a.noconvert())
      .def("load", &load, "keys"_a.noconvert(), "rows"_a.noconvert())
      .def("erase", &erase, "keys"_a.noconvert())
      .def("commit",
           [](SsdStore& self, const nb::bytes& note) {
             return unlocked([&, text = to_string(note)] { return self.commit(text); });
           })
      .def("epoch", [](const SsdStore& self) { return unlocked([&] { return self.epoch(); }); })
      .def("note",
           [](const SsdStore& self) {
             std::string note = unlocked([&] { return self.note(); });
             return nb::bytes(note.data(), note.size());
           })
      .def("epochs", [](const SsdStore& self) { return unlocked([&] { return self.epochs(); }); })
      .def("release", [](SsdStore& self, uint64_t epoch) { unlocked([&] { self.release(epoch); }); })
      .def("scan", &scan, "lo"_a, "hi"_a, nb::keep_alive<0, 1>())
      .def("follow", &follow, "lo"_a, "hi"_a, "kept"_a, "buffers"_a, nb::keep_alive<0, 1>())
      .def("position", &position)
      .def("keep_log", &keep_log, "since"_a, "replace"_a)
      .def("changes_since", &changes_since, "since"_a)
      .def("count", [](SsdStore& self) { return unlocked([&] { return self.count(); }); })
      .def("stats", &stats)
      .def("damage", [](const SsdStore& self) { return unlocked([&] { return self.damage(); }); })
      .def("take_warnings", [](SsdStore& self) { return unlocked([&] { return self.take_warnings(); }); })
      .def("read_floor", &read_floor, "keys"_a.noconvert())
      .def("check", [](SsdStore& self) { unlocked([&] { self.check(); }); })
      .def("find_damage", [](SsdStore& self) { return unlocked([&] { return self.find_damage(); }); })
      .def("merge_all", [](SsdStore& self) { unlocked([&] { self.merge_all(); }); })
      .def("link_checkpoint",
           [](SsdStore& self, const nb::bytes& path) {
             unlocked([&, folder = to_string(path)] { self.link_checkpoint(folder); });
           })
      .def("close", [](SsdStore& self) { unlocked([&] { self.close(); }); });
}

}  // namespace thermocline
