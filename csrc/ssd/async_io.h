// Reads and writes that run beside their caller, on the threads of a PreadPool.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <utility>

#include "util/pread_queue.h"

namespace thermocline::ssd {

// Runs `io` on a thread of the pool; without a pool, at once. get() of the result rethrows its exception. The caller
// must wait for the result before it frees the memory that `io` uses.
inline std::future<void> start_io(PreadPool* pool, std::function<void()> io) {
  auto task = std::make_shared<std::packaged_task<void()>>(std::move(io));
  std::future<void> result = task->get_future();
  if (pool && pool->size() > 0) {
    pool->run([task] { (*task)(); });
  } else {
    (*task)();
  }
  return result;
}

}  // namespace thermocline::ssd
