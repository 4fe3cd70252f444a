// Cuts kernels into tasks for threads. The cuts change who computes, never what.
#include "mem/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <vector>

namespace thermocline {
namespace {

// A key of more occurrences is summed by several threads: a multiple of kBlock, so that blocks are the same.
constexpr uint32_t kHot = 64 * kBlock;
constexpr size_t kTaskIds = 16384;

const Kernels& choose() {
#if defined(THERMOCLINE_X86_KERNELS)
  const char* asked = std::getenv("THERMOCLINE_ISA");
  const std::string_view isa = asked ? asked : "avx512";
  if (isa == "avx512" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) {
    return kKernelsAvx512;
  }
  if (isa != "base" && __builtin_cpu_supports("avx2")) return kKernelsAvx2;
#endif
  return kKernelsBase;
}

// Ranges of keys (or bags) of about equal numbers of ids. `starts` has items + 1 elements.
template <typename Int, typename F>
void for_ranges(ThreadPool& pool, const Int* starts, size_t items, const F& f) {
  const auto ids = static_cast<size_t>(starts[items]);
  const size_t tasks = std::min(items, (ids + items) / kTaskIds + 1);
  // Items without ids cost too: bag b counts as its ids and one more.
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

// Hot keys: their block sums in parallel, then done(key, sum).
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

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

Step make_step(const Hyper& h, uint64_t t, double scale) {
  Step s{};
  s.optimizer = h.optimizer;
  s.lr = static_cast<float>(h.lr);
  s.eps = static_cast<float>(h.eps);
  s.weight_decay = static_cast<float>(h.weight_decay);
  s.scale = static_cast<float>(scale);
  if (h.optimizer == Optimizer::kAdam) {
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
    kernels().pool(a, begin, end, scratch.data());
  };
  if (a.offsets) for_ranges(pool, a.offsets, a.bags, task);
  else for_equal_ranges(pool, a.bags, task);
}

void update_rows(ThreadPool& pool, const Rows& rows, const uint32_t* slots, const SegmentArgs& s, const Step& step) {
  sum_hot(pool, rows.dim, s, [&](size_t u, const float* sum) {
    std::vector<float> scratch(2 * rows.dim);
    kernels().apply(rows, slots + u, sum, step, 0, 1, scratch.data());
  });
  for_ranges(pool, s.starts, s.keys, [&](size_t begin, size_t end) {
    std::vector<float> scratch(2 * rows.dim);
    kernels().update(rows, slots, s, step, begin, end, kHot, scratch.data());
  });
}

void sum_gradients(ThreadPool& pool, uint32_t dim, const SegmentArgs& s, float* sums) {
  sum_hot(pool, dim, s, [&](size_t u, const float* sum) { std::copy_n(sum, dim, sums + u * dim); });
  for_ranges(pool, s.starts, s.keys, [&](size_t begin, size_t end) {
    std::vector<float> scratch(2 * dim);
    kernels().sum(dim, s, begin, end, kHot, sums, scratch.data());
  });
}

void apply_gradients(ThreadPool& pool, const Rows& rows, const uint32_t* slots, size_t keys, const float* sums,
                     const Step& step) {
  for_equal_ranges(pool, keys, [&](size_t begin, size_t end) {
    std::vector<float> scratch(2 * rows.dim);
    kernels().apply(rows, slots, sums, step, begin, end, scratch.data());
  });
}

}  // namespace thermocline
