#include "testing/store_driver.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "testing/test.h"
#include "util/error.h"
#include "util/hash.h"

namespace thermocline::testing {

void make_row(uint64_t key, uint32_t version, uint8_t* row, size_t bytes) {
  uint64_t x = mix64(key + 0x1234567) ^ (uint64_t{version} << 20);
  for (size_t i = 0; i < bytes; i += 8) {
    x = mix64(x + i + 1);
    std::memcpy(row + i, &x, std::min<size_t>(8, bytes - i));
  }
}

uint64_t test_key(uint32_t i) { return i == 0 ? 0 : i == 1 ? ~uint64_t{0} : i % 2 ? i : mix64(i); }

uint64_t Snapshot::live() const {
  return uint64_t(std::count_if(version.begin(), version.end(), [](uint32_t v) { return v != 0; }));
}

namespace {

// Returns the version of a row; throws Failure if it is not one of the allowed ones.
void check_row(const Snapshot& want, uint32_t i, bool found, const uint8_t* row, size_t bytes,
               const std::string& context) {
  std::vector<uint8_t> expected(bytes);
  auto is = [&](uint32_t version) {
    if (version == 0 || !found) return version == 0 && !found;
    make_row(test_key(i), version, expected.data(), bytes);
    return std::memcmp(row, expected.data(), bytes) == 0;
  };
  if (is(want.version[i])) return;
  if (auto it = want.also.find(i); it != want.also.end()) {
    for (uint32_t v : it->second) {
      if (is(v)) return;
    }
  }
  throw Failure(context + ": WRONG ROW of key " + std::to_string(test_key(i)) + " (number " + std::to_string(i) +
                "): wanted version " + std::to_string(want.version[i]) + ", " +
                (found ? "got other bytes" : "not found"));
}

void check_keys(SsdStore& store, const Snapshot& want, const std::vector<uint32_t>& which, const std::string& context) {
  const size_t bytes = store.row_bytes(), n = which.size();
  std::vector<uint64_t> keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = test_key(which[i]);
  std::vector<uint8_t> found(n, 0xee), rows(n * bytes);
  store.get(keys.data(), n, found.data(), {rows.data(), bytes});
  for (size_t i = 0; i < n; ++i) {
    if (found[i] > 1) throw Failure(context + ": found[] was not written");
    check_row(want, which[i], found[i], rows.data() + i * bytes, bytes, context);
  }
}

void check_scan(SsdStore& store, const Snapshot& want, const std::string& context) {
  std::map<uint64_t, uint32_t> number;
  for (uint32_t i = 0; i < want.version.size(); ++i) number[test_key(i)] = i;
  std::vector<bool> seen(want.version.size());
  auto scan = store.scan();
  std::vector<uint64_t> keys(97);
  std::vector<uint8_t> rows(keys.size() * store.row_bytes());
  uint64_t total = 0, last = 0;
  while (size_t n = scan->next(keys.size(), keys.data(), rows.data())) {
    for (size_t k = 0; k < n; ++k, ++total) {
      auto it = number.find(keys[k]);
      if (it == number.end()) throw Failure(context + ": scan returned a key that was never put");
      if (seen[it->second]) throw Failure(context + ": scan returned a key twice");
      if (total > 0 && hash_key(keys[k]) <= last) throw Failure(context + ": scan is not in hash order");
      last = hash_key(keys[k]);
      seen[it->second] = true;
      check_row(want, it->second, true, rows.data() + k * store.row_bytes(), store.row_bytes(), context + " (scan)");
    }
  }
  if (want.also.empty() && total != want.live())
    throw Failure(context + ": scan returned " + std::to_string(total) + " rows of " + std::to_string(want.live()));
  if (const uint64_t count = store.count(); count != total)
    throw Failure(context + ": count() is " + std::to_string(count) + ", scan returned " + std::to_string(total));
}

StoreOptions open_options(const DriverOptions& options) {
  StoreOptions o = options.store;
  o.row_bytes = options.row_bytes;
  o.create = true;
  return o;
}

}  // namespace

void verify(SsdStore& store, const Snapshot& want, const std::string& context, bool thorough) {
  std::vector<uint32_t> all(want.version.size());
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
  check_keys(store, want, all, context);
  if (thorough) check_scan(store, want, context);
}

StoreOptions small_store() {
  StoreOptions o;
  o.mem_budget = 8u << 20;
  o.segment_bytes = 256u << 10;
  o.partition_bytes = 128u << 10;
  o.min_log_bytes = 64u << 10;
  o.background_merge = false;
  return o;
}

DriverOptions::DriverOptions(uint64_t seed) : seed(seed) {
  if (seed % 2) store.write_buffer = 16u << 10;  // most puts become one extent each
  row_bytes = std::array<size_t, 4>{64, 64, 24, 200}[seed / 2 % 4];
  if (seed % 5 == 4) store.max_log_ratio = 1.0;
  if (seed % 5 == 3) store.partition_bytes = 32u << 10;
}

StoreDriver::StoreDriver(std::shared_ptr<FileSystem> fs, std::string path, const DriverOptions& options)
    : fs_(std::move(fs)), path_(std::move(path)), options_(options), rng_(options.seed) {
  live_.version.assign(options.keys, 0);
}

void StoreDriver::event(const char* what, size_t attempt) {
  if (on_event) on_event(std::string(what) + " " + std::to_string(attempt));
}

void StoreDriver::resume(std::vector<Attempt> attempts) {
  attempts_ = std::move(attempts);
  next_version_ = 1u << 24;  // above all versions of the other driver
}

void StoreDriver::open() {
  store_.reset();
  store_ = SsdStore::open(fs_, path_, open_options(options_));
  // The last commit that returned, or a later one that failed half-way; its note identifies it.
  const std::string note = store_->note();
  int found = -1;
  for (size_t i = 0; i < attempts_.size(); ++i) {
    if (store_->epoch() != 0 && attempts_[i].state.note == note) found = int(i);
  }
  int last = -1;
  for (size_t i = 0; i < attempts_.size(); ++i) {
    if (attempts_[i].epoch != 0) last = int(i);
  }
  if (found < last)
    throw Failure("open returned commit " + std::to_string(found) + ", but " + std::to_string(last) +
                  " had returned: LOST COMMIT");
  if (found >= 0) {
    attempts_[found].epoch = store_->epoch();
    live_ = attempts_[found].state;
  } else {
    live_ = {};
    live_.version.assign(options_.keys, 0);
  }
}

void StoreDriver::close() { store_.reset(); }

std::vector<uint32_t> StoreDriver::pick(uint32_t n) {
  std::vector<uint32_t> out(n);
  const bool dense = rng_() % 4 == 0;  // neighbouring keys, with many repeats
  const uint32_t from = uint32_t(rng_() % options_.keys);
  for (auto& k : out)
    k = dense ? (from + uint32_t(rng_() % (n / 2 + 1))) % options_.keys : uint32_t(rng_() % options_.keys);
  key_ops_ += n;
  return out;
}

void StoreDriver::put(uint32_t n) {
  const auto which = pick(n);
  std::vector<uint64_t> keys(n);
  std::vector<uint8_t> rows(n * options_.row_bytes);
  Snapshot next = live_;
  for (uint32_t i = 0; i < n; ++i) {
    keys[i] = test_key(which[i]);
    const uint32_t version = next_version_++;
    make_row(keys[i], version, rows.data() + i * options_.row_bytes, options_.row_bytes);
    next.version[which[i]] = version;  // the last occurrence wins
    next.also.erase(which[i]);
  }
  try {
    const RowsIn in{rows.data(), options_.row_bytes};
    if (n % 3 == 0) {
      store_->load(keys.data(), n, in);  // into a store without rows: base files
    } else {
      store_->put(keys.data(), n, in);
    }
  } catch (...) {
    for (uint32_t k : which) live_.also[k].insert(next.version[k]);
    throw;
  }
  live_ = std::move(next);
}

void StoreDriver::erase(uint32_t n) {
  const auto which = pick(n);
  std::vector<uint64_t> keys(n);
  for (uint32_t i = 0; i < n; ++i) keys[i] = test_key(which[i]);
  try {
    store_->erase(keys.data(), n);
  } catch (...) {
    for (uint32_t k : which) live_.also[k].insert(0);
    throw;
  }
  for (uint32_t k : which) {
    live_.version[k] = 0;
    live_.also.erase(k);
  }
}

void StoreDriver::get(uint32_t n) { check_keys(*store_, live_, pick(n), "get"); }

void StoreDriver::commit() {
  const size_t index = attempts_.size();
  live_.note = "commit " + std::to_string(index) + std::string(rng_() % 300, char('a' + index % 26));
  attempts_.push_back({live_, 0, false});
  event("begin", index);
  const uint64_t epoch = store_->commit(live_.note);
  for (const Attempt& a : attempts_) {
    if (a.epoch >= epoch) throw Failure("commit() returned epoch " + std::to_string(epoch) + " again");
  }
  attempts_.back().epoch = epoch;
  event("end", index);
  if (store_->epoch() != epoch || store_->note() != live_.note)
    throw Failure("epoch() or note() differs from the last commit");
}

void StoreDriver::release_one() {
  std::vector<size_t> old;
  for (size_t i = 0; i < attempts_.size(); ++i) {
    if (attempts_[i].epoch != 0 && attempts_[i].epoch < store_->epoch() && !attempts_[i].releasing) old.push_back(i);
  }
  if (old.empty()) return;
  const size_t i = old[rng_() % old.size()];
  attempts_[i].releasing = true;
  event("release", i);
  store_->release(attempts_[i].epoch);
}

void StoreDriver::checkpoint() {
  if (store_->epoch() == 0) return;
  size_t newest = 0;
  while (attempts_[newest].epoch != store_->epoch()) ++newest;
  const size_t index = checkpoints_.size();
  checkpoints_.push_back({path_ + "-checkpoint-" + std::to_string(index), newest, false});
  event("link", index);
  store_->link_checkpoint(checkpoints_.back().path);
  checkpoints_.back().done = true;
  event("linked", index);
}

void StoreDriver::check_all() {
  verify(*store_, live_, "live");
  store_->check();
}

void StoreDriver::step() {
  const uint32_t n = 1 + uint32_t(rng_() % options_.max_batch);
  const uint64_t dice = rng_() % 1000;
  if (dice < 450) return put(n);
  if (dice < 520) return erase(1 + n / 4);
  if (dice < 840) return get(n);
  if (dice < 930) return commit();
  if (dice < 970) return release_one();
  if (dice < 980) return store_->merge_all();
  if (dice < 987) return check_all();
  if (dice < 992) return checkpoint();
  if (!options_.reopen) return;
  close();
  open();
}

int verify_recovered(std::shared_ptr<FileSystem> fs, const std::string& path, const DriverOptions& options,
                     const std::vector<StoreDriver::Attempt>& attempts, const std::string& context) {
  const int begun = int(attempts.size());
  int ended = -1, found = -1;
  std::map<std::string, int> by_note;
  for (int i = 0; i < begun; ++i) {
    by_note[attempts[i].state.note] = i;
    if (attempts[i].epoch != 0) ended = i;
  }
  auto store = SsdStore::open(fs, path, open_options(options));
  if (store->epoch() != 0) {
    auto it = by_note.find(store->note());
    if (it == by_note.end()) throw Failure(context + ": its note belongs to no commit: " + store->note());
    found = it->second;
  }
  if (found < ended) {
    throw Failure(context + ": LOST COMMIT: found " + std::to_string(found) + ", but " + std::to_string(ended) +
                  " had returned");
  }
  Snapshot empty;
  empty.version.assign(options.keys, 0);
  verify(*store, found < 0 ? empty : attempts[found].state, context);
  const std::vector<uint64_t> epochs = store->epochs();
  store.reset();

  std::set<int> there;
  for (uint64_t epoch : epochs) {
    StoreOptions o = open_options(options);
    o.create = false;
    o.read_only = true;
    o.epoch = epoch;
    auto old = SsdStore::open(fs, path, o);
    auto it = by_note.find(old->note());
    if (it == by_note.end())
      throw Failure(context + ": epoch " + std::to_string(epoch) + " has a note that belongs to no commit");
    verify(*old, attempts[it->second].state, context + ", epoch " + std::to_string(epoch), false);
    there.insert(it->second);
  }
  for (int i = 0; i < begun; ++i) {
    if (attempts[i].epoch != 0 && !attempts[i].releasing && !there.contains(i)) {
      throw Failure(context + ": LOST EPOCH " + std::to_string(attempts[i].epoch) + ", which was never released");
    }
  }
  return found;
}

void verify_checkpoint(std::shared_ptr<FileSystem> fs, const DriverOptions& options,
                       const StoreDriver::Checkpoint& checkpoint, const Snapshot& want, const std::string& context) {
  StoreOptions o = options.store;
  o.read_only = true;
  std::unique_ptr<SsdStore> store;
  try {
    store = SsdStore::open(fs, checkpoint.path, o);
  } catch (const NotFoundError&) {
  } catch (const FormatError&) {
  }
  if (store) {
    if (store->note() != want.note) throw Failure(context + ": " + checkpoint.path + " belongs to another commit");
    verify(*store, want, context + ": " + checkpoint.path);
  } else if (checkpoint.done) {
    throw Failure(context + ": LOST CHECKPOINT " + checkpoint.path);
  }
}

}  // namespace thermocline::testing
