// The Python module thermocline.core._core.
#include <nanobind/nanobind.h>

#include "util/hash.h"

NB_MODULE(_core, m) {
  m.doc() = "Thermocline's C++ core.";
  m.def("hash_key", &thermocline::hash_key);
}
