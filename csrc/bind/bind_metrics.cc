// Python bindings of the sums behind src/thermocline/training/metrics.py.
#include <nanobind/stl/pair.h>

#include <utility>

#include "bind/bind.h"
#include "metrics/scores.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace thermocline {
namespace {

using CountsArg = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::pair<double, double> sums(const Array<T>& scores, const Array<T>& labels) {
  require(scores.size() == labels.size(), "sum_scores: scores and labels differ in size");
  const T *const values = scores.data(), *const classes = labels.data();
  const size_t n = scores.size();
  const ScoreSums sum = unlocked([&] { return sum_scores(values, classes, n); });
  return {sum.loss, sum.predicted};
}

template <typename T>
void count(const Array<T>& scores, const Array<T>& labels, double limit, const CountsArg& counts) {
  const size_t n = scores.size(), bins = counts.shape(1);
  require(n == labels.size(), "count_scores: scores and labels differ in size");
  require(counts.shape(0) == 2 && bins >= 1 && bins <= size_t{1} << 30, "count_scores: counts must be [2, 1 to 2^30]");
  const T *const values = scores.data(), *const classes = labels.data();
  int64_t* const out = counts.data();
  unlocked([&] { count_scores(values, classes, n, limit, bins, out); });
}

template <typename T>
std::pair<size_t, size_t> labels_of(const Array<T>& labels) {
  const T* const classes = labels.data();
  const size_t n = labels.size();
  const LabelCounts counts = unlocked([&] { return count_labels(classes, n); });
  return {counts.ones, counts.others};
}

}  // namespace

void bind_metrics(nb::module_& m) {
  m.def("sum_scores", &sums<float>, "scores"_a, "labels"_a);
  m.def("sum_scores", &sums<double>, "scores"_a, "labels"_a);
  m.def("count_labels", &labels_of<float>, "labels"_a);
  m.def("count_labels", &labels_of<double>, "labels"_a);
  m.def("count_scores", &count<float>, "scores"_a, "labels"_a, "limit"_a, "counts"_a.noconvert());
  m.def("count_scores", &count<double>, "scores"_a, "labels"_a, "limit"_a, "counts"_a.noconvert());
}

}  // namespace thermocline
