// Batched lookups of SsdStore: plan under the index lock, then read, verify and copy without it.
#include <algorithm>
#include <chrono>

#include "ssd/impl.h"
#include "ssd/key_pieces.h"

namespace thermocline {

using namespace ssd;

namespace {
constexpr size_t kMeasureFrom = 4096;  // keys that justify measuring the device
constexpr uint64_t kSpanPages = 8;     // of an extent, for the least piece of a large lookup
}  // namespace

// The parts of a get(): pieces of its keys, planned by the worker that reads them.
class SsdStore::Impl::GetPlans : public PlanSource {
 public:
  GetPlans(Impl& store, const RowsWanted& wanted, KeyPieces& pieces)
      : store_(store), wanted_(wanted), pieces_(pieces) {}

  bool next(ReadPlan& plan, PlanScratch& scratch) override {
    if (!pieces_.next(plan.items, scratch.items)) return false;
    {
      std::shared_lock lock(store_.index_mutex_);
      store_.take_from_buffer(plan, wanted_);
      plan_reads(store_.index_, plan, scratch);
    }
    store_.reader_.counters().keys += plan.items.size();
    store_.reader_.combine(plan);
    return true;
  }
  bool left() const override { return pieces_.left(); }
  bool ahead() const override { return !pieces_.wide(); }
  void plan_again(ReadPlan& plan, PlanScratch& scratch) override {
    {
      std::shared_lock lock(store_.index_mutex_);
      plan_reads(store_.index_, plan, scratch);
    }
    store_.reader_.combine(plan);
  }
  uint64_t memory() const override { return pieces_.memory(); }

 private:
  Impl& store_;
  const RowsWanted& wanted_;
  KeyPieces& pieces_;
};

void SsdStore::Impl::take_from_buffer(ReadPlan& plan, const RowsWanted& wanted) const {
  if (buffer_.size() + deletions_.size() == 0) return;
  size_t kept = 0;
  for (auto& item : plan.items) {
    if (deletions_.find(wanted.keys[item.index]) >= 0) continue;
    int64_t at = buffer_.find(wanted.keys[item.index]);
    if (at < 0) {
      plan.items[kept++] = item;
    } else if (!buffer_.deleted(static_cast<uint32_t>(at))) {
      std::memcpy(wanted.rows.at(item.index), buffer_.row(static_cast<uint32_t>(at)), ctx.g.row_bytes);
      wanted.found[item.index] = 1;
    }
  }
  plan.items.resize(kept);
}

size_t SsdStore::Impl::prepare_lookup(size_t n) {
  if (n > UINT32_MAX) throw Error(ctx.path + ": more than 2^32 keys in one call");
  if (n >= kMeasureFrom) {
    reader_.measure([&] {
      std::shared_lock lock(index_mutex_);
      return index_.files();
    });
  }
  return reader_.workers_for(n);
}

uint64_t SsdStore::Impl::piece_span(size_t n) const {
  if (n <= KeyPieces::kMostKeys) return 0;
  std::shared_lock lock(index_mutex_);
  const uint64_t pages = index_.log_bytes() / ctx.g.page_bytes;
  if (pages == 0) return 0;
  const double share = static_cast<double>(kSpanPages * index_.extents()) / static_cast<double>(pages);
  return share >= 1 ? UINT64_MAX : static_cast<uint64_t>(share * 0x1p64);
}

void SsdStore::Impl::get(const uint64_t* keys, size_t n, uint8_t* found, RowsOut rows) {
  auto life = alive();
  if (n == 0) return;
  std::memset(found, 0, n);
  const size_t workers = prepare_lookup(n);
  const auto start = std::chrono::steady_clock::now();
  const RowsWanted wanted{keys, found, rows};
  KeyPieces pieces(keys, n, workers, reader_.least_piece(), piece_span(n), reader_.pool());
  GetPlans plans(*this, wanted, pieces);
  reader_.read(plans, workers, wanted);
  if (n >= kMeasureFrom)
    reader_.add_lookup(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

double SsdStore::Impl::read_floor(const uint64_t* keys, size_t n) {
  auto life = alive();
  const size_t workers = prepare_lookup(n);
  KeyPieces pieces(keys, n, workers, reader_.least_piece(), piece_span(n), reader_.pool());
  std::vector<ReadPlan> plans;
  PlanScratch scratch;
  for (ReadPlan plan; pieces.next(plan.items, scratch.items); plan = {}) {
    {
      std::shared_lock lock(index_mutex_);
      plan_reads(index_, plan, scratch);
    }
    reader_.combine(plan);
    plans.push_back(std::move(plan));
  }
  return reader_.time_reads(std::move(plans), workers);
}

}  // namespace thermocline
