// Python bindings of text parsers and columns; used by the readers of src/thermocline/data.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
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
  if (name == "time_key") return Role::kTimeKey;
  if (name == "ignore") return Role::kIgnore;
  throw Error("role of a column is \"" + name +
              "\"; it must be label, key, dense, number_key, time, time_key or ignore");
}

TimeBucket time_bucket_of(const std::string& name) {
  if (name == "hour_of_day") return TimeBucket::kHourOfDay;
  if (name == "weekday") return TimeBucket::kWeekday;
  if (name == "hour_of_week") return TimeBucket::kHourOfWeek;
  if (name == "day_of_month") return TimeBucket::kDayOfMonth;
  if (name == "month") return TimeBucket::kMonth;
  throw Error("bucket of times is \"" + name +
              "\"; it must be hour_of_day, weekday, hour_of_week, day_of_month or month");
}

using ByColumn = std::map<std::string, std::string>;

void init_parser(TextParser* self, const std::string& kind, const std::string& delimiter, bool quoting,
                 const std::vector<ColumnArg>& columns, size_t fields, bool one_bag, bool raw_keys, bool binary_labels,
                 bool line_breaks, const ByColumn& separators, const ByColumn& time_buckets,
                 const std::set<std::string>& carry) {
  ParseOptions options{.quoting = quoting,
                       .fields = fields,
                       .one_bag = one_bag,
                       .raw_keys = raw_keys,
                       .binary_labels = binary_labels,
                       .line_breaks = line_breaks};
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
    Column column{.role = role_of(role), .name = name, .rule = make_rule(log, mean, inverse_deviation, bucket)};
    if (const auto found = separators.find(name); found != separators.end()) column.separator = found->second;
    if (const auto found = time_buckets.find(name); found != time_buckets.end()) {
      column.time_bucket = time_bucket_of(found->second);
    }
    column.carry = carry.contains(name);
    options.columns.push_back(std::move(column));
  }
  nb::gil_scoped_release release;
  new (self) TextParser(std::move(options));
}

Parsed parse_block(const TextParser& self, nb::handle block, bool skip_errors) {
  const Buffer buffer(block);
  nb::gil_scoped_release release;
  return self.parse(buffer.bytes(), skip_errors);
}

nb::tuple to_python(const TextParser& self, Parsed parsed) {
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

nb::tuple parse(const TextParser& self, nb::handle block, bool skip_errors) {
  return to_python(self, parse_block(self, block, skip_errors));
}

nb::tuple parse_with_texts(const TextParser& self, nb::handle block, bool skip_errors) {
  Parsed parsed = parse_block(self, block, skip_errors);
  nb::list carried;
  for (const Texts& texts : parsed.carried) {
    Grown<int64_t> offsets(texts.ends.size() + 1);
    offsets[0] = 0;
    std::copy(texts.ends.begin(), texts.ends.end(), offsets.data() + 1);
    carried.append(nb::make_tuple(to_numpy(std::move(offsets)), nb::bytes(texts.text.data(), texts.text.size())));
  }
  return nb::make_tuple(to_python(self, std::move(parsed)), carried);
}

size_t whole_records(const TextParser& self, nb::handle text) {
  const Buffer buffer(text);
  nb::gil_scoped_release release;
  return self.whole_records(buffer.bytes());
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

auto time_keys_of(const std::string& field, Array<int64_t> seconds, const Mask& valid, const std::string& bucket) {
  const TimeBucket kind = time_bucket_of(bucket);
  const Validity mask = validity(valid, seconds.size());
  Grown<uint64_t> keys(seconds.size());
  const uint64_t seed = field_seed(field), missing = hash_value("", 0, seed);
  for (size_t i = 0; i < seconds.size(); ++i) {
    keys[i] = mask.at(i) ? hash_number(time_bucket(kind, seconds.data()[i]), seed) : missing;
  }
  return to_numpy(std::move(keys));
}

// Seconds of times as text, and which are missing and which are invalid.
nb::tuple parse_times_of(Array<int64_t> offsets, Array<uint8_t> data, const Mask& valid) {
  if (offsets.size() == 0) throw Error("offsets is empty; expected one more than values");
  const size_t n = offsets.size() - 1;
  const Validity mask = validity(valid, n);
  const auto* const text = reinterpret_cast<const char*>(data.data());
  Grown<int64_t> seconds(n);
  Grown<uint8_t> missing(n), invalid(n);
  for (size_t i = 0; i < n; ++i) {
    const int64_t begin = offsets.data()[i], end = offsets.data()[i + 1];
    if (begin < 0 || end < begin || static_cast<size_t>(end) > data.size()) throw Error("an offset is out of range");
    seconds[i] = 0;
    const NumberStatus status = mask.at(i) ? parse_time(text + begin, text + end, seconds[i]) : NumberStatus::kMissing;
    missing[i] = status == NumberStatus::kMissing;
    invalid[i] = status == NumberStatus::kNotANumber || status == NumberStatus::kOutOfRange;
  }
  return nb::make_tuple(to_numpy(std::move(seconds)), to_numpy(std::move(missing)), to_numpy(std::move(invalid)));
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
           "columns"_a = nb::make_tuple(), "fields"_a = 0, "one_bag"_a = false, "raw_keys"_a = false,
           "binary_labels"_a = false, "line_breaks"_a = false, "separators"_a = nb::dict(),
           "time_buckets"_a = nb::dict(), "carry"_a = nb::set())
      .def("parse", &parse, "block"_a, "skip_errors"_a)
      .def("parse_with_texts", &parse_with_texts, "block"_a, "skip_errors"_a)
      .def("whole_records", &whole_records, "text"_a)
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
  m.def("time_keys", &time_keys_of, "field"_a, "seconds"_a.noconvert(), "valid"_a.none(), "bucket"_a);
  m.def("parse_times", &parse_times_of, "offsets"_a.noconvert(), "data"_a, "valid"_a = nb::none());
  m.def("number_dense", &dense_of, "values"_a.noconvert(), "valid"_a.none(), "log"_a, "mean"_a, "inverse_deviation"_a);
  m.def("number_keys", &number_keys_of, "field"_a, "values"_a.noconvert(), "valid"_a.none(), "log"_a, "mean"_a,
        "inverse_deviation"_a, "bucket"_a);
  m.def("gather_examples", &gather, "blocks"_a, "fields"_a, "dense"_a, "order"_a);
}

}  // namespace thermocline
