#include "admission/filter.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "util/error.h"
#include "util/hash.h"

namespace thermocline {

namespace {

constexpr size_t kBlock = 16;                // keys whose memory is requested before it is read
constexpr uint64_t kWorkingBytes = 1 << 20;  // working memory of a plan that is kept for the next one, at least
constexpr size_t kFirstSlots = 1024;
constexpr uint8_t kTrained = 1;
constexpr uint8_t kPlanned = 2;
constexpr uint32_t kNone = ~uint32_t{0};

}  // namespace

size_t AdmissionFilter::Log::bytes() const {
  return sizeof(Log) + keys.capacity() * sizeof(KeyChange) + cells.capacity() * sizeof(CellChange) +
         admitted.capacity() * sizeof(uint64_t);
}

AdmissionFilter::AdmissionFilter(const AdmissionRule& rule)
    : rule_(rule),
      mix_(mix64(mix64(rule.seed + 0x632be59bd9b4e019ULL) ^ rule.table)),
      admitted_(kFirstSlots),
      rowless_(kFirstSlots) {
  if (rule.kind == AdmissionKind::kExact) counters_ = std::make_unique<KeyCounts>(rule.memory / KeyCounts::kSlotBytes);
  if (rule.kind == AdmissionKind::kSketch) sketch_ = std::make_unique<CountSketch>(rule.memory);
}

// Calls found(i, home) for each id in order, when the memory at its home in admitted_ was requested a block earlier.
template <typename Fn>
void AdmissionFilter::look_up(const uint64_t* ids, size_t n, Fn&& found) const {
  size_t homes[2][kBlock];
  const auto request = [&](size_t first) {
    size_t* const block = homes[first / kBlock % 2];
    const size_t count = std::min(kBlock, n - first);
    for (size_t i = 0; i < count; ++i) {
      block[i] = admitted_.home(ids[first + i]);
      admitted_.prefetch(block[i]);
    }
  };
  if (n != 0) request(0);
  for (size_t first = 0; first < n; first += kBlock) {
    if (first + kBlock < n) request(first + kBlock);
    const size_t* const block = homes[first / kBlock % 2];
    const size_t count = std::min(kBlock, n - first);
    for (size_t i = 0; i < count; ++i) found(first + i, block[i]);
  }
}

// Sets waiting_ to the positions of the ids that are not admitted yet.
void AdmissionFilter::find_waiting(const uint64_t* ids, size_t n) {
  waiting_.resize(n);
  size_t waiting = 0;
  look_up(ids, n, [&](size_t i, size_t home) {
    waiting_[waiting] = static_cast<uint32_t>(i);
    waiting += !admitted_.contains(ids[i], home);
  });
  waiting_.resize(waiting);
}

uint64_t AdmissionFilter::plan(const uint64_t* ids, size_t n, uint8_t* refused, const uint8_t* counted) {
  std::lock_guard lock(mutex_);
  find_waiting(ids, n);
  group_waiting(ids, counted);
  decide(n);
  std::fill_n(refused, n, uint8_t{0});
  for (size_t w = 0; w < waiting_.size(); ++w) refused[waiting_[w]] = occurrences_[numbers_[w]].refused;
  return end_plan();
}

// Sets occurrences_ to the unique keys of the waiting ids, in the order of their first occurrence, and numbers_ to the
// index of each waiting id there.
void AdmissionFilter::group_waiting(const uint64_t* ids, const uint8_t* counted) {
  const size_t mask = std::bit_ceil(2 * waiting_.size() + 2) - 1;
  table_.assign(mask + 1, kNone);
  numbers_.resize(waiting_.size());
  occurrences_.clear();
  for (size_t w = 0; w < waiting_.size(); ++w) {
    const size_t i = waiting_[w];
    size_t at = hash_key(ids[i]) & mask;
    while (table_[at] != kNone && occurrences_[table_[at]].key != ids[i]) at = (at + 1) & mask;
    if (table_[at] == kNone) {
      table_[at] = static_cast<uint32_t>(occurrences_.size());
      occurrences_.push_back({.key = ids[i]});
    }
    numbers_[w] = table_[at];
    Occurrences& of_key = occurrences_[numbers_[w]];
    const bool counts = !counted || counted[i];
    of_key.counted += rule_.kind == AdmissionKind::kProbability ? counts && drawn(ids[i], planned_ + 1, i) : counts;
    ++of_key.all;
  }
}

uint64_t AdmissionFilter::plan_keys(const uint64_t* keys, const uint32_t* counted, const uint32_t* all, size_t n,
                                    uint8_t* refused) {
  std::lock_guard lock(mutex_);
  find_waiting(keys, n);
  occurrences_.clear();
  for (uint32_t i : waiting_) occurrences_.push_back({.key = keys[i], .counted = counted[i], .all = all[i]});
  decide(std::accumulate(all, all + n, uint64_t{0}));
  std::fill_n(refused, n, uint8_t{0});
  for (size_t w = 0; w < waiting_.size(); ++w) refused[waiting_[w]] = occurrences_[w].refused;
  return end_plan();
}

uint64_t AdmissionFilter::plan_working_set(const WorkingSetView& set, uint8_t* refused) {
  std::lock_guard lock(mutex_);
  find_waiting(set.keys, set.unique);
  occurrences_.clear();
  for (uint32_t u : waiting_) {
    const uint32_t ids = set.starts[u + 1] - set.starts[u];
    occurrences_.push_back({.key = set.keys[u], .counted = ids, .all = ids});
  }
  decide(set.ids);
  std::fill_n(refused, set.ids, uint8_t{0});
  for (size_t w = 0; w < waiting_.size(); ++w) {
    if (!occurrences_[w].refused) continue;
    for (uint32_t at = set.starts[waiting_[w]]; at < set.starts[waiting_[w] + 1]; ++at) refused[set.order[at]] = 1;
  }
  end_plan();
  return logs_.back().refused;
}

// Plans a batch of `ids` ids: counts occurrences_, and decides about each.
void AdmissionFilter::decide(uint64_t ids) {
  Log log;
  log.batch = planned_ + 1;
  log.dropped_before = dropped_;
  log.ids = ids;
  log.keys.reserve(counters_ ? occurrences_.size() : 0);
  if (!occurrences_.empty()) prefetch_block(0);
  for (size_t k = 0; k < occurrences_.size(); ++k) {
    if (k % kBlock == 0) prefetch_block(k + kBlock);
    Occurrences& of_key = occurrences_[k];
    of_key.refused = of_key.counted == 0 || !count(of_key.key, of_key.counted, log);
    if (of_key.refused) {
      log.refused += of_key.all;
    } else {
      admitted_.set(of_key.key, kPlanned);
      log.admitted.push_back(of_key.key);
    }
  }
  planned_ = log.batch;
  logs_.push_back(std::move(log));
}

// Requests the memory of a block of occurrences_ that are counted.
void AdmissionFilter::prefetch_block(size_t first) const {
  const size_t end = std::min(first + kBlock, occurrences_.size());
  for (size_t k = first; k < end; ++k) {
    const uint64_t key = occurrences_[k].key;
    if (counters_) counters_->prefetch(counters_->home(key));
    if (sketch_) sketch_->prefetch(key);
    admitted_.prefetch_state(admitted_.home(key));
  }
}

// Frees working memory that only large batches need. Returns the number of the batch.
uint64_t AdmissionFilter::end_plan() {
  peak_working_bytes_ = std::max(peak_working_bytes_, working_bytes());
  if (working_bytes() > std::max(kWorkingBytes, rule_.memory / 8)) {
    for (std::vector<uint32_t>* array : {&waiting_, &numbers_, &table_}) std::vector<uint32_t>().swap(*array);
    std::vector<Occurrences>().swap(occurrences_);
  }
  return planned_;
}

size_t AdmissionFilter::working_bytes() const {
  return (waiting_.capacity() + numbers_.capacity() + table_.capacity()) * sizeof(uint32_t) +
         occurrences_.capacity() * sizeof(Occurrences);
}

void AdmissionFilter::draw(const uint64_t* ids, size_t n, uint64_t batch, uint64_t first, uint8_t* chosen) const {
  for (size_t i = 0; i < n; ++i) chosen[i] = drawn(ids[i], batch, first + i);
}

bool AdmissionFilter::count(uint64_t key, uint32_t occurrences, Log& log) {
  if (rule_.kind == AdmissionKind::kExact) return count_exactly(key, occurrences, log);
  if (rule_.kind == AdmissionKind::kProbability) return true;
  for (uint32_t i = 0; i < occurrences; ++i)
    if (count_in_sketch(key, log)) return true;
  return false;
}

bool AdmissionFilter::count_in_sketch(uint64_t key, Log& log) {
  const auto changed = [&](size_t cell, CountSketch::Cell before) { log.cells.push_back({cell, before}); };
  return sketch_->add(key, changed) >= rule_.count;
}

bool AdmissionFilter::count_exactly(uint64_t key, uint32_t occurrences, Log& log) {
  KeyCounts::Place place = counters_->find(key);
  const uint32_t before = counters_->get(place);
  if (uint64_t{before} + occurrences >= rule_.count) {
    if (before != 0) {
      log.keys.push_back({key, before});
      counters_->erase(place);
    }
    return true;
  }
  if (before == 0 && counters_->size() >= counters_->limit()) {
    drop_smallest(log);
    place = counters_->find(key);
  }
  log.keys.push_back({key, before});
  counters_->put(place, key, before + occurrences);
  return false;
}

void AdmissionFilter::drop_smallest(Log& log) {
  const size_t keep = counters_->limit() / 2;
  std::vector<KeyChange> all;
  all.reserve(counters_->size());
  counters_->for_each([&](uint64_t key, uint32_t value) { all.push_back({key, value}); });
  std::vector<uint32_t> values(all.size());
  std::transform(all.begin(), all.end(), values.begin(), [](const KeyChange& entry) { return entry.before; });
  // The count at the limit is dropped with all smaller ones, so that no order of keys matters.
  const auto nth = values.begin() + static_cast<ptrdiff_t>(values.size() - 1 - keep);
  std::nth_element(values.begin(), nth, values.end());
  for (const KeyChange& entry : all) {
    if (entry.before > *nth) continue;
    log.keys.push_back(entry);
    counters_->set(entry.key, 0);
    ++dropped_;
  }
}

bool AdmissionFilter::drawn(uint64_t key, uint64_t batch, uint64_t position) const {
  const uint64_t h = mix64(mix64(mix64(mix_ ^ key) + batch) + position);
  return static_cast<double>(h >> 11) * 0x1p-53 < rule_.probability;
}

void AdmissionFilter::read(const uint64_t* ids, size_t n, uint8_t* refused) const {
  std::lock_guard lock(mutex_);
  look_up(ids, n, [&](size_t i, size_t home) { refused[i] = admitted_.get(ids[i], home) != kTrained; });
}

void AdmissionFilter::peek(const uint64_t* keys, size_t n, uint8_t* refused) const {
  std::lock_guard lock(mutex_);
  look_up(keys, n, [&](size_t i, size_t home) { refused[i] = !admitted_.contains(keys[i], home); });
}

void AdmissionFilter::set_stored(const uint64_t* keys, size_t n) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < n && rowless_.size() != 0; ++i) rowless_.set(keys[i], 0);
}

