// What a power loss may leave on the disk, rebuilt from a recording.
//
// The rules are the pessimistic reading of POSIX, on ext4's sectors:
//   1. Bytes written are safe once a datasync of their file has returned. Until then any subset of their 512-byte
//      sectors may be there; the file may already have its new size, with zeros, garbage or another file's old bytes in
//      the sectors that were lost.
//   2. A name (create, rename, unlink, link, make_dir) is safe once a sync_dir of its folder has returned. Until then
//      any subset of the changes may be there, in any order. A rename is there wholly or not at all.
//   3. datasync says nothing about names, sync_dir nothing about bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "testing/mem_fs.h"
#include "testing/record_fs.h"

namespace thermocline::testing {

struct CrashState {
  std::shared_ptr<MemFs> fs;
  size_t prefix;     // the crash came after ops[0, prefix)
  std::string what;  // which unsynced changes are there, for messages
};

// At most `cap` states, the same ones for the same seed: of every prefix all unsynced changes kept / dropped, each one
// dropped or kept alone, pairs, torn writes, and random mixtures. Where there are more, an even sample over the
// recording of each of these kinds. Only crashes after at least `first_prefix` operations. Returns how many were
// visited.
size_t for_each_crash(const Recording& recording, uint64_t seed, size_t cap,
                      const std::function<void(CrashState&)>& visit, size_t first_prefix = 0);

}  // namespace thermocline::testing
