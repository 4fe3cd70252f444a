// A sequence number in memory shared by processes: one process increases it, others wait for a value.
// Thread safety: one writer per number; any number of waiting threads and processes.
#pragma once

#include <cstdint>

namespace thermocline {

// Sets the number and wakes waiting processes. A process that reads the new value also sees all earlier writes of this
// one. The number never decreases.
void publish_sequence(uint64_t* sequence, uint64_t value);

// Returns true once the number is at least `value`, false after `seconds`.
bool wait_sequence(uint64_t* sequence, uint64_t value, double seconds);

}  // namespace thermocline
