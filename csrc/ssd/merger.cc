#include "ssd/merger.h"

#include <algorithm>
#include <chrono>

namespace thermocline::ssd {
namespace {

struct Stopped {};  // thrown to abandon a merge

constexpr uint64_t kPartitionBytes = sizeof(Partition) + sizeof(BaseFile) + sizeof(DataFile) + 64;  // index entry

uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// Writes rows in hash order to base files of at most `rows_per_piece` rows: the pieces that replace a partition.
class PieceWriter {
 public:
  PieceWriter(Context& ctx, Catalog& catalog, MergeCounters& counters, uint32_t filter_bits, uint64_t rows_per_piece)
      : ctx_(ctx), catalog_(catalog), counters_(counters), filter_bits_(filter_bits), rows_per_piece_(rows_per_piece) {}

  void add(uint64_t key, const uint8_t* row) {
    if (file_ && file_->rows() == rows_per_piece_) close();
    if (!file_) {
      pieces_.emplace_back();
      pieces_.back().lo = hash_key(key);
      file_ = std::make_unique<BaseWriter>(ctx_, catalog_.create(FileKind::kBase), rows_per_piece_, filter_bits_);
    }
    file_->add(key, row);
  }

  // Returns the pieces; together they cover [lo, hi]. There is one piece without a base if no row was added.
  std::vector<Partition> finish(uint64_t lo, uint64_t hi) {
    if (file_) close();
    if (pieces_.empty()) pieces_.emplace_back();
    pieces_.front().lo = lo;
    for (size_t i = 0; i < pieces_.size(); ++i) pieces_[i].hi = i + 1 < pieces_.size() ? pieces_[i + 1].lo - 1 : hi;
    return std::move(pieces_);
  }

 private:
  void close() {
    pieces_.back().base = file_->finish();
    counters_.bytes_written += pieces_.back().base->bytes(ctx_.g);
    file_.reset();
    ctx_.fs->failpoint("merge.piece");
  }

