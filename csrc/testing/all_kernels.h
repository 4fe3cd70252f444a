// The kernels of all instruction sets of this machine.
#pragma once

#include <vector>

#include "dram/kernels.h"

namespace thermocline {

inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all{&kKernelsBase};
#if defined(THERMOCLINE_X86_KERNELS)
  if (__builtin_cpu_supports("avx2")) all.push_back(&kKernelsAvx2);
  if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    all.push_back(&kKernelsAvx512);
  }
#endif
  return all;
}

}  // namespace thermocline
