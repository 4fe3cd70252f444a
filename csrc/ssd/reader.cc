#include "ssd/reader.h"

#include <algorithm>
#include <chrono>
#include <unordered_map>

namespace thermocline::ssd {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};
constexpr int kPageBits = 40;
constexpr uint64_t kPageMask = (uint64_t{1} << kPageBits) - 1;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

uint64_t place_of(uint32_t file, uint64_t page) { return (uint64_t{file} << kPageBits) | page; }

}  // namespace

uint32_t ReadCost::gap() const {
  if (page_us <= 0) return 3;
  return static_cast<uint32_t>(std::clamp(read_us / page_us, 0.0, 15.0));
}

uint32_t Plan::add_file(const std::shared_ptr<DataFile>& file) {
  files.push_back(file);
  return static_cast<uint32_t>(files.size() - 1);
}

void plan_reads(const Index& index, Plan& plan) {
  plan.wants.reserve(plan.items.size());
  std::vector<Want> log_wants;
  std::unordered_map<const DataFile*, uint32_t> segments;
  auto log_place = [&](uint32_t vpage) {
    LogPage at = index.log_page(vpage);
    auto [it, fresh] = segments.try_emplace(at.segment.get(), 0);
    if (fresh) it->second = plan.add_file(at.segment);
    return place_of(it->second, at.page);
  };
  size_t at = plan.items.empty() ? 0 : index.partition_of(plan.items[0].hash);
  uint32_t base_file = kNone, hint = 0;
  for (uint32_t i = 0; i < plan.items.size(); ++i) {
    const uint64_t hash = plan.items[i].hash;
    if (hash > index.partition(at).hi) {
      at = index.partition_of(hash);
      base_file = kNone;
      hint = 0;
    }
    const Partition& p = index.partition(at);
    uint32_t page;
    if (Index::candidate(p, hash, plan.older.empty() ? nullptr : &plan.older[i], &page)) {
      log_wants.push_back({log_place(page), i, page, true});
    } else if (p.base && Index::base_page(*p.base, hash, &page, hint)) {
      hint = page;
      if (base_file == kNone) base_file = plan.add_file(p.base->data);
      plan.wants.push_back({place_of(base_file, 1 + page), i, 0, false});
    }
  }
  // Base wants came in order of place; those of the log follow, in theirs.
  std::sort(log_wants.begin(), log_wants.end(), [](const Want& a, const Want& b) { return a.place < b.place; });
  plan.wants.insert(plan.wants.end(), log_wants.begin(), log_wants.end());
}

// Not thread-safe: lent to one thread at a time.
class Reader::Channel {
 public:
  Channel(FileSystem& fs, size_t depth, size_t buffer_bytes)
      : queue(fs.read_queue(depth)), memory(depth * buffer_bytes), reads(depth) {
    queue->use_buffer(memory.data(), memory.size());
  }
  // The queue goes first: it waits for the reads in flight into `memory`.
  ~Channel() { queue.reset(); }
  std::unique_ptr<ReadQueue> queue;
  AlignedBuffer memory;
  std::vector<const Read*> reads;  // in flight, by buffer
  bool failed = false;
};

