// Python bindings of text parsers and columns; used by the readers of src/thermocline/data.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bind/bind.h"
#include "bind/to_numpy.h"
#include "data/columns.h"
#include "data/gather.h"
#include "data/hash_value.h"
#include "data/parse.h"
#include "util/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

using Mask = std::optional<Array<bool>>;
using BucketArg = std::variant<double, std::string>;
using ColumnArg = std::tuple<std::string, std::string, bool, double, double, BucketArg>;

template <typename T>
nb::object numpy_or_none(Grown<T> array) {
  return array.size() == 0 ? nb::none() : nb::cast(to_numpy(std::move(array)));
}

// The bytes of an object with the buffer protocol. Construct and destroy it with the GIL held.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::string_view bytes() const { return {static_cast<const char*>(view_.buf), static_cast<size_t>(view_.len)}; }

 private:
  Py_buffer view_;
};

NumberRule make_rule(bool log, double mean, double inverse_deviation, const BucketArg& bucket) {
  NumberRule rule{.log = log, .mean = mean, .inverse_deviation = inverse_deviation};
  if (const double* width = std::get_if<double>(&bucket)) {
    rule.bucket = Bucket::kWidth;
    rule.width = *width;
  } else if (const auto& name = std::get<std::string>(bucket); name == "log_square") {
    rule.bucket = Bucket::kLogSquare;
  } else if (name != "none") {
    throw Error("bucket is \"" + name + "\"; it must be a width, \"log_square\" or \"none\"");
  }
  return rule;
}

Role role_of(const std::string& name) {
  if (name == "label") return Role::kLabel;
  if (name == "key") return Role::kKey;
  if (name == "dense") return Role::kDense;
  if (name == "number_key") return Role::kNumberKey;
  if (name == "time") return Role::kTime;
  if (name == "ignore") return Role::kIgnore;
  throw Error("role of a column is \"" + name + "\"; it must be label, key, dense, number_key, time or ignore");
}

void init_parser(TextParser* self, const std::string& kind, const std::string& delimiter, bool quoting,
                 const std::vector<ColumnArg>& columns, size_t fields, bool one_bag, bool raw_keys) {
  ParseOptions options{.quoting = quoting, .fields = fields, .one_bag = one_bag, .raw_keys = raw_keys};
  if (kind == "table") {
    options.format = Format::kTable;
  } else if (kind == "libffm") {
    options.format = Format::kLibffm;
  } else if (kind != "libsvm") {
    throw Error("kind is \"" + kind + "\"; it must be libsvm, libffm or table");
  }
  if (delimiter.size() != 1) throw Error("delimiter is \"" + delimiter + "\"; it must be one byte");
  options.delimiter = delimiter[0];
  for (const auto& [role, name, log, mean, inverse_deviation, bucket] : columns) {
    options.columns.push_back({role_of(role), name, make_rule(log, mean, inverse_deviation, bucket)});
  }
  nb::gil_scoped_release release;
  new (self) TextParser(std::move(options));
}

nb::tuple parse(const TextParser& self, nb::handle block, bool skip_errors) {
  const Buffer buffer(block);
  Parsed parsed;
  {
    nb::gil_scoped_release release;
    parsed = self.parse(buffer.bytes(), skip_errors);
  }
  nb::list errors;
  for (const Malformed& error : parsed.errors) {
    // The values in a message may not be valid UTF-8.
    errors.append(nb::make_tuple(
        error.line,
        nb::steal(PyUnicode_DecodeUTF8(error.cause.data(), static_cast<Py_ssize_t>(error.cause.size()), "replace"))));
  }
  return nb::make_tuple(
      to_numpy(std::move(parsed.ids)), to_numpy(std::move(parsed.offsets)), numpy_or_none(std::move(parsed.weights)),
      to_numpy(std::move(parsed.dense)), to_numpy(std::move(parsed.labels)),
      self.has_time() ? nb::cast(to_numpy(std::move(parsed.times))) : nb::none(), errors, parsed.malformed);
}

Validity validity(const Mask& mask, size_t n) {
  if (!mask) return {nullptr};
  if (mask->size() != n) {
    throw Error("a column has " + std::to_string(n) + " values, but a mask of " + std::to_string(mask->size()));
  }
  return {reinterpret_cast<const uint8_t*>(mask->data())};
}

template <typename Offset>
auto hash_strings_of(const std::string& field, Array<Offset> offsets, Array<uint8_t> data, const Mask& valid) {
  if (offsets.size() == 0) throw Error("column \"" + field + "\": offsets is empty; expected one more than values");
  const size_t n = offsets.size() - 1;
  const Validity mask = validity(valid, n);
  Grown<uint64_t> keys;
  {
    nb::gil_scoped_release release;
    keys = hash_strings(field, offsets.data(), n, data.data(), data.size(), mask);
  }
  return to_numpy(std::move(keys));
}

