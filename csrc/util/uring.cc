#include "util/uring.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

// Headers with this macro also have IORING_OP_READ and the probe (Linux 5.6).
#ifdef IO_URING_OP_SUPPORTED

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "util/error.h"

namespace thermocline {
namespace {

int sys_setup(unsigned entries, io_uring_params* p) { return int(syscall(__NR_io_uring_setup, entries, p)); }
int sys_enter(int fd, unsigned submit, unsigned min_complete, unsigned flags) {
  return int(syscall(__NR_io_uring_enter, fd, submit, min_complete, flags, nullptr, size_t{0}));
}

bool can_read(int ring_fd) {
  constexpr unsigned kOps = IORING_OP_READ + 1;
  const size_t bytes = sizeof(io_uring_probe) + kOps * sizeof(io_uring_probe_op);
  std::unique_ptr<io_uring_probe, void (*)(void*)> probe(static_cast<io_uring_probe*>(std::calloc(1, bytes)),
                                                         std::free);
  if (!probe || syscall(__NR_io_uring_register, ring_fd, IORING_REGISTER_PROBE, probe.get(), kOps) < 0) return false;
  return probe->last_op >= IORING_OP_READ && (probe->ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED);
}

}  // namespace

struct Uring::Mapping {
  int fd = -1;
  void* rings = MAP_FAILED;
  size_t rings_bytes = 0;
  void* sqe_map = MAP_FAILED;
  size_t sqe_bytes = 0;

  unsigned *sq_tail = nullptr, *sq_array = nullptr, *cq_head = nullptr, *cq_tail = nullptr;
  unsigned sq_mask = 0, cq_mask = 0;
  io_uring_sqe* sqes = nullptr;
  io_uring_cqe* cqes = nullptr;

  ~Mapping() {
    if (sqe_map != MAP_FAILED) munmap(sqe_map, sqe_bytes);
    if (rings != MAP_FAILED) munmap(rings, rings_bytes);
    if (fd >= 0) close(fd);
  }

  bool init(unsigned entries) {
    io_uring_params p{};
#ifdef IORING_SETUP_COOP_TASKRUN
    p.flags = IORING_SETUP_COOP_TASKRUN;  // completions do not interrupt this thread: it polls for them
    fd = sys_setup(entries, &p);
    if (fd < 0) p = {};
#endif
    if (fd < 0) fd = sys_setup(entries, &p);
    if (fd < 0 || !(p.features & IORING_FEAT_SINGLE_MMAP) || !can_read(fd)) return false;
    const size_t sq = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    const size_t cq = p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe);
    rings_bytes = sq > cq ? sq : cq;
    rings = mmap(nullptr, rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED) return false;
    sqe_bytes = p.sq_entries * sizeof(io_uring_sqe);
    sqe_map = mmap(nullptr, sqe_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_SQES);
    if (sqe_map == MAP_FAILED) return false;

    auto at = [&](unsigned offset) { return reinterpret_cast<unsigned*>(static_cast<char*>(rings) + offset); };
    sq_tail = at(p.sq_off.tail);
    sq_array = at(p.sq_off.array);
    sq_mask = *at(p.sq_off.ring_mask);
    cq_head = at(p.cq_off.head);
    cq_tail = at(p.cq_off.tail);
    cq_mask = *at(p.cq_off.ring_mask);
    sqes = static_cast<io_uring_sqe*>(sqe_map);
    cqes = reinterpret_cast<io_uring_cqe*>(at(p.cq_off.cqes));
    return true;
  }
};

Uring::Uring(std::unique_ptr<Mapping> mapping) : m_(std::move(mapping)) {}
Uring::~Uring() = default;

std::unique_ptr<Uring> Uring::create(unsigned entries) {
  auto mapping = std::make_unique<Mapping>();
  if (!mapping->init(entries)) return nullptr;
  return std::unique_ptr<Uring>(new Uring(std::move(mapping)));
}

void Uring::register_buffer(void* memory, size_t bytes) {
  iovec buffer{memory, bytes};
  if (syscall(__NR_io_uring_register, m_->fd, IORING_REGISTER_BUFFERS, &buffer, 1u) < 0) return;
  fixed_begin_ = reinterpret_cast<uintptr_t>(memory);
  fixed_end_ = fixed_begin_ + bytes;
}

void Uring::prepare_read(int fd, void* buf, uint32_t bytes, uint64_t offset, uint64_t user_data) {
  const unsigned tail = *m_->sq_tail;  // written by this side only
  io_uring_sqe* sqe = &m_->sqes[tail & m_->sq_mask];
  std::memset(sqe, 0, sizeof *sqe);
  const auto begin = reinterpret_cast<uintptr_t>(buf);
  const bool fixed = begin >= fixed_begin_ && begin + bytes <= fixed_end_;
  sqe->opcode = fixed ? IORING_OP_READ_FIXED : IORING_OP_READ;  // buf_index 0: the only registered buffer
  sqe->fd = fd;
  sqe->off = offset;
  sqe->addr = reinterpret_cast<uint64_t>(buf);
  sqe->len = bytes;
  sqe->user_data = user_data;
  m_->sq_array[tail & m_->sq_mask] = tail & m_->sq_mask;
  std::atomic_ref(*m_->sq_tail).store(tail + 1, std::memory_order_release);
  ++prepared_;
}

void Uring::enter(bool wait) {
  for (;;) {
    const int n = sys_enter(m_->fd, prepared_, wait ? 1 : 0, wait ? IORING_ENTER_GETEVENTS : 0);
    if (n >= 0) {
      prepared_ -= unsigned(n);
      if (prepared_ == 0) return;
      continue;  // the kernel accepted only some of them
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EBUSY) {  // the kernel lacks memory for requests: let some finish
      if (*m_->cq_head != std::atomic_ref(*m_->cq_tail).load(std::memory_order_acquire)) return;
      sched_yield();
      continue;
    }
    throw IoError(std::string("io_uring_enter failed: ") + std::strerror(errno) +
                      "; set THERMOCLINE_IO=pread to read without io_uring",
                  errno);
  }
}

bool Uring::pop(Completion* out) {
  const unsigned head = *m_->cq_head;  // written by this side only
  if (head == std::atomic_ref(*m_->cq_tail).load(std::memory_order_acquire)) return false;
  const io_uring_cqe& cqe = m_->cqes[head & m_->cq_mask];
  *out = {cqe.user_data, cqe.res};
  std::atomic_ref(*m_->cq_head).store(head + 1, std::memory_order_release);
  return true;
}

}  // namespace thermocline

#else  // no io_uring headers: create() fails and reads use pread

namespace thermocline {
struct Uring::Mapping {};
Uring::Uring(std::unique_ptr<Mapping> mapping) : m_(std::move(mapping)) {}
Uring::~Uring() = default;
std::unique_ptr<Uring> Uring::create(unsigned) { return nullptr; }
void Uring::register_buffer(void*, size_t) {}
void Uring::prepare_read(int, void*, uint32_t, uint64_t, uint64_t) {}
void Uring::enter(bool) {}
bool Uring::pop(Completion*) { return false; }
}  // namespace thermocline

#endif
