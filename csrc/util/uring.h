// A minimal io_uring, by raw system calls: reads only. liburing is not needed, and nothing is missing without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace thermocline {

// Thread safety: none; one thread at a time uses a ring.
// Invariant: the owner never has more than `entries` reads prepared or in flight, so neither ring overflows.
class Uring {
 public:
  struct Completion {
    uint64_t user_data;
    int32_t result;  // bytes read, or -errno
  };

  // Null where the kernel, a container's filter or a limit refuses a ring, or it cannot read.
  static std::unique_ptr<Uring> create(unsigned entries);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  // Reads into this memory, which must outlive the ring, need no pinning of their own. Fine if the kernel refuses.
  void register_buffer(void* memory, size_t bytes);
  // Prepares a read; the kernel sees it at the next enter().
  void prepare_read(int fd, void* buf, uint32_t bytes, uint64_t offset, uint64_t user_data);
  unsigned prepared() const { return prepared_; }
  // Submits what is prepared and, with `wait`, sleeps until there is a completion. Throws IoError.
  void enter(bool wait);
  // Takes one completion, if there is one.
  bool pop(Completion* out);

 private:
  struct Mapping;
  explicit Uring(std::unique_ptr<Mapping> mapping);
  std::unique_ptr<Mapping> m_;
  unsigned prepared_ = 0;
  uintptr_t fixed_begin_ = 0, fixed_end_ = 0;  // the registered memory
};

}  // namespace thermocline
