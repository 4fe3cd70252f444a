// Training arithmetic on rows in memory: gather and pool; gradient sums and optimizer.
//
// Every result is defined to the bit and equal for every instruction set and number of threads:
//   pool    out[bag] = its rows (each times its weight, if there are weights) added left to right; mean divides by
//           the number of ids; an empty bag is zero.
//   weight_gradient   out[id] = the dot product of its row and its bag's gradient, its products x added as in sum(x)
//           below; mean divides by the number of ids.
//   update  The gradient of an occurrence is grad[row of its bag], times its coefficient if there are coefficients.
//           A key's occurrences are in example order; blocks of 64 are added left to right, then the block sums are
//           added left to right: G. Then, once per key, with all constants rounded to fp32 once and no fused
//           multiply-add:
//             g = G * grad_scale;  if weight_decay != 0: g = g + weight_decay * w
//             SGD              w = w - lr * g
//             Adagrad          s = s + g * g;  w = w - lr * (g / (sqrt(s) + eps))
//             row-wise Adagrad s = s + mean(g * g);  w = w - (lr / (sqrt(s) + eps)) * g
//             Adam             m = m + (g - m) * (1 - beta1);  v = v * beta2 + ((1 - beta2) * g) * g
//                              w = w - (step_size * m) / (sqrt(v) / sqrt_bias2 + eps)
//                              step_size = lr / (1 - beta1^t), sqrt_bias2 = sqrt(1 - beta2^t), t the global step
//             partial row-wise Adam   v = v * beta2 + mean(g * g) * (1 - beta2);  m and w as Adam
//           sum(x): lane j of 16 adds x[j], x[j + 16], ... in that order, with zeros for missing elements; then
//           lanes j and j + 8 are added, j and j + 4, j and j + 2, j and j + 1. mean(x) is sum(x) / dim.
//   catch_up  Rows that store their last step, L, are brought to step `target`: for each step n of L + 1 .. target in
//           order, at most the last `limit` of them, the optimizer is applied with G = 0 and the rates of step n.
// Quantized rows (codec.h) are decoded in small groups into fp32 rows that stay in the cache, processed with the same
// arithmetic, and encoded again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "dram/codec.h"
#include "dram/row_layout.h"
#include "util/thread_pool.h"

