// A number in memory that processes share: one of them raises it, the others wait until it is high enough.
#pragma once

#include <cstdint>

namespace thermocline {

// Everything written before is seen by whoever sees the new number. It never falls.
void raise_number(uint64_t* number, uint64_t to);

// Whether it is at least `wanted`, now or within so many seconds.
bool wait_for_number(uint64_t* number, uint64_t wanted, double seconds);

}  // namespace thermocline
