#include "ssd/reader.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <utility>

#include "ssd/key_pieces.h"

namespace thermocline::ssd {
namespace {

constexpr size_t kPrefetchAhead = 8;     // rows
constexpr uint64_t kEnoughPages = 4096;  // of a file that is probed
// In flight per lookup: enough for any device, and others wait less behind it.
constexpr size_t kFlightBytes = 8u << 20;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Plans made before: for reads without lookups.
class MadePlans : public PlanSource {
 public:
  explicit MadePlans(std::vector<ReadPlan> plans) : plans_(std::move(plans)) {}
  bool next(ReadPlan& plan, PlanScratch&) override {
    const size_t i = next_.fetch_add(1);
    if (i >= plans_.size()) return false;
    plan = std::move(plans_[i]);
    return true;
  }
  bool left() const override { return next_ < plans_.size(); }
  void plan_again(ReadPlan&, PlanScratch&) override {}

 private:
  std::vector<ReadPlan> plans_;
  std::atomic<size_t> next_{0};
};

}  // namespace

// ---- workers

// One thread's part of read().
class Reader::Worker {
 public:
  // `stop` is set when a worker fails.
  Worker(Reader& reader, PlanSource& source, const RowsWanted* wanted, size_t max_in_flight, size_t max_bytes,
         const std::atomic<bool>& stop)
      : reader_(reader),
        ctx_(reader.ctx_),
        source_(source),
        wanted_(wanted),
        max_in_flight_(max_in_flight),
        max_bytes_(max_bytes),
        stop_(stop) {}

  void run() {
    if (!plan_part()) return;
    lease_.emplace(reader_.channels_);
    while (!stop_) {
      bool ok = fill_queue();
      if (ok && must_plan()) {
        lease_->channel().queue().flush();  // the device works meanwhile
        plan_part();
        continue;
      }
      if (ok && in_flight_ == 0) break;
      if (ok) ok = complete_one();
      if (!ok) recover();
    }
    if (in_flight_ == 0) lease_->keep();
  }

  uint64_t memory() const {
    uint64_t sum = scratch_.memory();
    for (const auto& parts : {&active_, &idle_})
      for (const auto& part : *parts) sum += part->plan.memory() + part->missed.capacity() * sizeof(uint32_t);
    return sum;
  }

 private:
  // A plan in progress.
  struct Part {
    ReadPlan plan;
    uint32_t submitted = 0;        // lookups
    uint32_t in_flight = 0;        // requests
    std::vector<uint32_t> missed;  // lookups that did not find their key on the page

    bool all_submitted() const { return submitted == plan.lookups.size(); }
  };
  struct Flight {
    Part* part = nullptr;  // null: the slot does not start a read
    ReadRequest request;
  };
  // No part is planned while the active ones have more items: this bounds the memory of a worker. Usually one part is
  // being read to its end, one is being submitted and one is planned ahead; small parts are more.
  static constexpr size_t kMostItems = 2 * KeyPieces::kMostKeys;

  // ---- planning

  // The part after the one that is being submitted is planned ahead.
  bool must_plan() {
    if (exhausted_ || (!active_.empty() && !source_.ahead())) return false;
    size_t items = 0, waiting = 0;
    for (auto& part : active_) {
      items += part->plan.items.size();
      waiting += !part->all_submitted();
    }
    if (waiting > 1 || items > kMostItems) return false;
    exhausted_ = !source_.left();
    return !exhausted_;
  }

  // Plans the next part. False: none is left.
  bool plan_part() {
    std::unique_ptr<Part> part = new_part();
    if (!source_.next(part->plan, scratch_)) {
      exhausted_ = true;
      idle_.push_back(std::move(part));
      return false;
    }
    start(std::move(part));
    return true;
  }

  std::unique_ptr<Part> new_part() {
    if (idle_.empty()) return std::make_unique<Part>();
    std::unique_ptr<Part> part = std::move(idle_.back());
    idle_.pop_back();
    part->plan.clear();
    part->missed.clear();
    part->submitted = 0;
    return part;
  }

