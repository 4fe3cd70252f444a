// Kernels for any processor of the architecture.
#include "dram/kernels.h"
#include "util/hash.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace thermocline {

#include "dram/kernels_impl.h"

const Kernels kKernelsBase = {"base",     hash_keys, mem_hash_keys, any_pool,  any_weight_gradient,
                              any_update, any_sum,   any_blocks,    any_apply, any_catch_up,
                              decode,     encode};

}  // namespace thermocline
