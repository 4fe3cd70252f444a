#include "util/huge_vector.h"

#include <cstdint>
#include <new>

#include "testing/test.h"

namespace thermocline {
namespace {

TEST(HugeVector, LargeMemoryStartsOnAHugePageAndKeepsItsValues) {
  constexpr size_t kHugePage = HugeAllocator<uint32_t>::kHugePage;
  HugeVector<uint32_t> values;
  for (uint32_t i = 0; i < 3 * kHugePage / sizeof(uint32_t); ++i) values.push_back(i * 7);  // grows over the limit
  CHECK_EQ(reinterpret_cast<uintptr_t>(values.data()) % kHugePage, 0u);
  const HugeVector<uint32_t> copy = values;
  values = HugeVector<uint32_t>();
  for (uint32_t i = 0; i < copy.size(); ++i)
    if (copy[i] != i * 7) CHECK_EQ(copy[i], i * 7);
  const HugeVector<uint64_t> zeros(kHugePage / sizeof(uint64_t));
  for (uint64_t value : zeros)
    if (value != 0) CHECK_EQ(value, 0u);
}

TEST(HugeVector, RefusesSizesThatOverflow) {
  CHECK_THROWS(std::bad_alloc, HugeAllocator<uint64_t>().allocate(SIZE_MAX / 8));
}

}  // namespace
}  // namespace thermocline