  void start(std::unique_ptr<Part> part) { (part->plan.lookups.empty() ? idle_ : active_).push_back(std::move(part)); }

  // All pages of the part have been read. Items that were not on their page are looked up on older pages, rarely any.
  void finish(Part* part) {
    auto at = std::find_if(active_.begin(), active_.end(), [&](auto& p) { return p.get() == part; });
    std::unique_ptr<Part> done = std::move(*at);
    active_.erase(at);
    if (!done->missed.empty()) {
      std::sort(done->missed.begin(), done->missed.end(),
                [&](uint32_t a, uint32_t b) { return done->plan.lookups[a].item < done->plan.lookups[b].item; });
      auto again = std::make_unique<Part>();  // not from idle_: those have the memory of a whole piece
      again->plan.copies = done->plan.copies;
      for (uint32_t i : done->missed) {
        const PageLookup& lookup = done->plan.lookups[i];
        again->plan.items.push_back(done->plan.items[lookup.item]);
        again->plan.before_page.push_back(lookup.vpage);
      }
      source_.plan_again(again->plan, scratch_);
      start(std::move(again));
    }
    reader_.counters_.false_pages += done->missed.size();
    reader_.counters_.pages += std::exchange(pages_, 0);
    reader_.counters_.reads += std::exchange(reads_, 0);
    reader_.counters_.bytes += std::exchange(bytes_, 0);
    done->plan.files.clear();
    if (done->plan.before_page.empty()) idle_.push_back(std::move(done));  // else few items: see above
  }

  // ---- reading

  // Submits requests until no slot is free or no request is left. Returns false if a submission failed.
  bool fill_queue() {
    ReadChannel& channel = lease_->channel();
    for (size_t p = 0; p < active_.size(); ++p) {
      Part& part = *active_[p];
      while (!part.all_submitted()) {
        if (in_flight_ == max_in_flight_) return true;
        const ReadRequest request = next_request(part.plan, part.submitted);
        const uint32_t bytes = request.pages * ctx_.g.page_bytes;
        if (in_flight_ > 0 && bytes_in_flight_ + bytes > max_bytes_) return true;
        const int slot = channel.take(bytes);
        if (slot < 0) return true;
        part.submitted = request.end_lookup;
        ++part.in_flight;
        ++in_flight_;
        bytes_in_flight_ += bytes;
        ++reads_;
        bytes_ += bytes;
        flights_[static_cast<size_t>(slot)] = {&part, request};
        File* file = part.plan.files[file_of(request.address)]->file.get();
        const uint64_t offset = page_of(request.address) * ctx_.g.page_bytes;
        try {
          channel.queue().submit({file, offset, bytes, channel.at(slot)}, static_cast<uint64_t>(slot));
        } catch (const IoError&) {
          return false;
        }
      }
    }
    return true;
  }

  // Waits for one read and uses its pages. Returns false if the read failed.
  bool complete_one() {
    ReadChannel& channel = lease_->channel();
    uint64_t slot;
    try {
      slot = channel.queue().wait();
    } catch (const IoError&) {
      return false;
    }
    const Flight flight = std::exchange(flights_[slot], {});
    arrived(flight, channel.at(static_cast<int>(slot)));
    channel.give(static_cast<int>(slot), flight.request.pages * ctx_.g.page_bytes);
    return true;
  }

  void arrived(const Flight& flight, const uint8_t* bytes) {
    --in_flight_;
    bytes_in_flight_ -= size_t{flight.request.pages} * ctx_.g.page_bytes;
    if (wanted_) copy_rows(*flight.part, flight.request, bytes);
    if (--flight.part->in_flight == 0 && flight.part->all_submitted()) finish(flight.part);
  }

