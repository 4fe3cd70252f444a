// A slow disk for tests: system calls of the POSIX file system with an added latency.
#pragma once

#include "util/posix_fs.h"

namespace thermocline {

// Returns the real calls, or slow ones if THERMOCLINE_IO_DELAY is set: "read=2000,write=500,sync=20000", the mean
// latency in microseconds that is added to each call of that kind. Single latencies are random, up to twice the mean.
// Throws Error for any other text. The latencies are of the process: the last call of this function sets them.
PosixCalls posix_calls_from_env();

}  // namespace thermocline
