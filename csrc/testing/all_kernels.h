// The kernels of all instruction sets of this machine.
#pragma once

#include <vector>

#include "dram/kernels.h"
#include "util/cpu.h"

namespace thermocline {

inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all{&kKernelsBase};
#if defined(THERMOCLINE_X86_KERNELS)
  if (cpu_features().avx2) all.push_back(&kKernelsAvx2);
  if (cpu_features().avx512) all.push_back(&kKernelsAvx512);
#endif
  return all;
}

}  // namespace thermocline
