#include "ssd/reader.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>

namespace thermocline::ssd {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

uint32_t ReadCost::gap() const {
  if (page_us <= 0) return 3;
  return static_cast<uint32_t>(std::clamp(read_us / page_us, 0.0, 15.0));
}

// ---- channels

// A read queue and its buffers: one buffer per read in flight. Not thread-safe: leased to one worker at a time.
class Reader::Channel {
 public:
  Channel(FileSystem& fs, size_t depth, size_t buffer_bytes)
      : queue(fs.read_queue(depth)), engine(fs.name()), memory(depth * buffer_bytes), in_flight(depth, nullptr) {
    queue->use_buffer(memory.data(), memory.size());
  }
  // Destroys the queue first: that waits for the reads in flight into `memory`.
  ~Channel() { queue.reset(); }
  std::unique_ptr<ReadQueue> queue;
  const std::string engine;  // of the queue
  AlignedBuffer memory;
  std::vector<const ReadRequest*> in_flight;  // per buffer; null: the buffer is free
};

// Blocks until a channel may be used. The channel is destroyed with the lease unless keep() was called.
class Reader::Lease {
 public:
  explicit Lease(Reader& reader) : reader_(reader) {
    std::unique_ptr<Channel> outdated;  // destroyed after the lock is released
    std::unique_lock lock(reader.mutex_);
    reader.returned_.wait(lock,
                          [&] { return !reader.idle_.empty() || reader.leased_ < reader.ctx_.sizes.read_workers; });
    ++reader.leased_;
    if (reader.idle_.empty()) return;
    channel_ = std::move(reader.idle_.back());
    reader.idle_.pop_back();
    if (channel_->engine == reader.ctx_.fs->name()) return;
    reader.channel_bytes_ -= channel_->memory.size();  // the file system changed its engine
    outdated = std::move(channel_);
  }
  Channel& channel() {
    if (!channel_) {
      const Context& ctx = reader_.ctx_;
      size_t depth = static_cast<size_t>(ctx.sizes.read_depth), bytes = size_t{ctx.sizes.read_pages} * ctx.g.page_bytes;
      channel_ = std::make_unique<Channel>(*ctx.fs, depth, bytes);
      std::lock_guard lock(reader_.mutex_);
      reader_.channel_bytes_ += channel_->memory.size();
    }
    return *channel_;
  }
  // No read is in flight: the channel can be used again.
  void keep() { keep_ = true; }
  ~Lease() {
    std::unique_ptr<Channel> discarded;  // destroyed after the lock is released
    std::lock_guard lock(reader_.mutex_);
    --reader_.leased_;
    if (keep_ && channel_) {
      reader_.idle_.push_back(std::move(channel_));
    } else if (channel_) {
      reader_.channel_bytes_ -= channel_->memory.size();
      discarded = std::move(channel_);
    }
    reader_.returned_.notify_one();
  }

 private:
  Reader& reader_;
  std::unique_ptr<Channel> channel_;
  bool keep_ = false;
};

// ---- workers

// One thread's part of execute(): claims requests, keeps its queue full and passes on the pages that arrive.
class Reader::Worker {
 public:
  // `next_block`: index of the next unclaimed request, shared by all workers.
  Worker(Reader& reader, const ReadPlan& plan, const std::vector<ReadRequest>& requests,
         std::atomic<size_t>& next_block, size_t number, const Arrived& arrived)
      : reader_(reader),
        ctx_(reader.ctx_),
        plan_(plan),
        requests_(requests),
        next_block_(next_block),
        number_(number),
        arrived_(arrived),
        block_(std::clamp<size_t>(requests.size() / (4 * static_cast<size_t>(ctx_.sizes.read_workers)), 1, 64)),
        buffer_bytes_(size_t{ctx_.sizes.read_pages} * ctx_.g.page_bytes) {}

  void run() {
    if (!claim()) return;
    lease_channel();
    for (;;) {
      bool ok = fill_queue();
      if (ok && idle()) break;
      if (ok) ok = complete_one();
      if (!ok) recover();
    }
    reader_.counters_.reads += reads_;
    reader_.counters_.bytes += pages_ * ctx_.g.page_bytes;
    lease_->keep();
  }

 private:
  // Claims a block of requests if the last one is used up: a block keeps the worker in one region of the file. Returns
  // false if no request is left.
  bool claim() {
    if (at_ < end_) return true;
    at_ = next_block_.fetch_add(block_);
    end_ = std::min(at_ + block_, requests_.size());
    if (at_ < requests_.size()) return true;
    at_ = end_ = requests_.size();
    return false;
  }

