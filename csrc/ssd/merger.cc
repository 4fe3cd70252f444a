#include "ssd/merger.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "util/thread_pool.h"

namespace thermocline::ssd {
namespace {

struct Stopped {};  // thrown to abandon a merge

constexpr uint64_t kPartitionBytes = sizeof(Partition) + sizeof(BaseFile) + sizeof(DataFile) + 64;  // index entry

uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

constexpr uint64_t kStepBytes = 1u << 20;  // charged to the scheduler at once

}  // namespace

Merger::Merger(Context& ctx, const StoreOptions& options, Index& index, FairMutex& index_mutex, Catalog& catalog)
    : ctx_(ctx),
      options_(options),
      threads_(threads_of(options)),
      index_(index),
      index_mutex_(index_mutex),
      catalog_(catalog),
      scheduler_(threads_) {
  if (!options_.background_merge || options_.read_only) return;
  io_ = std::make_unique<PreadPool>(2 * threads_);  // each merge reads and writes at the same time
  try {
    for (int i = 0; i < threads_; ++i) background_.emplace_back([this] { run_background(); });
  } catch (const std::system_error&) {
    if (background_.empty()) throw;  // puts would wait for merges forever
  }
}

int Merger::threads_of(const StoreOptions& options) {
  if (options.read_only) return 1;
  if (options.merge_threads > 0) return options.merge_threads;
  if (!options.background_merge) return 1;
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 2u, 8u));
}

Merger::~Merger() { stop(); }

void Merger::stop() {
  scheduler_.stop();
  for (auto& thread : background_)
    if (thread.joinable()) thread.join();
}

// ---- limits

uint64_t Merger::wanted_log_rows(uint64_t base_rows) const {
  // Half of the ratio: partitions are merged in turn, so on average each has half of a cycle's rows in the log.
  const double share = options_.max_log_ratio / 2;
  return std::max<uint64_t>(static_cast<uint64_t>(share * static_cast<double>(base_rows)),
                            options_.min_log_bytes / ctx_.g.entry_bytes());
}

// The caller holds the index lock.
Merger::Room Merger::room(uint64_t more_bytes) const {
  Room room;
  room.rows = index_.base_rows();
  room.filter_bytes = index_.filter_bytes();
  room.wanted = wanted_log_rows(room.rows);
  // A single merge may take more than planned: the filter of a large partition.
  const uint64_t merges = std::max<uint64_t>(running_memory_, ctx_.sizes.merge_memory) - ctx_.sizes.merge_memory;
  const uint64_t used = ctx_.sizes.total(ctx_.g) + index_.memory() + ctx_.scan_memory;
  const uint64_t log_entries = std::min(used, index_.mergeable() * kLogRowBytes);
  // Memory that the log does not want is for merges beside the first one.
  const uint64_t without = used - log_entries + more_bytes + room.wanted * 3 / 2 * kLogRowBytes;
  room.more_merges =
      std::min<uint64_t>(options_.mem_budget > without ? options_.mem_budget - without : 0, ctx_.sizes.more_merges);
  room.need = used - log_entries + more_bytes + std::max(merges, room.more_merges);
  const uint64_t planned = without + std::max(merges, room.more_merges);
  room.spare = options_.mem_budget > planned ? options_.mem_budget - planned : 0;
  room.affordable = (options_.mem_budget > room.need ? options_.mem_budget - room.need : 0) / kLogRowBytes;
  return room;
}

uint64_t Merger::limit(uint64_t more_rows, uint64_t more_bytes) {
  const auto room_now = [&] {
    std::shared_lock lock(index_mutex_);
    return this->room(more_bytes);
  };
  Room room = room_now();
  if (room.is_short()) {  // the kept log saves time only, when changes are read
    std::unique_lock lock(index_mutex_);
    index_.forget_log();
    room = this->room(more_bytes);
  }
  if (room.is_short() && room.filter_bytes > 0) {
    give_up_filter(room);
    room = room_now();
  }
  if (room.affordable < kLeastLogRows)
    throw BudgetError(ctx_.path + ": mem_budget is " + std::to_string(options_.mem_budget) + " bytes, but " +
                      std::to_string(room.rows + more_rows) + " rows of " + std::to_string(ctx_.g.row_bytes) +
                      " bytes need " + std::to_string(room.need + kLeastLogRows * kLogRowBytes) +
                      " (fences and buffers); open it with a larger mem_budget (tiers.ssd_mem)");
  return std::min(room.wanted, room.affordable * 2 / 3);  // put() blocks at 3/2 of the limit
}