void AdmissionFilter::train(uint64_t batch, bool stored) {
  std::lock_guard lock(mutex_);
  if (batch > planned_) throw Error("admission: the batch was not planned");
  while (trained_ < batch) {
    const Log& log = logs_.front();
    look_up(log.admitted.data(), log.admitted.size(),
            [&](size_t i, size_t home) { admitted_.set(log.admitted[i], home, kTrained); });
    for (size_t i = 0; !stored && i < log.admitted.size(); ++i) rowless_.set(log.admitted[i], 1);
    totals_.keys_admitted += log.admitted.size();
    totals_.ids_refused += log.refused;
    totals_.ids_admitted += log.ids - log.refused;
    trained_ = log.batch;
    logs_.pop_front();
  }
}

void AdmissionFilter::roll_back(uint64_t batch) {
  std::lock_guard lock(mutex_);
  if (batch < trained_) throw Error("admission: the batch is trained already");
  roll_back_locked(batch);
}

void AdmissionFilter::roll_back_locked(uint64_t batch) {
  while (!logs_.empty() && logs_.back().batch > batch) {
    undo(logs_.back());
    planned_ = logs_.back().batch - 1;
    logs_.pop_back();
  }
}

void AdmissionFilter::undo(const Log& log) {
  for (uint64_t key : log.admitted) admitted_.set(key, 0);
  // Removals first: a batch that dropped counters may have had more keys, one after the other, than the memory holds.
  std::unordered_map<uint64_t, uint32_t> before;
  for (auto change = log.keys.rbegin(); change != log.keys.rend(); ++change) before[change->key] = change->before;
  for (const auto& [key, value] : before)
    if (value == 0) counters_->set(key, 0);
  for (const auto& [key, value] : before)
    if (value != 0) counters_->set(key, value);
  for (auto change = log.cells.rbegin(); change != log.cells.rend(); ++change)
    sketch_->cells()[change->cell] = change->before;
  dropped_ = log.dropped_before;
}

