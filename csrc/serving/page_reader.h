// Reads row pages of a snapshot file from the device, past the page cache, with many reads in flight: for files larger
// than memory, where a mapping would wait for one page fault after another.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "util/aligned.h"
#include "util/fs.h"

namespace thermocline::serving {

// Thread safety: all calls may run concurrently.
class PageReader {
 public:
  PageReader(std::shared_ptr<FileSystem> fs, const std::string& path, uint32_t page_bytes);

  // Reads the pages `numbers` of the file, each once. Calls fn(i, bytes) for numbers[i], in the order in which reads
  // finish; the bytes are valid during the call.
  void read(const std::vector<uint64_t>& numbers, const std::function<void(size_t, const uint8_t*)>& fn);

 private:
  struct Channel {
    Channel(FileSystem& fs, size_t depth, uint32_t page_bytes)
        : memory((depth + 1) * page_bytes), queue(fs.read_queue(depth)) {
      queue->use_buffer(memory.data(), memory.size());
    }
    AlignedBuffer memory;
    std::unique_ptr<ReadQueue> queue;  // destroyed first: that waits for the reads into `memory`
  };
  std::unique_ptr<Channel> take();

  const std::shared_ptr<FileSystem> fs_;
  const std::unique_ptr<File> file_;
  const uint32_t page_bytes_;
  const size_t depth_;
  std::mutex mutex_;  // protects idle_
  std::vector<std::unique_ptr<Channel>> idle_;
};

}  // namespace thermocline::serving