void Merger::give_up_filter(const Room& room) {
  {
    std::unique_lock lock(index_mutex_);
    if (!index_.keeps_filters()) return;  // another thread was first
    index_.drop_filters();
  }
  warn_filter_given_up(ctx_, options_.mem_budget, room.rows, room.filter_bytes,
                       room.need + room.wanted / kShortOf * 3 / 2 * kLogRowBytes);
}

void warn_filter_given_up(Context& ctx, uint64_t mem_budget, uint64_t rows, uint64_t filter_bytes, uint64_t need) {
  ctx.warnings.add(ctx.path + ": the filter of absent keys was given up: with its " + std::to_string(filter_bytes) +
                   " bytes, " + std::to_string(rows) + " rows need " + std::to_string(need) +
                   " bytes of DRAM, and mem_budget is " + std::to_string(mem_budget) +
                   "; the first read of a new key now takes one page read. To keep the filter, raise mem_budget "
                   "(tiers.ssd_mem)");
}

void Merger::require_expected_rows(uint64_t rows) const {
  const uint64_t file_bytes = std::max<uint64_t>(options_.partition_bytes, rows * ctx_.g.entry_bytes() / 512);
  const uint64_t files = ceil_div(rows * ctx_.g.entry_bytes(), file_bytes * 3 / 4 + 1);
  const uint64_t fences = ctx_.g.row_pages(rows) * 8 + files * kPartitionBytes;
  const uint64_t log = std::max<uint64_t>(kLeastLogRows, wanted_log_rows(rows) / kShortOf) * 3 / 2 * kLogRowBytes;
  const uint64_t buffers = ctx_.sizes.total(ctx_.g);
  if (fences + log + buffers <= options_.mem_budget) return;
  throw BudgetError(ctx_.path + ": mem_budget is " + std::to_string(options_.mem_budget) + " bytes, but the expected " +
                    std::to_string(rows) + " rows of " + std::to_string(ctx_.g.row_bytes) + " bytes need at least " +
                    std::to_string(fences + log + buffers) + " (fences " + std::to_string(fences) + ", buffers " +
                    std::to_string(buffers) + ", log " + std::to_string(log) +
                    "); raise mem_budget (tiers.ssd_mem) or lower expected_keys");
}

// ---- set-aside partitions

uint64_t Merger::set_aside_bound(const Index::SetAside& aside) const {
  return options_.min_log_bytes + 4 * aside.base_bytes;
}

bool Merger::set_aside_log_is_due() const {
  if (!has_damage_) return false;
  std::shared_lock lock(index_mutex_);
  const Index::SetAside aside = index_.set_aside();
  const uint64_t bound = set_aside_bound(aside);
  if (copied_bytes_ > bound) return false;  // admit() throws; another copy cannot help
  return aside.log_bytes > std::min(options_.min_log_bytes / 2 + 2 * copied_bytes_, bound) ||
         aside.extents > ctx_.sizes.max_extents / 2 + 2 * copied_extents_;
}

void Merger::set_aside_log_copied(uint64_t bytes, uint64_t extents) {
  std::shared_lock lock(index_mutex_);
  const Index::SetAside aside = index_.set_aside();  // not empty if a log could not be copied
  copied_bytes_ = std::max(bytes, aside.log_bytes);
  copied_extents_ = std::max(extents, aside.extents);
}

// Tests what the last copy left, not the log of now: merges beside this call may add to that at any moment.
void Merger::require_bounded_set_aside_log() const {
  if (!has_damage_) return;
  std::shared_lock lock(index_mutex_);
  const uint64_t bound = set_aside_bound(index_.set_aside());
  if (copied_bytes_ <= bound) return;
  const std::string text = ctx_.path + ": nothing more can be put: the log that damaged partitions hold has " +
                           std::to_string(copied_bytes_) + " bytes, more than the bound of " + std::to_string(bound) +
                           ". Rows put so far can be committed. The damage: " + index_.damage();
  try {
    index_.throw_damage();
  } catch (const IoError& e) {
    throw IoError(text, e.code);  // the device failed; the bytes on it may be right
  } catch (const CorruptionError&) {
    throw CorruptionError(text);
  }
}

uint64_t Merger::memory() const {
  const uint64_t pages = ctx_.sizes.append_pages + index_.extents() - (has_damage_ ? index_.set_aside().extents : 0);
  return std::max({running_memory_, uint64_t{ctx_.sizes.merge_bytes}, pages * ctx_.g.page_bytes});
}

