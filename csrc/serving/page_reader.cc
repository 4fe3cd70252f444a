#include "serving/page_reader.h"

#include <algorithm>
#include <utility>

namespace thermocline::serving {

PageReader::PageReader(std::shared_ptr<FileSystem> fs, const std::string& path, uint32_t page_bytes)
    : fs_(std::move(fs)),
      file_(fs_->open(path, OpenMode::kRead)),
      page_bytes_(page_bytes),
      depth_(static_cast<size_t>(std::max(1, fs_->read_concurrency().depth))) {}

std::unique_ptr<PageReader::Channel> PageReader::take() {
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto channel = std::move(idle_.back());
      idle_.pop_back();
      return channel;
    }
  }
  return std::make_unique<Channel>(*fs_, depth_, page_bytes_);
}

void PageReader::read(const std::vector<uint64_t>& numbers, const std::function<void(size_t, const uint8_t*)>& fn) {
  std::unique_ptr<Channel> channel = take();  // after an exception it is destroyed, which waits for its reads
  ReadQueue& queue = *channel->queue;
  const size_t depth = std::min(depth_, queue.depth());
  std::vector<size_t> page_of(depth + 1);  // by buffer: the index in `numbers`
  const auto buffer = [&](size_t i) { return channel->memory.data() + i * page_bytes_; };
  size_t next = 0;
  const auto submit = [&](size_t to) {
    page_of[to] = next;
    queue.submit({file_.get(), numbers[next++] * page_bytes_, page_bytes_, buffer(to)}, to);
  };
  while (next < std::min(depth, numbers.size())) submit(next);
  queue.flush();
  size_t spare = depth;  // the buffer of no read
  for (size_t done = 0; done < numbers.size(); ++done) {
    const size_t finished = queue.wait();
    if (next < numbers.size()) {
      submit(spare);
      queue.flush();  // the device reads while fn() runs
    }
    fn(page_of[finished], buffer(finished));
    spare = finished;
  }
  std::lock_guard lock(mutex_);
  idle_.push_back(std::move(channel));
}

}  // namespace thermocline::serving
