// Splits kernel calls into tasks for threads. The split never changes a result.
#include "dram/kernels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string_view>
#include <vector>

#include "util/cpu.h"

namespace thermocline {
namespace {

// A key with more occurrences is summed by several threads. A multiple of kBlock, so that the blocks do not change.
constexpr uint32_t kHot = 64 * kBlock;
constexpr size_t kTaskIds = 16384;
constexpr size_t kCatchUpRows = 256;  // of one task: a row may miss many steps
// Quantized rows decoded at once: few enough to stay in the cache as fp32 rows.
constexpr size_t kDecodeRows = 128;
// Keys after which UpdatedKeys is called: few enough for their rows to be in the cache.
constexpr size_t kUpdatedKeys = 512;

const Kernels& choose() {
#if defined(THERMOCLINE_X86_KERNELS)
  const char* requested = std::getenv("THERMOCLINE_ISA");
  const std::string_view isa = requested ? requested : "avx512";
  if (isa == "avx512" && cpu_features().avx512) return kKernelsAvx512;
  if (isa != "base" && cpu_features().avx2) return kKernelsAvx2;
#endif
  return kKernelsBase;
}

// Runs f(begin, end) over ranges of keys (or bags) with about equal numbers of ids. `starts` has items + 1 elements.
template <typename Int, typename F>
void for_ranges(ThreadPool& pool, const Int* starts, size_t items, const F& f) {
  const auto ids = static_cast<size_t>(starts[items]);
  const size_t tasks = std::min(items, (ids + items) / kTaskIds + 1);
  // An item costs its ids plus one: items without ids are not free.
  const auto cut = [&](size_t t) {
    const size_t goal = (ids + items) * t / tasks;
    size_t lo = 0, hi = items;
    while (lo < hi) {
      const size_t mid = (lo + hi) / 2;
      if (static_cast<size_t>(starts[mid]) + mid < goal) lo = mid + 1;
      else hi = mid;
    }
    return lo;
  };
  pool.parallel(tasks, [&](size_t t) { f(t == 0 ? 0 : cut(t), t + 1 == tasks ? items : cut(t + 1)); });
}

template <typename F>
void for_equal_ranges(ThreadPool& pool, size_t items, const F& f) {
  const size_t tasks = items / kTaskIds + 1;
  pool.parallel(tasks, [&](size_t t) { f(items * t / tasks, items * (t + 1) / tasks); });
}

// Sums the gradients of keys with more than kHot occurrences in parallel, and calls done(key, sum).
template <typename F>
void sum_hot(ThreadPool& pool, uint32_t dim, const SegmentArgs& s, const F& done) {
  if (s.starts[s.keys] <= kHot) return;
  std::vector<float> sums;
  for (size_t u = 0; u < s.keys; ++u) {
    const size_t lo = s.starts[u], hi = s.starts[u + 1];
    if (hi - lo <= kHot) continue;
    const size_t blocks = (hi - lo + kBlock - 1) / kBlock;
    sums.resize(blocks * dim);
    const size_t tasks = (hi - lo + kHot - 1) / kHot;
    pool.parallel(tasks, [&](size_t t) {
      std::vector<float> scratch(2 * dim);
      const size_t begin = lo + t * kHot;
      kernels().blocks(dim, s, begin, std::min(begin + kHot, hi), sums.data() + t * (kHot / kBlock) * dim,
                       scratch.data());
    });
    for (size_t b = 1; b < blocks; ++b) {
      for (uint32_t i = 0; i < dim; ++i) sums[i] = sums[i] + sums[b * dim + i];
    }
    done(u, sums.data());
  }
}

// fp32 copies of a few quantized rows. Used by one thread.
class DecodedRows {
 public:
  explicit DecodedRows(const Rows& rows)
      : rows_(rows), stride_(rows.codec->layout.floats()), codes_(rows.dim), indices_(kDecodeRows) {
    std::iota(indices_.begin(), indices_.end(), 0);
  }