  // A read failed, perhaps at a bad sector that no lookup needs, and the queue does not report which one. Reads all
  // requests in flight again, only the pages that lookups need; throws IoError if such a page cannot be read. Then
  // continues with another channel.
  void recover() {
    std::vector<Flight> again;
    for (Flight& flight : flights_)
      if (flight.part) again.push_back(std::exchange(flight, {}));
    lease_.reset();  // destroys the channel, which waits for its reads
    AlignedBuffer buffer(size_t{ctx_.sizes.read_pages} * ctx_.g.page_bytes);
    for (const Flight& flight : again) {
      read_page_by_page(flight, buffer.data());
      arrived(flight, buffer.data());
    }
    lease_.emplace(reader_.channels_);
  }

  void read_page_by_page(const Flight& flight, uint8_t* bytes) {
    const size_t page_bytes = ctx_.g.page_bytes;
    const ReadPlan& plan = flight.part->plan;
    File& file = *plan.files[file_of(flight.request.address)]->file;
    PageAddress last = ~PageAddress{0};
    for (uint32_t i = flight.request.first_lookup; i < flight.request.end_lookup; ++i) {
      const PageAddress address = plan.lookups[i].address;
      if (address == last) continue;
      file.pread(bytes + (address - flight.request.address) * page_bytes, page_bytes, page_of(address) * page_bytes);
      last = address;
    }
  }

  // Verifies the pages of a request that lookups need, and copies the rows found.
  void copy_rows(Part& part, const ReadRequest& request, const uint8_t* bytes) {
    const Geometry& g = ctx_.g;
    const ReadPlan& plan = part.plan;
    DataFile& file = *plan.files[file_of(request.address)];
    const uint8_t* page = nullptr;
    PageAddress verified = ~PageAddress{0};
    PageKind kind{};
    uint32_t count = 0, from = 0;  // entries of the page; those before `from` have smaller hashes than the next lookup
    for (uint32_t l = request.first_lookup; l < request.end_lookup; ++l) {
      const uint32_t ahead = plan.lookups[std::min<size_t>(l + kPrefetchAhead, request.end_lookup - 1)].item;
      __builtin_prefetch(wanted_->rows.at(plan.items[ahead].index), 1);
      const PageLookup& lookup = plan.lookups[l];
      if (lookup.address != verified) {
        page = bytes + (lookup.address - request.address) * g.page_bytes;
        kind = verify_data_page(page, g, file.nonce, page_of(lookup.address), file.file->path());
        count = page_header(page).count;
        from = 0;
        verified = lookup.address;
        ++pages_;
      }
      const uint32_t index = plan.items[lookup.item].index;
      const uint64_t key = wanted_->keys[index];
      uint32_t i = from;
      while (i < count && page_key(page, kind, i) != key) ++i;
      if (i == count) {
        if (lookup.in_log) part.missed.push_back(l);
        continue;
      }
      from = i;  // lookups of a page are in hash order, as its entries
      if (kind == PageKind::kRows) {
        std::memcpy(wanted_->rows.at(index), page_row(page, g, i), g.row_bytes);
        wanted_->found[index] = 1;
      }
    }
  }

  // Constant after construction.
  Reader& reader_;
  const Context& ctx_;
  PlanSource& source_;
  const RowsWanted* const wanted_;
  const size_t max_in_flight_, max_bytes_;
  const std::atomic<bool>& stop_;