  Context& ctx_;
  Catalog& catalog_;
  MergeCounters& counters_;
  const uint32_t filter_bits_;
  const uint64_t rows_per_piece_;
  std::vector<Partition> pieces_;
  std::unique_ptr<BaseWriter> file_;  // of pieces_.back(); null: closed
};

}  // namespace

Merger::Merger(Context& ctx, const StoreOptions& options, Index& index, FairMutex& index_mutex, Catalog& catalog)
    : ctx_(ctx), options_(options), index_(index), index_mutex_(index_mutex), catalog_(catalog) {
  if (options_.background_merge && !options_.read_only) thread_ = std::thread([this] { run_background(); });
}

Merger::~Merger() { stop(); }

void Merger::stop() {
  scheduler_.stop();
  if (thread_.joinable()) thread_.join();
}

// ---- limits

uint64_t Merger::wanted_log_rows(uint64_t base_rows) const {
  // Half of the ratio: partitions are merged in turn, so on average each has half of a cycle's rows in the log.
  const double share = options_.max_log_ratio / 2;
  return std::max<uint64_t>(static_cast<uint64_t>(share * static_cast<double>(base_rows)),
                            options_.min_log_bytes / ctx_.g.entry_bytes());
}

Merger::Room Merger::room(uint64_t more_bytes) const {
  std::shared_lock lock(index_mutex_);
  Room room;
  room.rows = index_.base_rows();
  room.filter_bytes = index_.filter_bytes();
  room.wanted = wanted_log_rows(room.rows);
  const uint64_t used = ctx_.sizes.total(ctx_.g) + index_.memory();
  const uint64_t log_entries = std::min(used, index_.mergeable() * kLogRowBytes);
  room.need = used - log_entries + more_bytes;
  room.affordable = (options_.mem_budget > room.need ? options_.mem_budget - room.need : 0) / kLogRowBytes;
  return room;
}

uint64_t Merger::limit(uint64_t more_rows, uint64_t more_bytes) {
  Room room = this->room(more_bytes);
  if (room.is_short() && room.filter_bytes > 0) {
    give_up_filter(room);
    room = this->room(more_bytes);
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
  return aside.log_bytes > std::min(options_.min_log_bytes / 2 + 2 * copied_bytes_, set_aside_bound(aside)) ||
         aside.extents > ctx_.sizes.max_extents / 2 + 2 * copied_extents_;
}

void Merger::set_aside_log_copied(uint64_t bytes, uint64_t extents) {
  std::shared_lock lock(index_mutex_);
  const Index::SetAside aside = index_.set_aside();  // not empty if a log could not be copied
  copied_bytes_ = std::max(bytes, aside.log_bytes);
  copied_extents_ = std::max(extents, aside.extents);
}

void Merger::require_bounded_set_aside_log() const {
  if (!has_damage_) return;
  std::shared_lock lock(index_mutex_);
  const Index::SetAside aside = index_.set_aside();
  const uint64_t bound = set_aside_bound(aside);
  if (aside.log_bytes <= bound) return;
  const std::string text = ctx_.path + ": nothing more can be put: the log that damaged partitions hold has " +
                           std::to_string(aside.log_bytes) + " bytes, more than the bound of " + std::to_string(bound) +
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
  return std::max<uint64_t>(ctx_.sizes.merge_bytes, pages * ctx_.g.page_bytes);
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
    while (debt().over_limit() && merge_one(Caller::kForeground)) {
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
  while (debt().urgent() && merge_one(Caller::kForeground)) {
  }
}

void Merger::merge_all() {
  MergeScheduler::Foreground foreground(scheduler_);
  while (merge_one(Caller::kForeground)) {
  }
  std::shared_lock lock(index_mutex_);
  index_.throw_damage();
}

std::unique_lock<std::mutex> Merger::pause() {
  MergeScheduler::Foreground foreground(scheduler_);
  return std::unique_lock(merge_mutex_);
}

// ---- the background thread

void Merger::run_background() {
  while (const std::optional<uint64_t> ticket = scheduler_.wait_for_work()) {
    std::optional<MergeScheduler::Demand> next;
    std::exception_ptr error;
    try {
      if (merge_one(Caller::kBackground)) {
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

// ---- one merge

bool Merger::merge_one(Caller caller) {
  std::lock_guard merging(merge_mutex_);
  try {
    const bool merged = merge_next(caller);
    catalog_.collect();
    return merged;
  } catch (...) {
    catalog_.collect();  // deletes the files of the failed merge
    throw;
  }
}

bool Merger::merge_next(Caller caller) {
  Index::Merge job;
  uint64_t target;
  {
    std::unique_lock lock(index_mutex_);
    if (!index_.begin_merge(&job)) return false;
    target = std::max<uint64_t>(options_.partition_bytes, index_.base_bytes() / 512);
  }
  ctx_.fs->failpoint("merge.begin");
  const uint64_t bytes = job.rows * ctx_.g.entry_bytes();
  const uint64_t piece_count = bytes > target ? ceil_div(bytes, target * 3 / 4 + 1) : 1;
  std::vector<Partition> pieces;
  try {
    pieces = write_pieces(job, std::max<uint64_t>(1, ceil_div(job.rows, piece_count)), caller);
  } catch (const CorruptionError& e) {
    set_aside(job, e.what());
    return true;
  } catch (const UnreadableError& e) {
    set_aside(job, e.what());
    return true;
  }
  ctx_.fs->failpoint("merge.written");
  {
    std::unique_lock lock(index_mutex_);
    index_.finish_merge(job, std::move(pieces));
  }
  ++counters_.merges;
  ctx_.fs->failpoint("merge.installed");
  return true;
}

std::vector<Partition> Merger::write_pieces(const Index::Merge& job, uint64_t rows_per_piece, Caller caller) {
  constexpr uint64_t kSpendBytes = 1u << 20;  // charged to the scheduler at once
  PartitionCursor rows(ctx_, job.view, ctx_.sizes.merge_bytes);
  PieceWriter writer(ctx_, catalog_, counters_, options_.filter_bits, rows_per_piece);
  uint64_t uncharged = 0;
  while (rows.next()) {
    writer.add(rows.key(), rows.row());
    uncharged += ctx_.g.entry_bytes();
    if (uncharged >= kSpendBytes) {
      ctx_.fs->failpoint("merge.chunk");
      if (!scheduler_.spend(uncharged, caller == Caller::kBackground)) throw Stopped{};
      uncharged = 0;
    }
  }
  std::vector<Partition> pieces = writer.finish(job.view.lo, job.view.hi);
  counters_.bytes_read += rows.bytes_read();
  return pieces;
}

// Sets a partition aside: it is not merged any more; its undamaged pages stay readable. stats(), damage(), a warning
// and merge_all() report the cause. Called from the handler of the exception that stopped the merge.
void Merger::set_aside(const Index::Merge& job, const char* cause) {
  std::string damage = cause;
  if (damage.find("thermocline repair") == std::string::npos) damage += kRepairHint + repair_command(ctx_.path);
  {
    std::unique_lock lock(index_mutex_);
    job.partition->damage = damage;
    job.partition->damage_error = std::current_exception();
  }
  has_damage_ = true;
  ctx_.warnings.add_one_of_many(ctx_.path + ": a partition is not merged any more, because it is damaged: " + damage,
                                ctx_.path + ": more partitions are damaged and not merged any more");
}

}  // namespace thermocline::ssd
