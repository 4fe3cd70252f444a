// Test files and buffers for the tests of the POSIX file system.
#pragma once

#include <pthread.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "util/aligned.h"
#include "util/fs.h"
#include "util/uring.h"

namespace thermocline {

struct Buffer {
  explicit Buffer(size_t bytes) : memory(bytes), p(memory.data()), bytes(bytes) { std::memset(p, 0, bytes); }
  const AlignedBuffer memory;
  uint8_t* const p;
  const size_t bytes;
};

// Word i of a test file is a function of i, so that every range can be checked by itself.
inline void fill(uint8_t* p, size_t bytes, uint64_t offset) {
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t v = (offset + i) * 0x9e3779b97f4a7c15ULL;
    std::memcpy(p + i, &v, 8);
  }
}
inline bool filled(const uint8_t* p, size_t bytes, uint64_t offset) {
  Buffer want(bytes);
  fill(want.p, bytes, offset);
  return std::memcmp(p, want.p, bytes) == 0;
}

inline void write_pages(FileSystem& fs, const std::string& path, size_t pages) {
  Buffer b(pages * kSector);
  fill(b.p, b.bytes, 0);
  auto f = fs.open(path, OpenMode::kCreate);
  f->pwrite(b.p, b.bytes, 0);
  f->datasync();
}

inline std::vector<IoEngine> engines() {
  std::vector<IoEngine> all = {IoEngine::kPread};
  if (Uring::create(4)) all.push_back(IoEngine::kUring);
  return all;
}

template <typename E>
std::string message(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const E& e) {
    return e.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// While it exists, the system refuses new threads: no address space has their stack.
class NoNewThreads {
 public:
  NoNewThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t attributes;
    pthread_getattr_default_np(&attributes);
    pthread_attr_setstacksize(&attributes, size_t{1} << 60);
    refused_ = pthread_setattr_default_np(&attributes) == 0;
    pthread_attr_destroy(&attributes);
  }
  ~NoNewThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  bool refused() const { return refused_; }

 private:
  pthread_attr_t before_;
  bool refused_ = false;
};

}  // namespace thermocline
