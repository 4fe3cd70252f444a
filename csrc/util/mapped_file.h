// A read-only memory mapping of a whole regular file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace thermocline {

// The mapping stays valid after the file is deleted or replaced. A file that is truncated in place while it is mapped
// ends the process (SIGBUS): map only files that are published by rename and never changed.
class MappedFile {
 public:
  // Throws NotFoundError or IoError. Does not follow a symbolic link.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  const std::string& path() const { return path_; }
  // Tells the system that pages are read in no order: a page fault then reads one page.
  void expect_random_reads() const;
  // Starts reading a part of the file into memory, in large reads. `offset` is a multiple of the page size.
  void read_ahead(size_t offset, size_t bytes) const;

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace thermocline