  void lease_channel() {
    lease_.emplace(reader_);
    channel_ = &lease_->channel();
    free_buffers_.resize(channel_->in_flight.size());
    for (size_t i = 0; i < free_buffers_.size(); ++i) free_buffers_[i] = static_cast<uint32_t>(i);
  }

  bool idle() const { return free_buffers_.size() == channel_->in_flight.size(); }
  uint8_t* buffer(size_t i) const { return channel_->memory.data() + i * buffer_bytes_; }

  // Submits requests until all buffers are in use or no request is left. Returns false if a submission failed.
  bool fill_queue() {
    while (!free_buffers_.empty() && claim()) {
      const ReadRequest& request = requests_[at_++];
      const uint32_t b = free_buffers_.back();
      free_buffers_.pop_back();
      channel_->in_flight[b] = &request;
      pages_ += request.pages;
      ++reads_;
      File* file = plan_.files[file_of(request.address)]->file.get();
      try {
        channel_->queue->submit(
            {file, page_of(request.address) * ctx_.g.page_bytes, request.pages * ctx_.g.page_bytes, buffer(b)}, b);
      } catch (const IoError&) {
        return false;
      }
    }
    return true;
  }

  // Waits for one read and passes on its pages. Returns false if the read failed.
  bool complete_one() {
    uint64_t b;
    try {
      b = channel_->queue->wait();
    } catch (const IoError&) {
      return false;
    }
    const ReadRequest& request = *std::exchange(channel_->in_flight[b], nullptr);
    arrived_(request, buffer(b), number_);
    free_buffers_.push_back(static_cast<uint32_t>(b));
    return true;
  }

  // A read failed, perhaps at a bad sector that no lookup needs, and the queue does not report which one. Reads all
  // requests in flight again, only the pages that lookups need; throws IoError if such a page cannot be read. Then
  // continues with another channel.
  void recover() {
    std::vector<const ReadRequest*> again;
    for (const ReadRequest* request : channel_->in_flight)
      if (request) again.push_back(request);
    lease_.reset();  // destroys the channel, which waits for its reads
    AlignedBuffer single(buffer_bytes_);
    for (const ReadRequest* request : again) {
      read_page_by_page(*request, single.data());
      arrived_(*request, single.data(), number_);
    }
    lease_channel();
  }

  void read_page_by_page(const ReadRequest& request, uint8_t* bytes) {
    const size_t page_bytes = ctx_.g.page_bytes;
    File& file = *plan_.files[file_of(request.address)]->file;
    PageAddress last = ~PageAddress{0};
    for (uint32_t i = request.first_lookup; i < request.end_lookup; ++i) {
      const PageAddress address = plan_.lookups[i].address;
      if (address == last) continue;
      file.pread(bytes + (address - request.address) * page_bytes, page_bytes, page_of(address) * page_bytes);
      last = address;
    }
  }

  // Constant after construction.
  Reader& reader_;
  const Context& ctx_;
  const ReadPlan& plan_;
  const std::vector<ReadRequest>& requests_;
  std::atomic<size_t>& next_block_;
  const size_t number_;
  const Arrived& arrived_;
  const size_t block_;  // requests claimed at once
  const size_t buffer_bytes_;

