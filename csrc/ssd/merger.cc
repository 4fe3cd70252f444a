#include "ssd/merger.h"

#include <algorithm>
#include <chrono>

namespace thermocline::ssd {
namespace {

struct Stopped {};

uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

}  // namespace

Merger::Merger(Context& ctx, const StoreOptions& options, Index& index, FairMutex& index_mutex, Catalog& catalog)
    : ctx_(ctx), options_(options), index_(index), index_mutex_(index_mutex), catalog_(catalog) {
  if (options_.background_merge && !options_.read_only) thread_ = std::thread([this] { loop(); });
}

Merger::~Merger() { stop(); }

void Merger::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  progress_.notify_all();
  if (thread_.joinable()) thread_.join();
}

uint64_t Merger::limit(uint64_t more_rows, uint64_t more_bytes) const {
  std::shared_lock lock(index_mutex_);
  // Half of the ratio: partitions are merged in turn, so on average each has half a cycle's rows in the log.
  double share = options_.max_log_ratio / 2;
  auto wanted = static_cast<uint64_t>(share * static_cast<double>(index_.base_rows()));
  wanted = std::max<uint64_t>(wanted, options_.min_log_bytes / ctx_.g.entry_bytes());
  // Entries cost more than their slot: tables are at most 7/8 full, and grow in steps.
  uint64_t entry = DeltaTable::slot_bytes() * 3 / 2;
  uint64_t fixed = ctx_.sizes.total(ctx_.g) + index_.memory(), entries = std::min(fixed, index_.pending() * entry);
  uint64_t need = fixed - entries + more_bytes, room = options_.mem_budget > need ? options_.mem_budget - need : 0;
  uint64_t affordable = room / entry;
  if (affordable < 1024)
    throw BudgetError(ctx_.path + ": mem_budget is " + std::to_string(options_.mem_budget) + " bytes, but " +
                      std::to_string(index_.base_rows() + more_rows) + " rows of " + std::to_string(ctx_.g.row_bytes) +
                      " bytes need " + std::to_string(need + 1024 * entry) +
                      " (fences and buffers); open it with a larger mem_budget");
  return std::min(wanted, affordable * 2 / 3);  // put() waits at half as much again
}

uint64_t Merger::memory() const {
  uint64_t pages = ctx_.sizes.append_pages + index_.extents();
  return std::max<uint64_t>(ctx_.sizes.merge_bytes, pages * ctx_.g.page_bytes);
}

Merger::Debt Merger::debt() const {
  uint64_t limit;
  try {
    limit = this->limit();
  } catch (const BudgetError&) {
    limit = 1024;  // admit() says it; merging is what may help
  }
  std::shared_lock lock(index_mutex_);
  // What cannot be merged is nobody's debt: damage must not stop the rest.
  Debt debt{index_.mergeable(), limit};
  const size_t most = ctx_.sizes.max_extents;
  if (debt.pending == 0 || !index_.damage().empty()) return debt;
  // Too many small extents count as too many rows.
  if (index_.extents() > most / 2) debt.pending = std::max(debt.pending, limit / 4 + 1);
  if (index_.extents() > most * 3 / 4) debt.pending = std::max(debt.pending, limit + limit / 4 + 1);
  if (index_.extents() >= most) debt.pending = std::max(debt.pending, 2 * limit);
  return debt;
}

void Merger::admit() {
  limit();
  if (!options_.background_merge) return;
  double waited = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    const uint64_t seen = rounds_;
    lock.unlock();
    Debt now = debt();
    lock.lock();
    if (!(waited > 0 ? now.urgent() : now.hard()) || stop_) break;
    if (error_) std::rethrow_exception(error_);
    work_ = hurry_ = true;
    ++requests_;
    wake_.notify_all();
    auto start = std::chrono::steady_clock::now();
    progress_.wait(lock, [&] { return rounds_ != seen || stop_; });
    waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() + 1e-9;
  }
  stall_seconds_ = stall_seconds_ + waited;
}

void Merger::flushed(uint64_t bytes) {
  if (!options_.background_merge) {
    while (debt().due() && merge_one()) {
    }
    return;
  }
  Debt now = debt();
  std::lock_guard lock(mutex_);
  // While the log grows by its share of the base, the base is rewritten once; a tenth more, to keep below the limit.
  auto grant = static_cast<int64_t>(static_cast<double>(bytes) * 1.1 / options_.max_log_ratio);
  credit_ = std::min(credit_ + grant, std::max(credit_, 2 * grant));
  work_ = now.some();
  hurry_ = now.urgent();
  error_ = nullptr;  // try again
  ++requests_;
  wake_.notify_all();
}

void Merger::settle() {
  while (debt().urgent() && merge_one()) {
  }
}