  // Decodes the first `n` of `all` slots, with their state or weights only.
  void read(const uint32_t* slots, size_t n, size_t all, bool state) {
    if (floats_.size() < n * stride_) floats_.resize(n * stride_);
    for (auto next = static_cast<uint32_t>(indices_.size()); next < n; ++next) indices_.push_back(next);
    kernels().decode(*rows_.codec, rows_, slots, n, all, state, floats_.data(), stride_);
  }
  // Applies one step to the decoded rows and encodes them to their slots, except rows i with skip(i).
  template <typename F>
  void apply(const uint32_t* slots, size_t n, const float* sums, const Step& step, float* scratch, const F& skip) {
    kernels().apply(rows(), indices_.data(), sums, step, 0, n, scratch);
    for (size_t i = 0, run; i < n; i = run + 1) {
      for (run = i; run < n && !skip(run);) ++run;
      if (run > i) write(slots, i, run, sums, step);
    }
  }

  int64_t scale_gradient() const { return scale_gradient_; }
  Rows rows() { return {reinterpret_cast<uint8_t*>(floats_.data()), stride_ * sizeof(float), rows_.dim}; }
  const uint32_t* indices() const { return indices_.data(); }  // 0, 1, 2, ..: the slots of rows()

 private:
  void write(const uint32_t* slots, size_t begin, size_t end, const float* sums, const Step& step) {
    const Precision& precision = rows_.codec->layout.precision;
    streams_.resize(end - begin);
    for (size_t i = begin; precision.stochastic && i < end; ++i) {
      uint64_t key;
      std::memcpy(&key, rows_.keys + slots[i] * rows_.key_stride, sizeof(key));
      streams_[i - begin] = rows_.codec->stream(key, step.number);
    }
    ScaleGradient gradient{sums + begin * rows_.dim, step.grad_scale, 0};
    kernels().encode(*rows_.codec, rows_, slots + begin, end - begin, precision.stochastic ? streams_.data() : nullptr,
                     floats_.data() + begin * stride_, stride_, codes_.data(), precision.learned ? &gradient : nullptr);
    scale_gradient_ += gradient.total;
  }

