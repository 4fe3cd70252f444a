// Reads in flight while pages are processed, and the bytes of each page.
#include "serving/page_reader.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "testing/mem_fs.h"
#include "testing/test.h"

namespace thermocline::serving {
namespace {

constexpr uint32_t kPage = 4096;

// Counts the reads that were started and not yet waited for.
class CountingFs : public testing::MemFs {
 public:
  Concurrency read_concurrency() const override { return {1, 3}; }
  std::unique_ptr<ReadQueue> read_queue(size_t depth) override {
    return std::make_unique<Queue>(MemFs::read_queue(depth), *this);
  }
  size_t in_flight = 0;

 private:
  class Queue : public ReadQueue {
   public:
    Queue(std::unique_ptr<ReadQueue> queue, CountingFs& fs) : queue_(std::move(queue)), fs_(fs) {}
    void submit(const ReadOp& op, uint64_t tag) override {
      queue_->submit(op, tag);
      ++submitted_;
    }
    uint64_t wait() override {
      flush();
      --fs_.in_flight;
      return queue_->wait();
    }
    size_t depth() const override { return queue_->depth(); }
    void flush() override { fs_.in_flight += std::exchange(submitted_, 0); }

   private:
    std::unique_ptr<ReadQueue> queue_;
    CountingFs& fs_;
    size_t submitted_ = 0;
  };
};

TEST(PageReader, TheDeviceReadsWhileAPageIsProcessed) {
  auto fs = std::make_shared<CountingFs>();
  std::string bytes;
  for (char page = 0; page < 20; ++page) bytes += std::string(kPage, page);
  fs->set_bytes("/file", bytes);
  PageReader reader(fs, "/file", kPage);
  for (size_t count : {0, 1, 2, 3, 4, 11}) {
    std::vector<uint64_t> numbers;
    for (size_t i = 0; i < count; ++i) numbers.push_back((7 * i + 3) % 20);
    std::vector<size_t> seen;
    reader.read(numbers, [&](size_t i, const uint8_t* page) {
      seen.push_back(i);
      CHECK_EQ(fs->in_flight, std::min<size_t>(3, count - seen.size()));
      CHECK(std::all_of(page, page + kPage, [&](uint8_t byte) { return byte == numbers[i]; }));
    });
    std::sort(seen.begin(), seen.end());
    for (size_t i = 0; i < count; ++i) CHECK_EQ(seen.at(i), i);
    CHECK_EQ(seen.size(), count);
    CHECK_EQ(fs->in_flight, 0u);
  }
}

}  // namespace
}  // namespace thermocline::serving
