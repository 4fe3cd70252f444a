// Minimal io_uring by raw system calls, for reads only. Does not need liburing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace thermocline {

// Thread safety: one thread at a time.
// Invariant: at most `entries` reads are prepared or in flight, so neither ring overflows. The owner ensures it.
class Uring {
 public:
  struct Completion {
    uint64_t user_data;
    int32_t result;  // bytes read, or -errno
  };

  // Returns null if the kernel, a container's filter or a limit refuses a ring, or if the ring has no read operation.
  static std::unique_ptr<Uring> create(unsigned entries);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  // Pins memory once for all reads into it. It must outlive the ring. If the kernel refuses, reads work without it.
  void register_buffer(void* memory, size_t bytes);
  // Prepares a read; the kernel sees it at the next enter().
  void prepare_read(int fd, void* buf, uint32_t bytes, uint64_t offset, uint64_t user_data);
  unsigned prepared() const { return prepared_; }
  // Submits the prepared reads and, with `wait`, blocks until there is a completion. Throws IoError.
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