void AdmissionFilter::admit(const uint64_t* keys, size_t n) {
  std::lock_guard lock(mutex_);
  if (!logs_.empty()) throw Error("admission: batches are planned; close the pipeline before rows are replaced");
  for (size_t i = 0; i < n; ++i) {
    admitted_.set(keys[i], kTrained);
    if (counters_) counters_->set(keys[i], 0);
  }
}

void AdmissionFilter::forget(const uint64_t* keys, size_t n) {
  std::lock_guard lock(mutex_);
  if (!logs_.empty()) throw Error("admission: batches are planned and not trained; keys cannot be forgotten now");
  for (size_t i = 0; i < n; ++i) {
    admitted_.set(keys[i], 0);
    rowless_.set(keys[i], 0);
    if (counters_) counters_->set(keys[i], 0);
  }
}

void AdmissionFilter::clear_admitted() {
  std::lock_guard lock(mutex_);
  roll_back_locked(trained_);
  admitted_ = KeyStates(kFirstSlots);
  rowless_ = KeyStates(kFirstSlots);
}

AdmissionState AdmissionFilter::save() const {
  std::lock_guard lock(mutex_);
  AdmissionState state{.batches = trained_, .dropped = logs_.empty() ? dropped_ : logs_.front().dropped_before};
  if (counters_) {
    std::unordered_map<uint64_t, uint32_t> before;  // the values that keys had before the first batch in the logs
    for (auto log = logs_.rbegin(); log != logs_.rend(); ++log)
      for (auto change = log->keys.rbegin(); change != log->keys.rend(); ++change) before[change->key] = change->before;
    std::vector<std::pair<uint64_t, uint32_t>> all;
    counters_->for_each([&](uint64_t key, uint32_t value) {
      if (!before.contains(key)) all.emplace_back(key, value);
    });
    for (const auto& [key, value] : before)
      if (value != 0) all.emplace_back(key, value);
    std::sort(all.begin(), all.end());
    for (const auto& [key, value] : all) {
      state.keys.push_back(key);
      state.counts.push_back(value);
    }
  }
  if (sketch_) {
    state.cells.assign(sketch_->cells(), sketch_->cells() + sketch_->size());
    for (auto log = logs_.rbegin(); log != logs_.rend(); ++log)
      for (auto change = log->cells.rbegin(); change != log->cells.rend(); ++change)
        state.cells[change->cell] = change->before;
  }
  rowless_.for_each([&](uint64_t key, uint8_t) { state.admitted.push_back(key); });
  std::sort(state.admitted.begin(), state.admitted.end());
  return state;
}