namespace thermocline {

inline constexpr uint32_t kBlock = 64;

// Rows addressed by slot: the slab of a tier, or any buffer of rows.
struct Rows {
  uint8_t* base;
  size_t stride;
  uint32_t dim;
  // Quantized rows only (null: fp32): their codec, and the key of slot s at keys + s * key_stride.
  const Codec* codec = nullptr;
  const uint8_t* keys = nullptr;
  size_t key_stride = 0;
};

struct PoolArgs {
  Rows rows;
  const uint32_t* slots;  // [ids]
  size_t ids;
  const int64_t* offsets;  // [bags + 1], from 0 to ids; null: every id is one bag
  size_t bags;
  const float* weights;  // [ids] or null
  bool mean;
  float* out;  // [bags * dim]
};

// Gradient of the weights of pooling: `pool` without weights and without `out`.
struct WeightGradientArgs {
  PoolArgs pool;
  const float* grads;  // [bags * dim]
  float* out;          // [ids]
};

// One optimizer step, with constants rounded to fp32.
struct Step {
  Optimizer optimizer;
  float lr, eps, weight_decay, grad_scale;
  float one_minus_beta1, beta2, one_minus_beta2, step_size, sqrt_bias2;  // both Adams
  uint64_t number;  // t, part of the random stream of stochastic rounding
};

struct Hyper {
  Optimizer optimizer;
  double lr, eps = 0, weight_decay = 0, beta1 = 0, beta2 = 0;
};

// `t` counts from 1. Computed in double, rounded once.
Step make_step(const Hyper& hyper, uint64_t t, double grad_scale);

// The steps that rows missed. Step n has the rates at index n % limit.
struct MissedSteps {
  Step step;            // constants that all steps share
  const float* rates;   // [limit]: step_size of both Adams, else lr
  const float* biases;  // [limit]: sqrt_bias2 of both Adams
  uint32_t limit, target;
  uint32_t stamp;  // stored as the last step of rows that are older: `target`, or the step that is applied next
};

// Gradients by key: those of key u are grads[grad_rows[j]] for starts[u] <= j < starts[u + 1].
struct SegmentArgs {
  const uint32_t* starts;  // [keys + 1]
  size_t keys;
  const uint32_t* grad_rows;  // [starts[keys]], in segment order
  const float* coefs;         // [starts[keys]] or null
  const float* grads;         // [.. * dim]
};

void pool_rows(ThreadPool& pool, const PoolArgs& args);
void weight_gradient(ThreadPool& pool, const WeightGradientArgs& args);
// Sums and applies gradients key by key. Slots must not repeat. `updated`, if set, is called for ranges of keys whose
// rows were just changed, from several threads. Returns the gradient of a learned scale (codec.h), else 0.
using UpdatedKeys = std::function<void(size_t begin, size_t end)>;
int64_t update_rows(ThreadPool& pool, const Rows& rows, const uint32_t* slots, const SegmentArgs& segments,
                    const Step& step, const UpdatedKeys& updated = {});
// `slots` must not repeat; null: rows 0 .. keys - 1.
void catch_up_rows(ThreadPool& pool, const Rows& rows, const uint32_t* slots, size_t keys, const MissedSteps& missed);
// The two halves of update_rows(), for callers that need all sums first (clipping by norm): sums[keys * dim].
void sum_gradients(ThreadPool& pool, uint32_t dim, const SegmentArgs& segments, float* sums);
int64_t apply_gradients(ThreadPool& pool, const Rows& rows, const uint32_t* slots, size_t keys, const float* sums,
                        const Step& step);
// Convert contiguous quantized rows to fp32 rows of dim + state floats, and back with rounding to nearest.
void decode_rows(ThreadPool& pool, const Codec& codec, const uint8_t* stored, size_t n, float* floats);
void encode_rows(ThreadPool& pool, const Codec& codec, const float* floats, size_t n, uint8_t* stored);
// Encodes the initial row of a key.
void encode_initial(const Codec& codec, uint64_t key, const float* floats, uint8_t* stored);

// One implementation per instruction set (kernels_impl.h). All functions are single-threaded and work on ranges.
struct Kernels {
  const char* name;
  // out[i] = hash_key(keys[i]) and mem_hash(hash_key(keys[i])) (util/hash.h). Not in place.
  void (*hash_keys)(const uint64_t* keys, size_t n, uint64_t* out);
  void (*mem_hash_keys)(const uint64_t* keys, size_t n, uint64_t* out);
  // scratch: 2 * dim floats.
  void (*pool)(const PoolArgs&, size_t bag_begin, size_t bag_end, float* scratch);
  void (*weight_gradient)(const WeightGradientArgs&, size_t bag_begin, size_t bag_end);
  // Skips keys of more than `hot` occurrences.
  void (*update)(const Rows&, const uint32_t* slots, const SegmentArgs&, const Step&, size_t key_begin, size_t key_end,
                 uint32_t hot, float* scratch);
  void (*sum)(uint32_t dim, const SegmentArgs&, size_t key_begin, size_t key_end, uint32_t hot, float* sums,
              float* scratch);
  // Sums of blocks of `kBlock` occurrences, from `begin` to `end`.
  void (*blocks)(uint32_t dim, const SegmentArgs&, size_t begin, size_t end, float* sums, float* scratch);
  void (*apply)(const Rows&, const uint32_t* slots, const float* sums, const Step&, size_t key_begin, size_t key_end,
                float* scratch);
  void (*catch_up)(const Rows&, const uint32_t* slots, const MissedSteps&, size_t key_begin, size_t key_end,
                   float* scratch);
  // Decodes rows slots[0..n) to fp32 rows `stride` floats apart, with or without their state. `all` >= n: slots that
  // may be prefetched.
  void (*decode)(const Codec&, const Rows&, const uint32_t* slots, size_t n, size_t all, bool state, float* floats,
                 size_t stride);
  // Encodes rows. streams: Codec::stream per row; null: to nearest. codes: scratch of dim elements. gradient: of a
  // learned scale, or null.
  void (*encode)(const Codec&, const Rows&, const uint32_t* slots, size_t n, const uint64_t* streams,
                 const float* floats, size_t stride, int32_t* codes, ScaleGradient* gradient);
};

extern const Kernels kKernelsBase;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define THERMOCLINE_X86_KERNELS 1
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif

// The fastest kernels of this machine, or those of the environment variable THERMOCLINE_ISA: base, avx2 or avx512.
const Kernels& kernels();

}  // namespace thermocline