  const Rows& rows_;
  const size_t stride_;
  int64_t scale_gradient_ = 0;
  std::vector<float> floats_;
  std::vector<int32_t> codes_;
  std::vector<uint32_t> indices_;
  std::vector<uint64_t> streams_;
};

// Calls f(part, first bag, first id) for groups of bags, with `part` on decoded rows. A bag is never split.
template <typename F>
void for_decoded_bags(const PoolArgs& a, size_t begin, size_t end, const F& f) {
  DecodedRows decoded(a.rows);
  std::vector<int64_t> offsets;
  const auto first_id = [&](size_t bag) { return a.offsets ? static_cast<size_t>(a.offsets[bag]) : bag; };
  for (size_t b = begin, next; b < end; b = next) {
    const size_t lo = first_id(b);
    next = b + 1;
    while (next < end && first_id(next + 1) - lo <= kDecodeRows) ++next;
    const size_t ids = first_id(next) - lo;
    decoded.read(a.slots + lo, ids, a.ids - lo, false);
    PoolArgs part = a;
    if (a.offsets) {
      offsets.resize(next - b + 1);
      for (size_t i = b; i <= next; ++i) offsets[i - b] = a.offsets[i] - static_cast<int64_t>(lo);
      part.offsets = offsets.data();
    }
    part.rows = decoded.rows();
    part.slots = decoded.indices();
    part.ids = ids;
    part.bags = next - b;
    f(part, b, lo);
  }
}

void pool_decoded(const PoolArgs& a, size_t begin, size_t end, float* scratch) {
  for_decoded_bags(a, begin, end, [&](PoolArgs& part, size_t bag, size_t id) {
    part.weights = a.weights ? a.weights + id : nullptr;
    part.out = a.out + bag * a.rows.dim;
    kernels().pool(part, 0, part.bags, scratch);
  });
}

// update_decoded() and apply_decoded() return the gradient of a learned scale.
int64_t update_decoded(const Rows& rows, const uint32_t* slots, const SegmentArgs& s, const Step& step, size_t begin,
                       size_t end, float* scratch) {
  DecodedRows decoded(rows);
  std::vector<float> sums(std::min(kDecodeRows, end - begin) * rows.dim);
  for (size_t b = begin; b < end; b += kDecodeRows) {
    const size_t n = std::min(kDecodeRows, end - b);
    decoded.read(slots + b, n, end - b, true);
    const SegmentArgs part{s.starts + b, s.keys - b, s.grad_rows, s.coefs, s.grads};
    kernels().sum(rows.dim, part, 0, n, kHot, sums.data(), scratch);
    // Hot keys are already updated.
    decoded.apply(slots + b, n, sums.data(), step, scratch,
                  [&](size_t i) { return part.starts[i + 1] - part.starts[i] > kHot; });
  }
  return decoded.scale_gradient();
}

int64_t apply_decoded(const Rows& rows, const uint32_t* slots, const float* sums, const Step& step, size_t begin,
                      size_t end, float* scratch) {
  DecodedRows decoded(rows);
  for (size_t b = begin; b < end; b += kDecodeRows) {
    const size_t n = std::min(kDecodeRows, end - b);
    decoded.read(slots + b, n, end - b, true);
    decoded.apply(slots + b, n, sums + b * rows.dim, step, scratch, [](size_t) { return false; });
  }
  return decoded.scale_gradient();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

Step make_step(const Hyper& h, uint64_t t, double grad_scale) {
  Step s{};
  s.optimizer = h.optimizer;
  s.lr = static_cast<float>(h.lr);
  s.eps = static_cast<float>(h.eps);
  s.weight_decay = static_cast<float>(h.weight_decay);
  s.grad_scale = static_cast<float>(grad_scale);
  s.number = t;
  if (has_moments(h.optimizer)) {
    s.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
    s.beta2 = static_cast<float>(h.beta2);
    s.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
    s.step_size = static_cast<float>(h.lr / (1.0 - std::pow(h.beta1, static_cast<double>(t))));
    s.sqrt_bias2 = static_cast<float>(std::sqrt(1.0 - std::pow(h.beta2, static_cast<double>(t))));
  }
  return s;
}

void pool_rows(ThreadPool& pool, const PoolArgs& a) {
  const auto task = [&](size_t begin, size_t end) {
    std::vector<float> scratch(2 * a.rows.dim);
    (a.rows.codec ? pool_decoded : kernels().pool)(a, begin, end, scratch.data());
  };
  if (a.offsets) for_ranges(pool, a.offsets, a.bags, task);
  else for_equal_ranges(pool, a.bags, task);
}

void weight_gradient(ThreadPool& pool, const WeightGradientArgs& w) {
  const PoolArgs& a = w.pool;
  const auto task = [&](size_t begin, size_t end) {
    if (!a.rows.codec) return kernels().weight_gradient(w, begin, end);
    for_decoded_bags(a, begin, end, [&](const PoolArgs& part, size_t bag, size_t id) {
      kernels().weight_gradient({part, w.grads + bag * a.rows.dim, w.out + id}, 0, part.bags);
    });
  };
  if (a.offsets) for_ranges(pool, a.offsets, a.bags, task);
  else for_equal_ranges(pool, a.bags, task);
}

int64_t update_rows(ThreadPool& pool, const Rows& rows, const uint32_t* slots, const SegmentArgs& s, const Step& step,
                    const UpdatedKeys& updated) {
  std::atomic<int64_t> gradient{0};
  sum_hot(pool, rows.dim, s, [&](size_t u, const float* sum) {
    std::vector<float> scratch(2 * rows.dim);
    if (rows.codec) gradient += apply_decoded(rows, slots + u, sum, step, 0, 1, scratch.data());
    else kernels().apply(rows, slots + u, sum, step, 0, 1, scratch.data());
  });
  for_ranges(pool, s.starts, s.keys, [&](size_t begin, size_t end) {
    std::vector<float> scratch(2 * rows.dim);
    const size_t part = updated ? kUpdatedKeys : end - begin;
    for (size_t b = begin; b < end; b += part) {
      const size_t e = std::min(b + part, end);
      if (rows.codec) gradient += update_decoded(rows, slots, s, step, b, e, scratch.data());
      else kernels().update(rows, slots, s, step, b, e, kHot, scratch.data());
      if (updated) updated(b, e);
    }
  });
  return gradient;
}

void catch_up_rows(ThreadPool& pool, const Rows& rows, const uint32_t* slots, size_t keys, const MissedSteps& missed) {
  const size_t tasks = keys / kCatchUpRows + 1;
  pool.parallel(tasks, [&](size_t t) {
    std::vector<float> scratch(2 * rows.dim);
    kernels().catch_up(rows, slots, missed, keys * t / tasks, keys * (t + 1) / tasks, scratch.data());
  });
}

void sum_gradients(ThreadPool& pool, uint32_t dim, const SegmentArgs& s, float* sums) {
  sum_hot(pool, dim, s, [&](size_t u, const float* sum) { std::copy_n(sum, dim, sums + u * dim); });
  for_ranges(pool, s.starts, s.keys, [&](size_t begin, size_t end) {
    std::vector<float> scratch(2 * dim);
    kernels().sum(dim, s, begin, end, kHot, sums, scratch.data());
  });
}

int64_t apply_gradients(ThreadPool& pool, const Rows& rows, const uint32_t* slots, size_t keys, const float* sums,
                        const Step& step) {
  std::atomic<int64_t> gradient{0};
  for_equal_ranges(pool, keys, [&](size_t begin, size_t end) {
    std::vector<float> scratch(2 * rows.dim);
    if (rows.codec) gradient += apply_decoded(rows, slots, sums, step, begin, end, scratch.data());
    else kernels().apply(rows, slots, sums, step, begin, end, scratch.data());
  });
  return gradient;
}

namespace {

// Runs f(rows, indices, begin) over ranges of n contiguous stored rows: `rows` starts at row `begin`, `indices` is
// 0, 1, ...
template <typename F>
void for_stored(ThreadPool& pool, const Codec& codec, const uint8_t* stored, size_t n, const F& f) {
  for_equal_ranges(pool, n, [&](size_t begin, size_t end) {
    std::vector<uint32_t> indices(end - begin);
    std::iota(indices.begin(), indices.end(), 0);
    const size_t bytes = codec.layout.bytes();
    f(Rows{const_cast<uint8_t*>(stored) + begin * bytes, bytes, codec.layout.dim}, indices, begin);
  });
}

}  // namespace

void decode_rows(ThreadPool& pool, const Codec& codec, const uint8_t* stored, size_t n, float* floats) {
  const size_t stride = codec.layout.floats();
  for_stored(pool, codec, stored, n, [&](const Rows& rows, const std::vector<uint32_t>& slots, size_t begin) {
    kernels().decode(codec, rows, slots.data(), slots.size(), slots.size(), true, floats + begin * stride, stride);
  });
}

void encode_rows(ThreadPool& pool, const Codec& codec, const float* floats, size_t n, uint8_t* stored) {
  const size_t stride = codec.layout.floats();
  for_stored(pool, codec, stored, n, [&](const Rows& rows, const std::vector<uint32_t>& slots, size_t begin) {
    std::vector<int32_t> codes(codec.layout.dim);
    kernels().encode(codec, rows, slots.data(), slots.size(), nullptr, floats + begin * stride, stride, codes.data(),
                     nullptr);
  });
}

void encode_initial(const Codec& codec, uint64_t key, const float* floats, uint8_t* stored) {
  thread_local std::vector<int32_t> codes;
  codes.resize(codec.layout.dim);
  const uint32_t slot = 0;
  const uint64_t stream = codec.stream(key, 0);
  kernels().encode(codec, {stored, codec.layout.bytes(), codec.layout.dim}, &slot, 1,
                   codec.layout.precision.stochastic ? &stream : nullptr, floats, codec.layout.floats(), codes.data(),
                   nullptr);
}

}  // namespace thermocline