Merger::Debt Merger::debt() {
  uint64_t limit;
  try {
    limit = this->limit();
  } catch (const BudgetError&) {
    limit = 1024;  // admit() reports the error; merging may free memory
  }
  std::shared_lock lock(index_mutex_);
  // Rows and extents of set-aside partitions do not count: they cannot be merged and must not block writers.
  Debt debt{index_.mergeable(), limit};
  const size_t most = ctx_.sizes.max_extents;
  if (debt.pending == 0) return debt;
  // Too many small extents count as too many rows.
  const size_t extents = index_.extents() - (has_damage_ ? index_.set_aside().extents : 0);
  if (extents > most / 2) debt.pending = std::max(debt.pending, limit / 4 + 1);
  if (extents > most * 3 / 4) debt.pending = std::max(debt.pending, limit + limit / 4 + 1);
  if (extents >= most) debt.pending = std::max(debt.pending, 2 * limit);
  return debt;
}

// ---- calls of the writer

void Merger::admit() {
  limit();
  require_bounded_set_aside_log();
  if (!options_.background_merge) return;
  double waited = 0;
  for (;;) {
    const uint64_t seen = scheduler_.rounds();
    const Debt now = debt();
    // A writer that has blocked continues only below the lower bound, so that it does not block again at once.
    if (!(waited > 0 ? now.urgent() : now.must_block())) break;
    const auto start = std::chrono::steady_clock::now();
    if (!scheduler_.request_round(seen)) break;
    waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() + 1e-9;
  }
  stall_seconds_ = stall_seconds_ + waited;
}

void Merger::flushed(uint64_t bytes) {
  if (!options_.background_merge) {
    while (debt().over_limit() && merge_in_turn()) {
    }
    return;
  }
  const Debt now = debt();
  // The base is rewritten once while the log grows by its share of the base. A tenth more keeps the log below the
  // limit.
  const auto credit = static_cast<int64_t>(static_cast<double>(bytes) * 1.1 / options_.max_log_ratio);
  scheduler_.on_flush(credit, now.demand());
}

// ---- other callers

void Merger::settle() {
  while (debt().urgent() &&
         (options_.background_merge ? merge_one(Caller::kForeground) == Outcome::kMerged : merge_in_turn())) {
  }
}

void Merger::merge_all() {
  MergeScheduler::Foreground foreground(scheduler_);
  merge_until_done();
  std::shared_lock lock(index_mutex_);
  index_.throw_damage();
}

void Merger::merge_until_done() {
  if (!options_.background_merge) {
    while (merge_in_turn()) {
    }
    return;
  }
  for (bool more = true; more;) {
    in_parallel([] { return true; });
    std::unique_lock idle(merge_lock_);  // waits for merges of background threads
    std::shared_lock lock(index_mutex_);
    more = index_.mergeable() > 0;
  }
}

std::unique_lock<FairMutex> Merger::pause() {
  MergeScheduler::Foreground foreground(scheduler_);
  return std::unique_lock(merge_lock_);
}

// ---- the background threads

void Merger::run_background() {
  while (const std::optional<uint64_t> ticket = scheduler_.wait_for_work()) {
    std::optional<MergeScheduler::Demand> next;
    std::exception_ptr error;
    try {
      const Outcome outcome = merge_one(Caller::kBackground);
      if (outcome == Outcome::kOthersFirst) {
        scheduler_.stand_by();
        continue;
      }
      if (outcome == Outcome::kMerged) {
        next = MergeScheduler::Demand::kNone;
        next = debt().demand();
      }
    } catch (const Stopped&) {
    } catch (...) {
      error = std::current_exception();
    }
    scheduler_.finish_round(*ticket, next, error);
  }
}

// ---- merges

// Merges one partition on this thread.
Merger::Outcome Merger::merge_one(Caller caller) {
  std::shared_lock merging(merge_lock_);
  Running running;
  if (const Outcome outcome = begin(&running); outcome != Outcome::kMerged) return outcome;
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto count_since = [&](auto start) {
    counters_.seconds += std::chrono::duration<double>(now() - start).count();
  };
  auto start = now();
  try {
    while (step(running, kStepBytes, io_.get())) {
      ctx_.fs->failpoint("merge.chunk");
      count_since(start);
      if (!scheduler_.spend(kStepBytes, caller == Caller::kBackground)) throw Stopped{};
      start = now();
    }
  } catch (...) {
    cancel(running);
    throw;
  }
  count_since(start);
  catalog_.collect();
  return Outcome::kMerged;
}

// Merges on several threads until `more` is false or nothing can start.
void Merger::in_parallel(const std::function<bool()>& more) {
  ThreadPool pool(threads_);
  pool.parallel(static_cast<size_t>(threads_), [&](size_t) {
    while (more() && merge_one(Caller::kForeground) == Outcome::kMerged) {
    }
  });
}