template <typename Number>
auto hash_numbers_of(const std::string& field, Array<Number> values, const Mask& valid) {
  const Validity mask = validity(valid, values.size());
  Grown<uint64_t> keys;
  {
    nb::gil_scoped_release release;
    keys = hash_numbers(field, values.data(), values.size(), mask);
  }
  return to_numpy(std::move(keys));
}

auto dense_of(Array<double> values, const Mask& valid, bool log, double mean, double inverse_deviation) {
  const NumberRule rule = make_rule(log, mean, inverse_deviation, "none");
  const Validity mask = validity(valid, values.size());
  Grown<float> features;
  {
    nb::gil_scoped_release release;
    features = number_dense(rule, values.data(), values.size(), mask);
  }
  return to_numpy(std::move(features));
}

auto number_keys_of(const std::string& field, Array<double> values, const Mask& valid, bool log, double mean,
                    double inverse_deviation, const BucketArg& bucket) {
  const NumberRule rule = make_rule(log, mean, inverse_deviation, bucket);
  const Validity mask = validity(valid, values.size());
  Grown<uint64_t> keys;
  {
    nb::gil_scoped_release release;
    keys = number_keys(field, rule, values.data(), values.size(), mask);
  }
  return to_numpy(std::move(keys));
}

using BlockArg = std::tuple<KeysArg, Array<int64_t>, std::optional<Array<float>>, Array<float>, Array<float>>;

nb::tuple gather(const std::vector<BlockArg>& blocks, size_t fields, size_t dense, Array<int64_t> order) {
  std::vector<Examples> examples;
  for (const auto& [ids, offsets, weights, features, labels] : blocks) {
    const size_t n = labels.size();
    if (offsets.size() != n * fields + 1 || features.size() != n * dense ||
        (weights && weights->size() != ids.size())) {
      throw Error("gather_examples: a block of " + std::to_string(n) + " examples has " +
                  std::to_string(offsets.size()) + " offsets and " + std::to_string(features.size()) +
                  " dense features, which does not fit " + std::to_string(fields) + " fields and " +
                  std::to_string(dense) + " dense features per example");
    }
    examples.push_back({ids.data(), ids.size(), offsets.data(), weights ? weights->data() : nullptr, features.data(),
                        labels.data(), n});
  }
  Gathered out;
  {
    nb::gil_scoped_release release;
    out = gather_examples(examples, fields, dense, order.data(), order.size());
  }
  return nb::make_tuple(to_numpy(std::move(out.ids)), to_numpy(std::move(out.offsets)),
                        numpy_or_none(std::move(out.weights)), to_numpy(std::move(out.dense)),
                        to_numpy(std::move(out.labels)));
}

}  // namespace

void bind_read(nb::module_& m) {
  nb::class_<TextParser>(m, "TextParser")
      .def("__init__", &init_parser, "kind"_a, nb::kw_only(), "delimiter"_a = "\t", "quoting"_a = false,
           "columns"_a = nb::make_tuple(), "fields"_a = 0, "one_bag"_a = false, "raw_keys"_a = false)
      .def("parse", &parse, "block"_a, "skip_errors"_a)
      .def_prop_ro("fields", &TextParser::fields)
      .def_prop_ro("dense", &TextParser::dense);
  m.def(
      "key_of",
      [](const std::string& field, nb::bytes value) {
        return hash_value(value.c_str(), value.size(), field_seed(field));
      },
      "field"_a, "value"_a);
  m.def("hash_strings", &hash_strings_of<int32_t>, "field"_a, "offsets"_a.noconvert(), "data"_a,
        "valid"_a = nb::none());
  m.def("hash_strings", &hash_strings_of<int64_t>, "field"_a, "offsets"_a.noconvert(), "data"_a,
        "valid"_a = nb::none());
  m.def("hash_ints", &hash_numbers_of<int64_t>, "field"_a, "values"_a.noconvert(), "valid"_a = nb::none());
  m.def("hash_ints", &hash_numbers_of<uint64_t>, "field"_a, "values"_a.noconvert(), "valid"_a = nb::none());
  m.def("hash_floats", &hash_numbers_of<float>, "field"_a, "values"_a.noconvert(), "valid"_a = nb::none());
  m.def("hash_floats", &hash_numbers_of<double>, "field"_a, "values"_a.noconvert(), "valid"_a = nb::none());
  m.def("number_dense", &dense_of, "values"_a.noconvert(), "valid"_a.none(), "log"_a, "mean"_a, "inverse_deviation"_a);
  m.def("number_keys", &number_keys_of, "field"_a, "values"_a.noconvert(), "valid"_a.none(), "log"_a, "mean"_a,
        "inverse_deviation"_a, "bucket"_a);
  m.def("gather_examples", &gather, "blocks"_a, "fields"_a, "dense"_a, "order"_a);
}

}  // namespace thermocline
