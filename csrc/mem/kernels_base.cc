// Kernels for any machine of the architecture.
#include "mem/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace thermocline {

#include "mem/kernels_impl.h"

const Kernels kKernelsBase = {"base", any_pool, any_update, any_sum, any_blocks, any_apply};

}  // namespace thermocline
