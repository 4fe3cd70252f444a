#include "util/packed_array.h"

#include <random>
#include <vector>

#include "testing/test.h"

namespace thermocline {
namespace {

TEST(PackedArray, ReturnsTheNumbersOfAnyWidth) {
  std::mt19937_64 random(1);
  for (uint32_t bits = 0; bits <= 32; ++bits) {
    const auto most = static_cast<uint32_t>((uint64_t{1} << bits) - 1);
    for (size_t n : {0, 1, 63, 64, 65, 1000}) {
      std::vector<uint32_t> numbers(n);
      for (uint32_t& number : numbers) number = static_cast<uint32_t>(random()) & most;
      if (n > 0) numbers[n - 1] = most;
      PackedArray packed(n, most);
      for (size_t b = 0; b * PackedArray::kBlock < n; ++b) {
        const size_t first = b * PackedArray::kBlock;
        packed.store_block(b, numbers.data() + first, std::min(PackedArray::kBlock, n - first));
      }
      for (size_t i = 0; i < n; ++i) CHECK_EQ(packed[i], numbers[i]);
      CHECK(packed.bytes() <= (n + 63) / 64 * 8 * std::max(bits, 1u) + 8);
    }
  }
}

}  // namespace
}  // namespace thermocline
