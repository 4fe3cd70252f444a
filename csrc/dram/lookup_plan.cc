#include "dram/lookup_plan.h"

#include <algorithm>
#include <string>

#include "util/error.h"
#include "util/recycled.h"

namespace thermocline {
namespace {

constexpr size_t kTaskIds = 65536;

template <typename F>
void for_ids(ThreadPool& pool, size_t n, const F& f) {
  const size_t tasks = n / kTaskIds + 1;
  pool.parallel(tasks, [&](size_t t) { f(n * t / tasks, n * (t + 1) / tasks); });
}

}  // namespace

void expand_slots(ThreadPool& pool, const uint32_t* slots, const uint32_t* inverse, size_t ids, uint32_t* out) {
  for_ids(pool, ids, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) out[i] = slots[inverse[i]];
  });
}

void check_offsets(const Bags& b) {
  if (!b.offsets) return;
  bool rising = b.offsets[0] == 0 && b.offsets[b.bags] == static_cast<int64_t>(b.ids);
  for (size_t i = 0; i < b.bags; ++i) rising &= b.offsets[i] <= b.offsets[i + 1];
  if (!rising) {
    throw Error("offsets must begin with 0, never decrease, and end with the number of ids, " + std::to_string(b.ids));
  }
}

void plan_gradients(ThreadPool& pool, const Bags& b, const uint32_t* order, uint32_t* grad_rows, float* coefs) {
  if (!b.offsets) {
    for_ids(pool, b.ids, [&](size_t begin, size_t end) {
      std::copy(order + begin, order + end, grad_rows + begin);
      for (size_t j = begin; coefs && j < end; ++j) coefs[j] = b.weights[order[j]];
    });
    return;
  }
  const Recycled<uint32_t> bag_of(b.ids);
  for_ids(pool, b.bags, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      std::fill(bag_of.get() + b.offsets[i], bag_of.get() + b.offsets[i + 1], static_cast<uint32_t>(i));
    }
  });
  for_ids(pool, b.ids, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) grad_rows[j] = bag_of[order[j]];
    if (!coefs) return;
    for (size_t j = begin; j < end; ++j) {
      const int64_t* bag = b.offsets + grad_rows[j];
      const float weight = b.weights ? b.weights[order[j]] : 1.0f;
      coefs[j] = b.mean ? weight / static_cast<float>(bag[1] - bag[0]) : weight;
    }
  });
}

}  // namespace thermocline
