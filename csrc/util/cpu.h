// Instruction sets of this machine. By cpuid and not by __builtin_cpu_supports, which needs a symbol of libgcc that the
// runtime library of clang (zig) lacks.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace thermocline {

// Only sets that the operating system saves: their registers are usable.
struct CpuFeatures {
  bool avx2 = false, bmi = false, popcnt = false;
  bool avx512 = false;  // F, VL, BW and DQ
};

inline CpuFeatures read_cpu_features() {
  CpuFeatures found;
#if defined(__x86_64__) && defined(__GNUC__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  found.popcnt = (c & bit_POPCNT) != 0;
  unsigned states = 0;  // register states that the operating system saves
  if ((c & bit_OSXSAVE) != 0) {
    unsigned high = 0;
    __asm__("xgetbv" : "=a"(states), "=d"(high) : "c"(0));
  }
  const bool ymm = (c & bit_AVX) != 0 && (states & 0x06) == 0x06, zmm = ymm && (states & 0xe0) == 0xe0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512VL | bit_AVX512BW | bit_AVX512DQ;
  found.bmi = (b & bit_BMI) != 0;
  found.avx2 = ymm && (b & bit_AVX2) != 0;
  found.avx512 = zmm && (b & kAvx512) == kAvx512;
#endif
  return found;
}

inline const CpuFeatures& cpu_features() {
  static const CpuFeatures features = read_cpu_features();
  return features;
}

}  // namespace thermocline
