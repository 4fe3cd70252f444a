// The kernels of one instruction set. Only kernels_<isa>.cc include this file, after all other headers and after
// `#pragma GCC target`. It and the files it includes have no standard headers and no templates of the standard library:
// their instantiations are shared between object files and could carry instructions of one set into another.
// Everything has internal linkage.
//
// D is the row dimension if known at compile time, so that sums stay in registers; D == 0: any dimension, sums in
// scratch memory.

// clang-format off: each file needs the ones before it
#include "dram/kernels_vec.h"
#include "dram/kernels_sum.h"
#include "dram/kernels_optimizer.h"
#include "dram/codec_impl.h"
// clang-format on

namespace {

// ---- choice of D and optimizer

// With AddressSanitizer each D takes half a minute to compile: only one fixed D and the generic one then.
#if defined(__SANITIZE_ADDRESS__)
#define TC_FOR_DIM(dim, call) \
  switch (dim) {              \
    case 16:                  \
      return call(16);        \
    default:                  \
      return call(0);         \
  }
#else
#define TC_FOR_DIM(dim, call) \
  switch (dim) {              \
    case 4:                   \
      return call(4);         \
    case 8:                   \
      return call(8);         \
    case 16:                  \
      return call(16);        \
    case 32:                  \
      return call(32);        \
    case 64:                  \
      return call(64);        \
    case 128:                 \
      return call(128);       \
    default:                  \
      return call(0);         \
  }
#endif

void any_pool(const PoolArgs& a, size_t begin, size_t end, float* scratch) {
#define TC_CALL(D) pool<D>(a, begin, end, scratch)
  TC_FOR_DIM(a.rows.dim, TC_CALL)
#undef TC_CALL
}

void any_weight_gradient(const WeightGradientArgs& a, size_t begin, size_t end) {
#define TC_CALL(D) weight_gradient<D>(a, begin, end)
  TC_FOR_DIM(a.pool.rows.dim, TC_CALL)
#undef TC_CALL
}

void any_sum(uint32_t dim, const SegmentArgs& s, size_t begin, size_t end, uint32_t hot, float* sums, float* scratch) {
#define TC_CALL(D) sum<D>(dim, s, begin, end, hot, sums, scratch)
  TC_FOR_DIM(dim, TC_CALL)
#undef TC_CALL
}

void any_blocks(uint32_t dim, const SegmentArgs& s, size_t begin, size_t end, float* sums, float* scratch) {
#define TC_CALL(D) blocks<D>(dim, s, begin, end, sums, scratch)
  TC_FOR_DIM(dim, TC_CALL)
#undef TC_CALL
}

template <Optimizer O>
void update_with(const Rows& rows, const uint32_t* slots, const SegmentArgs& s, const Step& step, size_t begin,
                 size_t end, uint32_t hot, float* scratch) {
#define TC_CALL(D) update<D, O>(rows, slots, s, step, begin, end, hot, scratch)
  TC_FOR_DIM(rows.dim, TC_CALL)
#undef TC_CALL
}

template <Optimizer O>
void apply_with(const Rows& rows, const uint32_t* slots, const float* sums, const Step& step, size_t begin, size_t end,
                float* scratch) {
#define TC_CALL(D) apply<D, O>(rows, slots, sums, step, begin, end, scratch)
  TC_FOR_DIM(rows.dim, TC_CALL)
#undef TC_CALL
}

template <Optimizer O>
void catch_up_with(const Rows& rows, const uint32_t* slots, const MissedSteps& missed, size_t begin, size_t end,
                   float* scratch) {
#define TC_CALL(D) catch_up<D, O>(rows, slots, missed, begin, end, scratch)
  TC_FOR_DIM(rows.dim, TC_CALL)
#undef TC_CALL
}

void any_update(const Rows& rows, const uint32_t* slots, const SegmentArgs& s, const Step& step, size_t begin,
                size_t end, uint32_t hot, float* scratch) {
  switch (step.optimizer) {
    case Optimizer::kSgd:
      return update_with<Optimizer::kSgd>(rows, slots, s, step, begin, end, hot, scratch);
    case Optimizer::kAdagrad:
      return update_with<Optimizer::kAdagrad>(rows, slots, s, step, begin, end, hot, scratch);
    case Optimizer::kRowWiseAdagrad:
      return update_with<Optimizer::kRowWiseAdagrad>(rows, slots, s, step, begin, end, hot, scratch);
    case Optimizer::kAdam:
      return update_with<Optimizer::kAdam>(rows, slots, s, step, begin, end, hot, scratch);
    case Optimizer::kPartialRowWiseAdam:
      return update_with<Optimizer::kPartialRowWiseAdam>(rows, slots, s, step, begin, end, hot, scratch);
  }
}

void any_apply(const Rows& rows, const uint32_t* slots, const float* sums, const Step& step, size_t begin, size_t end,
               float* scratch) {
  switch (step.optimizer) {
    case Optimizer::kSgd:
      return apply_with<Optimizer::kSgd>(rows, slots, sums, step, begin, end, scratch);
    case Optimizer::kAdagrad:
      return apply_with<Optimizer::kAdagrad>(rows, slots, sums, step, begin, end, scratch);
    case Optimizer::kRowWiseAdagrad:
      return apply_with<Optimizer::kRowWiseAdagrad>(rows, slots, sums, step, begin, end, scratch);
    case Optimizer::kAdam:
      return apply_with<Optimizer::kAdam>(rows, slots, sums, step, begin, end, scratch);
    case Optimizer::kPartialRowWiseAdam:
      return apply_with<Optimizer::kPartialRowWiseAdam>(rows, slots, sums, step, begin, end, scratch);
  }
}

void any_catch_up(const Rows& rows, const uint32_t* slots, const MissedSteps& missed, size_t begin, size_t end,
                  float* scratch) {
  switch (missed.step.optimizer) {
    case Optimizer::kSgd:
      return catch_up_with<Optimizer::kSgd>(rows, slots, missed, begin, end, scratch);
    case Optimizer::kAdagrad:
      return catch_up_with<Optimizer::kAdagrad>(rows, slots, missed, begin, end, scratch);
    case Optimizer::kRowWiseAdagrad:
      return catch_up_with<Optimizer::kRowWiseAdagrad>(rows, slots, missed, begin, end, scratch);
    case Optimizer::kAdam:
      return catch_up_with<Optimizer::kAdam>(rows, slots, missed, begin, end, scratch);
    case Optimizer::kPartialRowWiseAdam:
      return catch_up_with<Optimizer::kPartialRowWiseAdam>(rows, slots, missed, begin, end, scratch);
  }
}

}  // namespace
