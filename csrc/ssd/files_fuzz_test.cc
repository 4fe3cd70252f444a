// Hostile and damaged files: no input makes the store crash, hang, allocate without bound or read outside its memory.
//
// An input is a list of changes to one file of a small store: STORE, a manifest, a base file or a log segment. The
// checksums of changed pages and records are computed again, so that the code behind them is reached; changes marked as
// damage keep the old checksum, and then no wrong row may be returned. What follows is chosen by the input: decode the
// record, or the header, fences, filter or keys that opening a store reads from a data file; or open the store and read
// every row, write, or repair it. Only errors of error.h are allowed.
//
// `make test-cpp` replays the corpus (tests/tiers/store_corpus) and seeded mutations, `make test-sanitize` does so
// under ASan and UBSan; `make fuzz` builds this file with libFuzzer.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "ssd/files.h"
#include "ssd/format.h"
#include "ssd/manifest.h"
#include "ssd/repair.h"
#include "ssd/store.h"
#include "testing/mem_fs.h"
#include "util/error.h"
#include "util/hash.h"

#ifndef THERMOCLINE_LIBFUZZER
#include <filesystem>

#include "testing/corpus.h"
#include "testing/test.h"
#endif

namespace thermocline {
namespace {

using testing::MemFs;

constexpr const char* kPath = "/d/store";
constexpr size_t kRowBytes = 24, kBudget = 4u << 20;
constexpr RepairOptions kRepair{.mem_budget = kBudget}, kDryRun{.dry_run = true, .mem_budget = kBudget};
constexpr uint64_t kKeys = 900;

[[noreturn]] void broken(const std::string& what) {
  std::fprintf(stderr, "files_fuzz_test.cc: %s\n", what.c_str());
  std::abort();
}

StoreOptions options() {
  StoreOptions o;
  o.row_bytes = kRowBytes;
  o.mem_budget = kBudget;
  o.segment_bytes = o.partition_bytes = 16u << 10;
  o.min_log_bytes = 8u << 10;
  o.filter_bits = 10;
  o.background_merge = false;
  return o;
}

// A small store with two commits: base files with filters, extents of rows and of deletions.
struct Image {
  std::shared_ptr<MemFs> fs = std::make_shared<MemFs>();
  ssd::Geometry g = ssd::Geometry::of(kRowBytes);
  std::map<uint64_t, std::array<uint8_t, kRowBytes>> rows;  // of the newest commit
  std::vector<std::string> manifests, bases, segments;      // paths
  std::map<std::string, uint64_t> nonces;
  ssd::Identity id;
  std::map<std::string, ssd::PartitionRecord> partitions;  // by path, of the oldest commit that has the file
  std::map<std::string, ssd::SegmentRecord> log;           // of the newest commit
  std::vector<ssd::ExtentRecord> extents;                  // of the newest commit
  uint64_t epoch = 0;

  Image() {
    fs->make_dir("/d");
    StoreOptions o = options();
    o.create = true;
    auto store = SsdStore::open(fs, kPath, o);
    for (uint64_t round = 0; round < 4; ++round) {
      std::vector<uint64_t> keys;
      std::vector<uint8_t> bytes;
      for (uint64_t k = 0; k < kKeys; ++k) {
        if (round > 0 && mix64(k + round) % 4 > 0) continue;
        auto& row = rows[k];
        for (size_t i = 0; i < kRowBytes; ++i) row[i] = static_cast<uint8_t>(mix64(k * 31 + round + i));
        keys.push_back(k);
        bytes.insert(bytes.end(), row.begin(), row.end());
      }
      store->put(keys.data(), keys.size(), {bytes.data(), kRowBytes});
      if (round == 0) store->merge_all();
      if (round == 1 || round == 3) {
        std::vector<uint64_t> gone;
        for (uint64_t k = round; k < kKeys; k += 13) gone.push_back(k);
        store->erase(gone.data(), gone.size());
        for (uint64_t k : gone) rows.erase(k);
        epoch = store->commit("commit " + std::to_string(round));
      }
    }
    store.reset();
    for (auto& [path, inode] : fs->files()) {
      if (path.find("MANIFEST") != std::string::npos) manifests.push_back(path);
      if (path.find("/base-") != std::string::npos) bases.push_back(path);
      if (path.find("/log-") != std::string::npos) segments.push_back(path);
    }
    const std::string identity = kPath + std::string("/STORE");
    id = ssd::Identity::decode(fs->bytes(identity), identity);
    for (auto& path : manifests) {
      const auto m = ssd::Manifest::decode(fs->bytes(path), path, g);
      for (auto& p : m.partitions) partitions.emplace(name(ssd::FileKind::kBase, p.file), p);
      for (auto& s : m.segments) log[name(ssd::FileKind::kSegment, s.file)] = s;
      extents = m.extents;
    }
    for (auto& [path, p] : partitions) nonces[path] = p.nonce;
    for (auto& [path, s] : log) nonces[path] = s.nonce;
    if (bases.size() < 2 || segments.empty() || manifests.size() != 2) broken("the image has too few files");
  }

