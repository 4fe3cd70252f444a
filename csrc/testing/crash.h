// States of the disk after a power loss, rebuilt from a recording.
//
// The rules are the pessimistic reading of POSIX, on ext4's sectors:
//   1. Written bytes are durable after a datasync of their file. Before that any subset of their 512-byte sectors may
//      survive; the file may already have its new size, with zeros, random bytes or old bytes of another file in the
//      lost sectors.
//   2. A name (create, rename, unlink, link, make_dir) is durable after a sync_dir of its folder. Before that any
//   subset
//      of the changes may survive, in any order. A rename is atomic.
//   3. datasync does not make names durable, sync_dir does not make bytes durable.
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
  size_t prefix;     // the crash is after ops[0, prefix)
  std::string what;  // surviving unsynced changes, for messages
};

// Visits at most `cap` states, determined by the seed: for every prefix all unsynced changes kept or dropped, each one
// kept or dropped alone, pairs, torn writes, and random mixtures. If there are more, an even sample of each kind over
// the recording. Only crashes after at least `first_prefix` operations. Returns the number of states visited.
size_t for_each_crash(const Recording& recording, uint64_t seed, size_t cap,
                      const std::function<void(CrashState&)>& visit, size_t first_prefix = 0);

}  // namespace thermocline::testing