void Merger::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || (work_ && !error_ && rushed_ == 0 && (credit_ > 0 || hurry_)); });
    if (stop_) return;
    uint64_t seen = requests_;
    lock.unlock();
    std::exception_ptr error;
    bool merged = false;
    Debt now{0, 0};
    try {
      merged = merge_one();
      now = debt();
    } catch (const Stopped&) {
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = error;
    if (!merged || requests_ == seen) {  // a flush since then has said better
      work_ = merged && now.some();
      hurry_ = merged && now.urgent();
    }
    ++rounds_;
    progress_.notify_all();
  }
}

void Merger::pace(uint64_t bytes) {
  std::unique_lock lock(mutex_);
  credit_ -= static_cast<int64_t>(bytes);
  // Work done in a hurry leaves no debt: it would hold up the merging in step that comes after.
  if (hurry_ || rushed_ > 0) credit_ = std::max<int64_t>(credit_, 0);
  if (!options_.background_merge || std::this_thread::get_id() != thread_.get_id()) return;
  wake_.wait(lock, [&] { return stop_ || hurry_ || rushed_ > 0 || credit_ > 0; });
  if (stop_) throw Stopped{};
}

bool Merger::merge_one() {
  std::lock_guard merging(merge_mutex_);
  try {
    bool merged = merge_furthest();
    catalog_.collect();
    return merged;
  } catch (...) {
    catalog_.collect();  // what was written for nothing
    throw;
  }
}

// This partition cannot be merged; the others can, and its sound pages stay readable. stats() tells, and merge_all().
void Merger::set_aside(const Index::Merge& job, const char* why) {
  std::unique_lock lock(index_mutex_);
  job.partition->damage = why;
  job.partition->damage_error = std::current_exception();
}

bool Merger::merge_furthest() {
  Index::Merge job;
  uint64_t target;
  {
    std::unique_lock lock(index_mutex_);
    if (!index_.begin_merge(&job)) return false;
    target = std::max<uint64_t>(options_.partition_bytes, index_.base_bytes() / 512);
  }
  ctx_.fs->reached("merge.begin");
  uint64_t bytes = job.rows * ctx_.g.entry_bytes();
  uint64_t pieces_wanted = bytes > target ? ceil_div(bytes, target * 3 / 4 + 1) : 1;
  uint64_t rows_per_piece = std::max<uint64_t>(1, ceil_div(job.rows, pieces_wanted));
  std::vector<Partition> pieces;
  try {
    PartitionCursor cursor(ctx_, job.view, ctx_.sizes.merge_bytes);
    std::unique_ptr<BaseWriter> writer;
    auto close_piece = [&] {
      if (!writer) return;
      pieces.back().base = writer->finish();
      counters_.bytes_written += pieces.back().base->bytes(ctx_.g);
      writer.reset();
      ctx_.fs->reached("merge.piece");
    };
    uint64_t since = 0;
    while (cursor.next()) {
      if (writer && writer->rows() == rows_per_piece) close_piece();
      if (!writer) {
        pieces.emplace_back();
        pieces.back().lo = pieces.size() == 1 ? job.view.lo : hash_key(cursor.key());
        writer =
            std::make_unique<BaseWriter>(ctx_, catalog_.create(FileKind::kBase), rows_per_piece, options_.filter_bits);
      }
      writer->add(cursor.key(), cursor.row());
      since += ctx_.g.entry_bytes();
      if (since >= (1u << 20)) {
        ctx_.fs->reached("merge.chunk");
        pace(since);
        since = 0;
      }
    }
    close_piece();
    counters_.bytes_read += cursor.bytes_read();
  } catch (const CorruptionError& e) {
    set_aside(job, e.what());
    return true;
  } catch (const UnreadableError& e) {
    set_aside(job, e.what());
    return true;
  }
  if (pieces.empty()) {
    pieces.emplace_back();
    pieces.back().lo = job.view.lo;
  }
  for (size_t i = 0; i < pieces.size(); ++i) pieces[i].hi = i + 1 < pieces.size() ? pieces[i + 1].lo - 1 : job.view.hi;
  ctx_.fs->reached("merge.written");
  {
    std::unique_lock lock(index_mutex_);
    index_.finish_merge(job, std::move(pieces));
  }
  ++counters_.merges;
  ctx_.fs->reached("merge.installed");
  return true;
}

class Merger::Rush {
 public:
  explicit Rush(Merger& merger) : merger_(merger) { change(1); }
  ~Rush() { change(-1); }

 private:
  void change(int by) {
    {
      std::lock_guard lock(merger_.mutex_);
      merger_.rushed_ += by;
    }
    merger_.wake_.notify_all();
  }
  Merger& merger_;
};

void Merger::merge_all() {
  Rush rush(*this);
  while (merge_one()) {
  }
  std::shared_lock lock(index_mutex_);
  index_.throw_damage();
}

std::unique_lock<std::mutex> Merger::pause() {
  Rush rush(*this);
  return std::unique_lock(merge_mutex_);
}

}  // namespace thermocline::ssd