  static std::string name(ssd::FileKind kind, uint64_t number) { return kPath + ("/" + ssd::file_name(kind, number)); }
};

const Image& image() {
  static const Image one;
  return one;
}

// ---- changes

constexpr uint64_t kInteresting[] = {0,          1,
                                     2,          3,
                                     7,          8,
                                     63,         64,
                                     65,         127,
                                     255,        256,
                                     4095,       4096,
                                     4097,       65535,
                                     65536,      1u << 20,
                                     0x100001,   0x7fffffff,
                                     0x80000000, 0xffffffe0,
                                     0xfffffff8, 0xffffffff,
                                     1ull << 32, (1ull << 32) + 1,
                                     1ull << 40, 1ull << 52,
                                     1ull << 60, 1ull << 61,
                                     ~0ull >> 1, 1ull << 63,
                                     ~0ull - 63, ~0ull - 7,
                                     ~0ull - 1,  ~0ull};

enum class Action { kDecode, kRead, kWrite, kRepair };

// Bytes: target and action, file, then changes of 8 bytes: operation, page, u16 position, u32 value.
struct Input {
  Action action = Action::kRead;
  std::string path;
  bool record = false;  // STORE or a manifest
  bool sealed = false;  // some checksum was computed again
  std::string bytes;    // of the changed file
};

template <class T>
void store_at(std::string& bytes, size_t at, T value) {
  if (bytes.size() >= sizeof value && at <= bytes.size() - sizeof value) std::memcpy(&bytes[at], &value, sizeof value);
}

void change(std::string& bytes, uint8_t operation, size_t at, uint32_t value) {
  uint64_t old = 0;
  if (at + 8 <= bytes.size()) std::memcpy(&old, &bytes[at], 8);
  switch (operation & 7) {
    case 0:
      return store_at(bytes, at, static_cast<uint8_t>(value));
    case 1:
      return store_at(bytes, at, value);
    case 2:
      return store_at(bytes, at, uint64_t{value});
    case 3:
      return store_at(bytes, at, kInteresting[value % std::size(kInteresting)]);
    case 4:
      return store_at(bytes, at, static_cast<uint32_t>(kInteresting[value % std::size(kInteresting)]));
    case 5:
      return store_at(bytes, at, old ^ uint64_t{1} << (value % 64));
    case 6:
      return store_at(bytes, at, old + static_cast<uint64_t>(static_cast<int64_t>(static_cast<int8_t>(value))));
    case 7:
      return bytes.resize(std::min(bytes.size(), at));
  }
}

// Length and checksum of STORE or a manifest.
void seal_record(std::string& bytes, bool manifest) {
  if (bytes.size() < 32) return;
  store_at(bytes, 16, uint64_t{bytes.size()});
  const uint64_t seed = manifest ? 0x4d414e4946455354ULL : 0x53544f5245ULL;
  store_at(bytes, bytes.size() - 8, xxh64(bytes.data(), bytes.size() - 8, seed));
}

Input read_input(std::string_view data) {
  const Image& from = image();
  auto next = [&]() -> uint8_t {
    if (data.empty()) return 0;
    const auto byte = static_cast<uint8_t>(data[0]);
    data.remove_prefix(1);
    return byte;
  };
  Input in;
  const uint8_t first = next(), file = next();
  auto pick = [&](const std::vector<std::string>& paths) { return paths[file % paths.size()]; };
  const int target = first % 4;
  in.action = static_cast<Action>(first / 4 % 4);
  in.record = target < 2;
  in.path = target == 0   ? kPath + std::string("/STORE")
            : target == 1 ? pick(from.manifests)
            : target == 2 ? pick(from.bases)
                          : pick(from.segments);
  in.bytes = *from.fs->files().at(in.path)->bytes;
  const size_t page_bytes = from.g.page_bytes;
  while (data.size() >= 8) {
    const uint8_t operation = next(), page = next();
    size_t at = next();
    at |= static_cast<size_t>(next()) << 8;
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value |= static_cast<uint32_t>(next()) << (8 * i);
    if (in.bytes.empty()) break;
    if (operation & 0x40) at %= 64;  // headers more often than other bytes
    const bool damage = operation & 0x80;
    in.sealed |= !damage;
    if (in.record) {
      change(in.bytes, operation, at % in.bytes.size(), value);
      if (!damage) seal_record(in.bytes, target == 1);
      continue;
    }
    const size_t pages = in.bytes.size() / page_bytes;
    if (pages == 0) break;
    const size_t number = page % pages, offset = number * page_bytes;
    change(in.bytes, operation, offset + at % page_bytes, value);
    if (damage || in.bytes.size() < offset + page_bytes) continue;
    store_at(in.bytes, offset,
             xxh64(in.bytes.data() + offset + 8, page_bytes - 8, ssd::page_seed(from.nonces.at(in.path), number)));
  }
  return in;
}

// ---- actions

// Loads what opening a store reads: the fences of a base file, or the hashes of the keys of a log segment.
std::vector<uint64_t> load_data_file(const std::string& path, const std::string& bytes) {
  const Image& from = image();
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/d");
  fs->make_dir(kPath);
  fs->set_bytes(path, bytes);
  ssd::Context ctx(fs, kPath, from.id, kBudget, options().write_buffer);
  if (auto it = from.partitions.find(path); it != from.partitions.end())
    return ssd::open_base(ctx, it->second, true)->fences;
  const ssd::SegmentRecord& segment = from.log.at(path);
  const auto file = ssd::open_data_file(ctx, ssd::FileKind::kSegment, segment.file, segment.nonce, segment.pages);
  std::vector<uint64_t> hashes;
  for (const ssd::ExtentRecord& r : from.extents) {
    if (r.segment != segment.file) continue;
    ssd::Extent extent{.seq = r.seq,
                       .segment = file,
                       .first_page = static_cast<uint32_t>(r.first_page),
                       .vbase = 0,
                       .rows = r.rows,
                       .tombstones = r.tombstones != 0,
                       .fences = {}};
    ssd::read_extent_keys(ctx, extent, [&](uint64_t hash, uint32_t) { hashes.push_back(hash); });
  }
  return hashes;
}

void decode_data_file(const Input& in) {
  static std::map<std::string, std::vector<uint64_t>> originals;
  auto it = originals.find(in.path);
  if (it == originals.end())
    it = originals.emplace(in.path, load_data_file(in.path, *image().fs->files().at(in.path)->bytes)).first;
  const std::vector<uint64_t> loaded = load_data_file(in.path, in.bytes);
  if (loaded.size() != it->second.size()) broken("fences or keys are missing");
  if (!in.sealed && loaded != it->second) broken("WRONG FENCES OR KEYS");
}

// A copy of exactly the input size, so that ASan detects every read outside.
void decode(const Input& in) {
  if (!in.record) return decode_data_file(in);
  const std::unique_ptr<char[]> copy(new char[in.bytes.size()]);
  std::memcpy(copy.get(), in.bytes.data(), in.bytes.size());
  const std::string_view bytes(copy.get(), in.bytes.size());
  if (in.path.ends_with("STORE")) {
    const ssd::Identity id = ssd::Identity::decode(bytes, in.path);
    if (!id.geometry.valid() || id.geometry.rows_per_page() == 0) broken("an invalid geometry was accepted");
    return;
  }
  const ssd::Manifest m = ssd::Manifest::decode(bytes, in.path, image().g);
  // The four bytes after the version are ignored by decode() and written as zeros.
  if (m.encode().substr(24, in.bytes.size() - 32) != in.bytes.substr(24, in.bytes.size() - 32))
    broken("encode() does not return the decoded manifest");
}

void read_all(SsdStore& store, bool exact) {
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k;
  const size_t row_bytes = store.row_bytes();
  std::vector<uint8_t> found(kKeys), rows(kKeys * row_bytes);
  store.get(keys.data(), kKeys, found.data(), {rows.data(), row_bytes});
  for (uint64_t k = 0; exact && k < kKeys; ++k) {
    auto it = image().rows.find(k);
    if (found[k] != (it != image().rows.end())) broken("a row is missing or reappeared");
    if (found[k] && std::memcmp(&rows[k * row_bytes], it->second.data(), row_bytes) != 0) broken("WRONG ROW");
  }
  auto scan = store.scan();
  while (scan->next(kKeys, keys.data(), rows.data()) > 0) {
  }
  store.count();
  store.check();
}

void run(const Input& in) {
  if (in.action == Action::kDecode) return decode(in);
  auto fs = image().fs->clone();
  fs->set_bytes(in.path, in.bytes);
  StoreOptions o = options();
  o.row_bytes = 0;
  if (in.action == Action::kRepair) {
    const RepairReport planned = repair_store(fs, kPath, kDryRun);
    const RepairReport report = repair_store(fs, kPath, kRepair);
    if (planned.losses.size() != report.losses.size()) broken("a repair differs from its dry run");
    o.read_only = true;
    try {
      for (uint64_t epoch : SsdStore::open(fs, kPath, o)->epochs()) {
        o.epoch = epoch;
        SsdStore::open(fs, kPath, o)->check();
      }
    } catch (const Error& e) {
      broken(std::string("a repaired store is damaged: ") + e.what());
    }
    return;
  }
  o.read_only = in.action == Action::kRead;
  auto store = SsdStore::open(fs, kPath, o);
  // Damage is detected, except in bytes that no commit needs: every row that is returned is right. The rows of a
  // file with new checksums are those of its author.
  if (o.read_only) return read_all(*store, !in.sealed && store->epoch() == image().epoch);
  const uint8_t row[kRowBytes] = {1, 2, 3};
  const uint64_t key = 5;
  if (store->row_bytes() == kRowBytes) store->put(&key, 1, {row, kRowBytes});
  store->erase(&key, 1);
  store->merge_all();
  store->commit("more");
  store->check();
}

void check_input(std::string_view data) {
  const Input in = read_input(data);
  try {
    run(in);
  } catch (const Error&) {
    // Refused.
  }
}

}  // namespace
}  // namespace thermocline

