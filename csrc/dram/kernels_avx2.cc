// Kernels for processors with AVX2, chosen at run time.
#include "dram/kernels.h"
#include "util/hash.h"

#if defined(THERMOCLINE_X86_KERNELS)
#include <immintrin.h>

// Effective to the end of the file, so that it also covers template instantiations.
#pragma GCC target("avx2")

namespace thermocline {

#include "dram/kernels_impl.h"

const Kernels kKernelsAvx2 = {"avx2",     hash_keys, mem_hash_keys, any_pool,  any_weight_gradient,
                              any_update, any_sum,   any_blocks,    any_apply, any_catch_up,
                              decode,     encode};

}  // namespace thermocline
#endif
