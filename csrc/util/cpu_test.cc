#include "util/cpu.h"

#include <string>

#include "testing/test.h"

namespace thermocline {
namespace {

#if defined(__x86_64__) && defined(__GLIBCXX__)  // with libgcc, which has what __builtin_cpu_supports needs
TEST(Cpu, FeaturesEqualThoseOfTheCompiler) {
  const CpuFeatures& found = cpu_features();
  CHECK_EQ(found.avx2, __builtin_cpu_supports("avx2") != 0);
  CHECK_EQ(found.bmi, __builtin_cpu_supports("bmi") != 0);
  CHECK_EQ(found.popcnt, __builtin_cpu_supports("popcnt") != 0);
  CHECK_EQ(found.avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"));
}
#endif

}  // namespace
}  // namespace thermocline