  size_t at_ = 0, end_ = 0;  // claimed requests not yet submitted
  std::optional<Lease> lease_;
  Channel* channel_ = nullptr;  // of lease_
  std::vector<uint32_t> free_buffers_;
  uint64_t reads_ = 0, pages_ = 0;
};

// ---- reader

Reader::Reader(Context& ctx, ThreadPool& pool) : ctx_(ctx), pool_(pool) {}

Reader::~Reader() = default;

uint64_t Reader::memory() const {
  std::lock_guard lock(mutex_);
  return channel_bytes_;
}

ReadCost Reader::cost() const {
  std::lock_guard lock(mutex_);
  return cost_;
}

std::vector<ReadRequest> Reader::requests_for(const ReadPlan& plan) const {
  return make_requests(plan.lookups, cost().gap(), ctx_.sizes.read_pages);
}

void Reader::execute(const ReadPlan& plan, const std::vector<ReadRequest>& requests, const Arrived& arrived) {
  std::atomic<size_t> next_block{0};
  // At least eight requests per worker: fewer do not repay waking a thread.
  size_t workers = std::min<size_t>(static_cast<size_t>(ctx_.sizes.read_workers), (requests.size() + 7) / 8);
  pool_.parallel(workers, [&](size_t number) { Worker(*this, plan, requests, next_block, number, arrived).run(); });
}

ReadPlan Reader::run(const ReadPlan& plan, const uint64_t* keys, uint8_t* found, RowsOut rows) {
  counters_.keys += plan.before_page.empty() ? plan.items.size() : 0;
  const Geometry& g = ctx_.g;
  std::vector<std::vector<const PageLookup*>> missed(static_cast<size_t>(ctx_.sizes.read_workers));  // per worker
  execute(plan, requests_for(plan), [&](const ReadRequest& request, const uint8_t* bytes, size_t worker) {
    DataFile& file = *plan.files[file_of(request.address)];
    const uint8_t* page = nullptr;
    PageAddress verified = ~PageAddress{0};
    uint64_t pages = 0;
    PageKind kind{};
    for (uint32_t l = request.first_lookup; l < request.end_lookup; ++l) {
      const PageLookup& lookup = plan.lookups[l];
      if (lookup.address != verified) {
        page = bytes + (lookup.address - request.address) * g.page_bytes;
        kind = verify_data_page(page, g, file.nonce, page_of(lookup.address), file.file->path());
        verified = lookup.address;
        ++pages;
      }
      uint32_t index = plan.items[lookup.item].index, count = page_header(page).count, i = 0;
      uint64_t key = keys[index];
      while (i < count && page_key(page, kind, i) != key) ++i;
      if (i == count) {
        if (lookup.in_log) missed[worker].push_back(&lookup);
      } else if (kind == PageKind::kRows) {
        std::memcpy(rows.at(index), page_row(page, g, i), g.row_bytes);
        found[index] = 1;
      }
    }
    counters_.pages += pages;
  });
  std::vector<const PageLookup*> all;
  for (auto& part : missed) all.insert(all.end(), part.begin(), part.end());
  counters_.false_pages += all.size();
  std::sort(all.begin(), all.end(), [](const PageLookup* a, const PageLookup* b) { return a->item < b->item; });
  ReadPlan rest;
  rest.copies = plan.copies;
  for (const PageLookup* lookup : all) {
    rest.items.push_back(plan.items[lookup->item]);
    rest.before_page.push_back(lookup->vpage);
  }
  return rest;
}

double Reader::time_reads(const ReadPlan& plan) {
  const std::vector<ReadRequest> requests = requests_for(plan);
  const auto start = std::chrono::steady_clock::now();
  execute(plan, requests, [](const ReadRequest&, const uint8_t*, size_t) {});
  return seconds_since(start);
}

// ---- cost of the device

// Returns microseconds per read of random reads, with the concurrency of lookups.
double Reader::measure_requests(const ReadPlan& plan, uint32_t file, uint32_t pages_per_read, uint64_t salt) {
  constexpr size_t kReads = 512;
  const uint64_t pages = plan.files[file]->pages;
  std::vector<ReadRequest> requests;
  for (size_t i = 0; i < kReads; ++i)
    requests.push_back({make_address(file, mix64(i + salt) % (pages - pages_per_read)), pages_per_read, 0, 0});
  const auto start = std::chrono::steady_clock::now();
  execute(plan, requests, [](const ReadRequest&, const uint8_t*, size_t) {});
  return seconds_since(start) / kReads * 1e6;
}

void Reader::measure(const ReadPlan& plan) {
  constexpr uint64_t kEnoughPages = 4096;
  constexpr uint64_t kMeasureEvery = 64;  // large batches
  {
    std::lock_guard lock(mutex_);
    if (large_batches_++ % kMeasureEvery != 0) return;
  }
  const uint32_t most = ctx_.sizes.read_pages;
  for (uint32_t f = 0; f < plan.files.size(); ++f) {
    if (plan.files[f]->pages < kEnoughPages) continue;
    double single, full;  // the better of two measurements each
    try {
      single = std::min(measure_requests(plan, f, 1, 1), measure_requests(plan, f, 1, 1 << 20));
      full = most > 1 ? std::min(measure_requests(plan, f, most, 2 << 20), measure_requests(plan, f, most, 3 << 20))
                      : single;
    } catch (const IoError&) {
      continue;  // a bad sector outside of the lookups: try another file
    }
    std::lock_guard lock(mutex_);
    auto keep_best = [](double& best, double now) { best = best > 0 ? std::min(best, now) : now; };
    keep_best(cost_.page_us, std::max(full / most, 1e-3));
    if (most > 1) keep_best(cost_.read_us, single);
    return;
  }
}

}  // namespace thermocline::ssd