  bool exhausted_ = false;
  PlanScratch scratch_;
  std::vector<std::unique_ptr<Part>> active_, idle_;          // active: in the order of submission
  size_t in_flight_ = 0, bytes_in_flight_ = 0;                // requests, and their bytes
  uint64_t reads_ = 0, bytes_ = 0, pages_ = 0;                // not yet counted
  std::array<Flight, BufferSizes::kMaxReadSlots> flights_{};  // by first slot
  std::optional<ReadChannels::Lease> lease_;                  // destroyed first: it waits for the reads in flight
};

// ---- reader

// Two threads with deep queues keep the device busy; more share the work of the processor. With shallow queues every
// thread adds a read in flight.
size_t Reader::workers_for(size_t keys) const {
  const bool deep = ctx_.sizes.read_slots >= 16;
  if (keys < (deep ? 256 : 16)) return 1;
  const size_t useful = std::max<size_t>(2, keys / (deep ? 2048 : 8));
  return std::min(useful, static_cast<size_t>(ctx_.sizes.read_workers));
}

size_t Reader::least_piece() const { return ctx_.sizes.read_slots >= 16 ? 128 : 8; }

// A device takes a limited number of reads at once; threads that submit more wait for each other in the kernel.
size_t Reader::max_in_flight(size_t workers) const {
  constexpr size_t kAllWorkers = 128, kEach = 8;
  return std::clamp(kAllWorkers / workers, kEach, size_t{BufferSizes::kMaxReadSlots});
}

void Reader::combine(ReadPlan& plan) const {
  plan.max_pages = ctx_.sizes.read_pages;
  plan.gap = cost().gap();
}

void Reader::read(PlanSource& source, size_t workers, const RowsWanted* wanted) {
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> scratch{source.memory()};
  pool_.parallel(workers, [&](size_t) {
    Worker worker(*this, source, wanted, max_in_flight(workers), kFlightBytes / workers, stop);
    try {
      worker.run();
    } catch (...) {
      stop = true;
      throw;
    }
    scratch += worker.memory();
  });
  for (uint64_t peak = counters_.scratch_peak;
       peak < scratch && !counters_.scratch_peak.compare_exchange_weak(peak, scratch);) {
  }
}

double Reader::time_reads(std::vector<ReadPlan> plans, size_t workers) {
  MadePlans source(std::move(plans));
  const auto start = std::chrono::steady_clock::now();
  read(source, workers, nullptr);
  return seconds_since(start);
}

// ---- cost of the device

// Microseconds per read and per page of random reads, with the concurrency of a large lookup; the better of two
// measurements each.
ReadCost Reader::probe(const std::shared_ptr<DataFile>& file) {
  constexpr size_t kReads = 256;
  const auto workers = static_cast<size_t>(ctx_.sizes.read_workers);
  const uint32_t pages = std::clamp<uint32_t>((64u << 10) / ctx_.g.page_bytes, 1, ctx_.sizes.read_pages);
  uint64_t salt = probes() << 32;
  auto microseconds = [&](uint32_t pages_per_read) {
    double best = 0;
    for (int i = 0; i < 2; ++i) {
      std::vector<ReadPlan> plans;
      for (size_t w = 0; w < workers; ++w)
        plans.push_back(probe_plan(file, pages_per_read, kReads / workers + 1, salt += kReads));
      const size_t reads = workers * (kReads / workers + 1);
      const double us = time_reads(std::move(plans), workers) / static_cast<double>(reads) * 1e6;
      best = i == 0 ? us : std::min(best, us);
    }
    return best;
  };
  const double single = microseconds(1);
  const double full = pages > 1 ? microseconds(pages) : single;
  return {single, std::max(full / pages, 1e-3)};
}

void Reader::measure(const std::function<std::vector<std::shared_ptr<DataFile>>()>& files) {
  constexpr size_t kAttempts = 4;
  if (!costs_.begin_probe()) return;
  std::optional<ReadCost> measured;
  const auto start = std::chrono::steady_clock::now();
  try {
    std::vector<std::shared_ptr<DataFile>> large = files();
    std::erase_if(large, [](auto& file) { return file->pages < kEnoughPages; });
    for (size_t i = 0; i < std::min(large.size(), kAttempts) && !measured; ++i) {
      try {
        measured = probe(large[mix64(probes() + i) % large.size()]);
      } catch (const IoError&) {
        // A bad sector outside of the lookups: try another file.
      }
    }
  } catch (...) {
    costs_.end_probe(std::nullopt, 0);
    throw;
  }
  costs_.end_probe(measured, seconds_since(start));
}

}  // namespace thermocline::ssd
