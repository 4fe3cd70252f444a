// Kernels for processors with AVX-512, chosen at run time.
#include "dram/kernels.h"
#include "util/hash.h"

#if defined(THERMOCLINE_X86_KERNELS)
#include <immintrin.h>

// Effective to the end of the file, so that it also covers template instantiations.
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq")

namespace thermocline {

#include "dram/kernels_impl.h"

const Kernels kKernelsAvx512 = {"avx512",   hash_keys, mem_hash_keys, any_pool,  any_weight_gradient,
                                any_update, any_sum,   any_blocks,    any_apply, any_catch_up,
                                decode,     encode};

}  // namespace thermocline
#endif