#ifdef THERMOCLINE_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Decoding one file is much faster than opening a store: a run of it alone reaches millions of inputs.
  static const bool decode_only = std::getenv("THERMOCLINE_FUZZ_DECODE") != nullptr;
  std::string input(reinterpret_cast<const char*>(data), size);
  if (decode_only && size > 0) input[0] = static_cast<char>(data[0] % 4);
  thermocline::check_input(input);
  return 0;
}
#else
namespace thermocline {
namespace {

std::vector<std::string> read_corpus() {
  return testing::read_corpus(testing::beside_source(__FILE__, "../../tests/tiers/store_corpus"));
}

// Every input of the corpus with every action.
TEST(StoreFilesFuzz, Corpus) {
  const std::vector<std::string> corpus = read_corpus();
  CHECK(corpus.size() >= 10);
  for (std::string input : corpus) {
    const auto target = static_cast<uint8_t>(input.at(0)) % 4;
    for (int action = 0; action < 4; ++action) {
      input[0] = static_cast<char>(action * 4 + target);
      check_input(input);
    }
  }
}

TEST(StoreFilesFuzz, Mutations) {
  std::mt19937_64 rng(2026);
  const uint64_t whole = testing::scaled(600, 200'000), decodes = testing::scaled(20'000, 5'000'000);
  for (uint64_t i = 0; i < whole + decodes; ++i) {
    std::string input;
    input += static_cast<char>(i < whole ? 4 + rng() % 12 : rng() % 4);
    input += static_cast<char>(rng());
    for (uint64_t changes = 1 + rng() % 3; changes > 0; --changes) {
      const uint64_t word = rng();
      input.append(reinterpret_cast<const char*>(&word), sizeof word);
    }
    check_input(input);
  }
}

}  // namespace
}  // namespace thermocline
#endif