void AdmissionFilter::load(const AdmissionState& state) {
  std::lock_guard lock(mutex_);
  if (state.keys.size() != state.counts.size()) throw Error("admission: keys and counts have different lengths");
  if (sketch_ && !state.cells.empty() && state.cells.size() != sketch_->size())
    throw Error("admission: the sketch has another size");
  logs_.clear();
  if (counters_) {
    counters_ = std::make_unique<KeyCounts>(rule_.memory / KeyCounts::kSlotBytes);
    dropped_ = state.dropped;
    Log log;
    for (size_t i = 0; i < state.keys.size(); ++i) {
      if (state.counts[i] == 0 || admitted_.get(state.keys[i]) != 0) continue;
      if (counters_->size() >= counters_->limit()) drop_smallest(log);  // saved with more memory
      counters_->set(state.keys[i], state.counts[i]);
    }
  }
  if (sketch_) {
    std::fill_n(sketch_->cells(), sketch_->size(), CountSketch::Cell{0});
    std::copy(state.cells.begin(), state.cells.end(), sketch_->cells());
  }
  for (uint64_t key : state.admitted) {
    admitted_.set(key, kTrained);
    rowless_.set(key, 1);
  }
  planned_ = trained_ = state.batches;
}

uint64_t AdmissionFilter::planned() const {
  std::lock_guard lock(mutex_);
  return planned_;
}

std::vector<uint64_t> AdmissionFilter::admitted() const {
  std::lock_guard lock(mutex_);
  std::vector<uint64_t> keys;
  keys.reserve(admitted_.size());
  admitted_.for_each([&](uint64_t key, uint8_t value) {
    if (value == kTrained) keys.push_back(key);
  });
  std::sort(keys.begin(), keys.end());
  return keys;
}

AdmissionStats AdmissionFilter::stats() const {
  std::lock_guard lock(mutex_);
  AdmissionStats stats = totals_;
  stats.batches = trained_;
  stats.counters = counters_ ? counters_->size() : 0;
  stats.counters_dropped = dropped_;
  stats.counter_bytes = (counters_ ? counters_->bytes() : 0) + (sketch_ ? sketch_->bytes() : 0);
  stats.admitted_bytes = admitted_.bytes() + rowless_.bytes();
  for (const Log& log : logs_) stats.log_bytes += log.bytes();
  stats.working_bytes = working_bytes();
  stats.peak_working_bytes = peak_working_bytes_;
  return stats;
}

}  // namespace thermocline