// Takes a channel, waiting for one; gives it back unless something went wrong with reads in flight.
class Reader::Lease {
 public:
  explicit Lease(Reader& reader) : reader_(reader) {
    std::unique_lock lock(reader.mutex_);
    reader.returned_.wait(lock, [&] { return !reader.idle_.empty() || reader.lent_ < reader.ctx_.sizes.read_workers; });
    ++reader.lent_;
    if (reader.idle_.empty()) return;
    channel_ = std::move(reader.idle_.back());
    reader.idle_.pop_back();
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
  void keep() { keep_ = true; }
  ~Lease() {
    std::unique_ptr<Channel> spoiled;
    std::lock_guard lock(reader_.mutex_);
    --reader_.lent_;
    if (keep_ && channel_) {
      reader_.idle_.push_back(std::move(channel_));
    } else if (channel_) {
      reader_.channel_bytes_ -= channel_->memory.size();
      spoiled = std::move(channel_);
    }
    reader_.returned_.notify_one();
  }

 private:
  Reader& reader_;
  std::unique_ptr<Channel> channel_;
  bool keep_ = false;
};

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

std::vector<Reader::Read> Reader::group(const std::vector<Want>& wants) const {
  std::vector<Read> reads;
  const uint64_t gap = cost().gap();
  for (uint32_t i = 0; i < wants.size(); ++i) {
    uint64_t place = wants[i].place;
    if (!reads.empty()) {
      Read& last = reads.back();
      uint64_t end = last.place + last.pages;  // of another file: far away, as the file is in the upper bits
      if (place < end + gap + 1 && place - last.place < ctx_.sizes.read_pages) {
        last.pages = static_cast<uint32_t>(std::max<uint64_t>(last.pages, place - last.place + 1));
        last.end_want = i + 1;
        continue;
      }
    }
    reads.push_back({place, 1, i, i + 1});
  }
  return reads;
}

void Reader::drive(const Plan& plan, const std::vector<Read>& reads, std::atomic<size_t>& next, size_t worker,
                   const Arrived& fn) {
  // Blocks of reads keep each worker in its own neighbourhood of the file.
  const size_t block = std::clamp<size_t>(reads.size() / (4 * static_cast<size_t>(ctx_.sizes.read_workers)), 1, 64);
  size_t at = next.fetch_add(block), end = std::min(at + block, reads.size());
  if (at >= reads.size()) return;
  auto lease = std::make_unique<Lease>(*this);
  Channel* channel = &lease->channel();
  const size_t depth = channel->reads.size(), bytes = size_t{ctx_.sizes.read_pages} * ctx_.g.page_bytes;
  std::vector<uint32_t> free_buffers(depth);
  for (size_t i = 0; i < depth; ++i) free_buffers[i] = static_cast<uint32_t>(i);
  uint64_t pages = 0, count = 0;
  for (size_t in_flight = 0;;) {
    while (in_flight < depth) {
      if (at == end) {
        at = next.fetch_add(block);
        end = std::min(at + block, reads.size());
        if (at >= reads.size()) {
          at = end = reads.size();
          break;
        }
      }
      const Read& read = reads[at++];
      uint32_t buffer = free_buffers.back();
      free_buffers.pop_back();
      channel->reads[buffer] = &read;
      File* file = plan.files[read.place >> kPageBits]->file.get();
      ++in_flight;
      pages += read.pages;
      ++count;
      try {
        channel->queue->submit({file, (read.place & kPageMask) * ctx_.g.page_bytes, read.pages * ctx_.g.page_bytes,
                                channel->memory.data() + buffer * bytes},
                               buffer);
      } catch (const IoError&) {
        channel->failed = true;
        break;
      }
    }
    if (in_flight == 0) break;
    uint64_t buffer = 0;
    if (!channel->failed) {
      try {
        buffer = channel->queue->wait();
      } catch (const IoError&) {
        channel->failed = true;
      }
    }
    if (channel->failed) {
      // Some read met a bad sector, perhaps one that nobody wants. Which one is not said: all in flight are read again,
      // page by page, by a new channel's memory; the wanted page that cannot be read raises.
      std::vector<const Read*> again;
      std::vector<uint8_t> idle(depth, 0);
      for (uint32_t b : free_buffers) idle[b] = 1;
      for (size_t b = 0; b < depth; ++b)
        if (!idle[b]) again.push_back(channel->reads[b]);
      lease.reset();  // waits for what is in flight
      AlignedBuffer single(bytes);
      for (const Read* read : again) {
        read_singly(plan, *read, single.data());
        fn(*read, single.data(), worker);
      }
      lease = std::make_unique<Lease>(*this);
      channel = &lease->channel();
      free_buffers.resize(depth);
      for (size_t i = 0; i < depth; ++i) free_buffers[i] = static_cast<uint32_t>(i);
      in_flight = 0;
      continue;
    }
    --in_flight;
    fn(*channel->reads[buffer], channel->memory.data() + buffer * bytes, worker);
    free_buffers.push_back(static_cast<uint32_t>(buffer));
  }
  counters_.reads += count;
  counters_.bytes += pages * ctx_.g.page_bytes;
  lease->keep();
}

void Reader::read_singly(const Plan& plan, const Read& read, uint8_t* bytes) {
  const size_t page_bytes = ctx_.g.page_bytes;
  File& file = *plan.files[read.place >> kPageBits]->file;
  uint64_t last = ~uint64_t{0};
  for (uint32_t w = read.first_want; w < read.end_want; ++w) {
    uint64_t place = plan.wants[w].place;
    if (place == last) continue;
    file.pread(bytes + (place - read.place) * page_bytes, page_bytes, (place & kPageMask) * page_bytes);
    last = place;
  }
}

void Reader::execute(const Plan& plan, const std::vector<Read>& reads, const Arrived& fn) {
  std::atomic<size_t> next{0};
  // A few reads are not worth waking anybody.
  size_t workers = std::min<size_t>(static_cast<size_t>(ctx_.sizes.read_workers), (reads.size() + 7) / 8);
  pool_.parallel(workers, [&](size_t worker) { drive(plan, reads, next, worker, fn); });
}

Plan Reader::run(const Plan& plan, const uint64_t* keys, uint8_t* found, RowsOut rows) {
  counters_.keys += plan.older.empty() ? plan.items.size() : 0;
  const Geometry& g = ctx_.g;
  std::vector<std::vector<const Want*>> missed(static_cast<size_t>(ctx_.sizes.read_workers));
  execute(plan, group(plan.wants), [&](const Read& read, const uint8_t* bytes, size_t worker) {
    DataFile& file = *plan.files[read.place >> kPageBits];
    const uint8_t* page = nullptr;
    uint64_t verified = ~uint64_t{0}, pages = 0;
    PageKind kind{};
    for (uint32_t w = read.first_want; w < read.end_want; ++w) {
      const Want& want = plan.wants[w];
      if (want.place != verified) {
        page = bytes + (want.place - read.place) * g.page_bytes;
        kind = verify_data_page(page, g, file.nonce, want.place & kPageMask, file.file->path());
        verified = want.place;
        ++pages;
      }
      uint32_t index = plan.items[want.item].index, count = page_header(page).count, i = 0;
      uint64_t key = keys[index];
      while (i < count && page_key(page, kind, i) != key) ++i;
      if (i == count) {
        if (want.in_log) missed[worker].push_back(&want);
      } else if (kind == PageKind::kRows) {
        std::memcpy(rows.at(index), page_row(page, g, i), g.row_bytes);
        found[index] = 1;
      }
    }
    counters_.pages += pages;
  });
  std::vector<const Want*> all;
  for (auto& part : missed) all.insert(all.end(), part.begin(), part.end());
  counters_.false_pages += all.size();
  std::sort(all.begin(), all.end(), [](const Want* a, const Want* b) { return a->item < b->item; });
  Plan rest;
  for (const Want* want : all) {
    rest.items.push_back(plan.items[want->item]);
    rest.older.push_back(want->vpage);
  }
  return rest;
}

double Reader::run_raw(Plan& plan) {
  std::vector<Read> reads = group(plan.wants);
  auto start = std::chrono::steady_clock::now();
  execute(plan, reads, [](const Read&, const uint8_t*, size_t) {});
  return seconds_since(start);
}

void Reader::measure(const Plan& plan) {
  constexpr uint64_t kEnoughPages = 4096;
  constexpr size_t kReads = 512;
  constexpr uint64_t kMeasureEvery = 64;
  {
    std::lock_guard lock(mutex_);
    if (large_batches_++ % kMeasureEvery != 0) return;
  }
  for (uint32_t f = 0; f < plan.files.size(); ++f) {
    uint64_t pages = plan.files[f]->pages;
    if (pages < kEnoughPages) continue;
    // Random single pages and random full reads, with the concurrency that lookups use; the better of two goes.
    auto probe = [&](uint32_t length, uint64_t salt) {
      std::vector<Read> reads;
      for (size_t i = 0; i < kReads; ++i)
        reads.push_back({place_of(f, mix64(i + salt) % (pages - length)), length, 0, 0});
      auto start = std::chrono::steady_clock::now();
      execute(plan, reads, [](const Read&, const uint8_t*, size_t) {});
      return seconds_since(start) / kReads * 1e6;
    };
    const uint32_t most = ctx_.sizes.read_pages;
    double single, full;
    try {
      single = std::min(probe(1, 1), probe(1, 1 << 20));
      full = most > 1 ? std::min(probe(most, 2 << 20), probe(most, 3 << 20)) : single;
    } catch (const IoError&) {
      continue;  // a bad sector that nobody asked for: try another file
    }
    std::lock_guard lock(mutex_);
    auto keep_best = [](double& best, double now) { best = best > 0 ? std::min(best, now) : now; };
    keep_best(cost_.page_us, std::max(full / most, 1e-3));
    if (most > 1) keep_best(cost_.read_us, single);
    return;
  }
}

}  // namespace thermocline::ssd
