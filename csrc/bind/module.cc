// The Python module thermocline.core._core: translation of exceptions, and the parts of bind.h.
#include <nanobind/nanobind.h>

#include "bind/bind.h"
#include "util/error.h"

namespace nb = nanobind;

namespace thermocline {
namespace {

// The classes of thermocline/errors.py. Set by the initialisation of the module and never freed: exceptions can be
// raised until the interpreter ends.
struct ErrorTypes {
  nb::handle base, budget, corruption, lock, format, read_only, not_found, io, disk_full;
};
ErrorTypes types;

void load_error_types() {
  nb::module_ errors = nb::module_::import_("thermocline.errors");
  auto type = [&](const char* name) { return nb::object(errors.attr(name)).release(); };
  types = {.base = type("ThermoclineError"),
           .budget = type("BudgetError"),
           .corruption = type("CorruptionError"),
           .lock = type("LockError"),
           .format = type("FormatError"),
           .read_only = type("ReadOnlyError"),
           .not_found = type("NotFoundError"),
           .io = type("IoError"),
           .disk_full = type("DiskFullError")};
}

// Messages contain paths, which may not be valid UTF-8.
nb::object text_of(const std::exception& error) { return nb::steal(PyUnicode_DecodeFSDefault(error.what())); }

void raise(nb::handle type, const std::exception& error) { PyErr_SetObject(type.ptr(), text_of(error).ptr()); }

// As OSError: arguments (errno, message) if there is an errno.
void raise_io(nb::handle type, const IoError& error) {
  if (error.code == 0) return raise(type, error);
  PyErr_SetObject(type.ptr(), nb::make_tuple(error.code, text_of(error)).ptr());
}

void translate(const std::exception_ptr& pending, void*) {
  try {
    std::rethrow_exception(pending);
  } catch (const CorruptionError& error) {
    raise(types.corruption, error);
  } catch (const LockError& error) {
    raise(types.lock, error);
  } catch (const FormatError& error) {
    raise(types.format, error);
  } catch (const BudgetError& error) {
    raise(types.budget, error);
  } catch (const ReadOnlyError& error) {
    raise(types.read_only, error);
  } catch (const NotFoundError& error) {
    raise(types.not_found, error);
  } catch (const DiskFullError& error) {
    raise_io(types.disk_full, error);
  } catch (const IoError& error) {
    raise_io(types.io, error);
  } catch (const Error& error) {
    raise(types.base, error);
  }
}

}  // namespace
}  // namespace thermocline

NB_MODULE(_core, m) {
  using namespace thermocline;
  m.doc() = "Thermocline's C++ core; use it through thermocline.tiers.";
  // A script may end while torch's graph still refers to a batch: nanobind would report that as a leak.
  nb::set_leak_warnings(false);
  load_error_types();
  nb::register_exception_translator(translate);
  bind_store(m);
  bind_dram(m);
  bind_dist(m);
  bind_data(m);
  bind_read(m);
  bind_hashing(m);
  bind_metrics(m);
  bind_serving(m);
  bind_admission(m);
}
