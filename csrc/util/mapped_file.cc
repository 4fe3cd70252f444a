#include "util/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "util/error.h"

namespace thermocline {
namespace {

[[noreturn]] void fail(const std::string& path, const char* call, int code) {
  std::string text = path + ": " + call + ": " + std::strerror(code);
  if (code == ENOENT) throw NotFoundError(text);
  throw IoError(text, code);
}

struct Descriptor {
  int fd;
  ~Descriptor() { ::close(fd); }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW)};
  if (file.fd < 0) fail(path, "open", errno);
  struct stat info{};
  if (::fstat(file.fd, &info) != 0) fail(path, "fstat", errno);
  if (!S_ISREG(info.st_mode)) throw IoError(path + ": not a regular file", 0);
  size_ = static_cast<size_t>(info.st_size);
  if (size_ == 0) return;
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
  if (mapped == MAP_FAILED) fail(path, "mmap", errno);
  data_ = static_cast<const uint8_t*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), size_);
}

void MappedFile::expect_random_reads() const {
  if (data_ != nullptr) ::madvise(const_cast<uint8_t*>(data_), size_, MADV_RANDOM);
}

void MappedFile::read_ahead(size_t offset, size_t bytes) const {
  if (offset < size_) ::madvise(const_cast<uint8_t*>(data_) + offset, std::min(bytes, size_ - offset), MADV_WILLNEED);
}

}  // namespace thermocline