// Merges several partitions on this thread, a small step of each in turn: their files are written alternately, as by
// several threads, in an order that depends on nothing else.
bool Merger::merge_in_turn() {
  constexpr uint64_t kTurnBytes = 16u << 10;
  std::shared_lock merging(merge_lock_);
  std::vector<Running> running;
  for (Running next; running.size() < static_cast<size_t>(threads_) && begin(&next) == Outcome::kMerged;)
    running.push_back(std::move(next));
  if (running.empty()) return false;
  try {
    while (!running.empty()) {
      for (size_t i = 0; i < running.size();) {
        if (step(running[i], kTurnBytes, nullptr)) {
          ctx_.fs->failpoint("merge.chunk");
          ++i;
        } else {
          running.erase(running.begin() + static_cast<ptrdiff_t>(i));
          catalog_.collect();
        }
      }
    }
  } catch (...) {
    for (Running& r : running) cancel(r);
    throw;
  }
  return true;
}

Merger::Outcome Merger::begin(Running* running) {
  {
    std::unique_lock lock(index_mutex_);
    const uint64_t base_bytes = index_.base_bytes();
    running->target = std::max<uint64_t>(options_.partition_bytes, base_bytes / 512);
    const uint64_t most_bytes = std::max<uint64_t>(base_bytes / kRewrittenShare, options_.min_log_bytes);
    const uint64_t most_memory = ctx_.sizes.merge_memory + room(0).more_merges;
    const auto fits = [&](const Index::Merge& merge) {
      running->memory = MergeJob::memory(ctx_, merge, running->target, options_.filter_bits);
      running->bytes = merge.rows * ctx_.g.entry_bytes();
      return running_ == 0 ||
             (running_memory_ + running->memory <= most_memory && running_bytes_ + running->bytes <= most_bytes);
    };
    if (!index_.begin_merge(&running->merge, fits)) return running_ > 0 ? Outcome::kOthersFirst : Outcome::kNothingLeft;
    ++running_;
    running_memory_ += running->memory;
    running_bytes_ += running->bytes;
  }
  return Outcome::kMerged;
}

bool Merger::step(Running& running, uint64_t bytes, PreadPool* io) {
  std::vector<Partition> pieces;
  try {
    if (!running.job) {
      ctx_.fs->failpoint("merge.begin");
      running.job = std::make_unique<MergeJob>(ctx_, catalog_, counters_, options_.filter_bits, running.merge,
                                               running.target, io);
    }
    if (running.job->step(bytes)) return true;
    pieces = running.job->finish();
  } catch (const CorruptionError& e) {
    set_aside(running, e.what());
    return false;
  } catch (const UnreadableError& e) {
    set_aside(running, e.what());
    return false;
  }
  running.job.reset();
  ctx_.fs->failpoint("merge.written");
  install(running, std::move(pieces));
  return false;
}

void Merger::install(Running& running, std::vector<Partition> pieces) {
  {
    std::unique_lock lock(index_mutex_);
    index_.finish_merge(running.merge, std::move(pieces));
    end(running);
  }
  running.merge.view = {};  // the old files are not needed any more: collect() deletes them
  ++counters_.merges;
  ctx_.fs->failpoint("merge.installed");
}

void Merger::end(Running& running) {
  --running_;
  running_memory_ -= running.memory;
  running_bytes_ -= running.bytes;
  running.merge.partition = nullptr;
}

// Ends a merge that did not reach install(), and deletes its files. No effect after install().
void Merger::cancel(Running& running) {
  running.job.reset();
  if (running.merge.partition) {
    std::unique_lock lock(index_mutex_);
    index_.cancel_merge(running.merge);
    end(running);
  }
  running.merge.view = {};
  catalog_.collect();
}

// Sets a partition aside: it is not merged any more; its undamaged pages stay readable. stats(), damage(), a warning
// and merge_all() report the cause. Called from the handler of the exception that stopped the merge.
void Merger::set_aside(Running& running, const char* cause) {
  std::string damage = cause;
  if (damage.find("thermocline repair") == std::string::npos) damage += kRepairHint + repair_command(ctx_.path);
  {
    std::unique_lock lock(index_mutex_);
    running.merge.partition->damage = damage;
    running.merge.partition->damage_error = std::current_exception();
    index_.cancel_merge(running.merge);
    end(running);
  }
  running.job.reset();
  has_damage_ = true;
  ctx_.warnings.add_one_of_many(ctx_.path + ": a partition is not merged any more, because it is damaged: " + damage,
                                ctx_.path + ": more partitions are damaged and not merged any more");
}

}  // namespace thermocline::ssd
