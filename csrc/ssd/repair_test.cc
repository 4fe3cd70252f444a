// repair_store() against an oracle: damage of every kind of page and file. Rows outside the reported losses are
// intact, no wrong or stale row is ever returned, and a crash during the repair leaves a state that it can continue.
#include "ssd/repair.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>

#include "ssd/format.h"
#include "ssd/manifest.h"
#include "ssd/store.h"
#include "testing/crash.h"
#include "testing/fault_fs.h"
#include "testing/mem_fs.h"
#include "testing/record_fs.h"
#include "testing/store_driver.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline::testing {
namespace {

constexpr const char* kPath = "/d/store";
constexpr RepairOptions kRepair{.mem_budget = 8u << 20}, kDryRun{.dry_run = true, .mem_budget = 8u << 20};

// A closed store with base files, log, deletions and several retained epochs.
struct Image {
  std::shared_ptr<MemFs> fs = std::make_shared<MemFs>();
  DriverOptions options;
  std::map<std::string, Snapshot> by_note;
  std::vector<std::string> data, manifests;  // paths; the newest manifest is the last
  ssd::Geometry geometry;
};

Image make_image(uint64_t seed) {
  Image image;
  image.fs->make_dir("/d");
  image.options.seed = seed;
  image.options.keys = 2000;
  image.options.store.write_buffer = seed % 2 ? 16u << 10 : 0;
  image.options.store.filter_bits = seed % 3 ? 10 : 0;
  image.options.store.partition_bytes = 32u << 10;
  StoreDriver driver(image.fs, kPath, image.options);
  driver.open();
  for (int i = 0; i < 60; ++i) driver.step();
  driver.put(300);
  driver.store().merge_all();
  driver.put(300);
  driver.erase(60);
  driver.commit();
  driver.put(200);
  driver.erase(30);
  driver.put(100);
  driver.commit();
  driver.close();
  for (auto& attempt : driver.attempts()) image.by_note[attempt.state.note] = attempt.state;
  image.geometry = ssd::Geometry::of(uint32_t(image.options.row_bytes));
  for (const auto& [path, inode] : image.fs->files()) {
    if (path.find(std::string(kPath) + "/") != 0) continue;  // of link_checkpoint()
    if (path.find("MANIFEST") != std::string::npos) image.manifests.push_back(path);
    else if (path.ends_with(".tc")) image.data.push_back(path);
  }
  CHECK(image.manifests.size() >= 2 && image.data.size() >= 6);
  return image;
}

std::map<std::string, std::string> contents(const MemFs& fs) {
  std::map<std::string, std::string> out;
  for (const auto& [path, inode] : fs.files()) out[path] = *inode->bytes;
  return out;
}

std::unique_ptr<SsdStore> open_epoch(const Image& image, std::shared_ptr<FileSystem> fs, uint64_t epoch) {
  StoreOptions o = image.options.store;
  o.read_only = true;
  o.epoch = epoch;
  return SsdStore::open(std::move(fs), kPath, o);
}

// Every row that is returned is the one of the commit; a row is absent only within a loss of this epoch.
uint64_t check_rows(const Image& image, SsdStore& store, const RepairReport& report, const std::string& context) {
  const auto snapshot = image.by_note.find(store.note());
  if (snapshot == image.by_note.end()) throw Failure(context + ": opened an unknown commit");
  const Snapshot& want = snapshot->second;
  const size_t bytes = image.options.row_bytes;
  std::vector<uint64_t> keys(want.version.size());
  for (uint32_t i = 0; i < keys.size(); ++i) keys[i] = test_key(i);
  std::vector<uint8_t> found(keys.size()), rows(keys.size() * bytes), expected(bytes);
  store.get(keys.data(), keys.size(), found.data(), {rows.data(), bytes});
  uint64_t absent = 0;
  for (uint32_t i = 0; i < keys.size(); ++i) {
    if (found[i]) {
      make_row(keys[i], want.version[i], expected.data(), bytes);
      if (want.version[i] == 0 || !std::equal(expected.begin(), expected.end(), &rows[i * bytes]))
        throw Failure(context + ": WRONG OR STALE ROW of key " + std::to_string(keys[i]));
    } else if (want.version[i] != 0) {
      const uint64_t hash = hash_key(keys[i]);
      ++absent;
      if (std::none_of(report.losses.begin(), report.losses.end(), [&](const RepairReport::Loss& l) {
            return hash >= l.lo && hash <= l.hi &&
                   std::find(l.epochs.begin(), l.epochs.end(), store.epoch()) != l.epochs.end();
          }))
        throw Failure(context + ": LOST ROW of key " + std::to_string(keys[i]) + " outside the reported losses");
    }
  }
  return absent;
}

// Opens every retained epoch of a repaired store. Returns the lost rows of all epochs.
uint64_t check_repaired(const Image& image, std::shared_ptr<MemFs> fs, const RepairReport& report,
                        const std::string& context) {
  uint64_t absent = 0;
  try {
    auto store = open_epoch(image, fs, report.epoch);
    store->check();
    for (uint64_t epoch : store->epochs()) absent += check_rows(image, *open_epoch(image, fs, epoch), report, context);
    const RepairReport again = repair_store(fs, kPath, kDryRun);
    if (!again.rebuilt.empty() || !again.losses.empty() || !again.lost_commits.empty())
      throw Failure(context + ": a second repair finds damage");
  } catch (const Error& e) {
    throw Failure(context + ": the repaired store is damaged: " + e.what());
  }
  return absent;
}

void flip(MemFs& fs, const std::string& path, size_t offset) { fs.bytes(path)[offset] ^= char(1 << (offset % 8)); }

ssd::PageKind kind_at(const Image& image, const std::string& path, size_t page) {
  const std::string& bytes = image.fs->bytes(path);
  return ssd::page_header(reinterpret_cast<const uint8_t*>(bytes.data()) + page * image.geometry.page_bytes).kind;
}

// One damaged page of any kind: header, fences, filter and key columns are rebuilt byte for byte.
void damage_single_pages(uint64_t images, uint64_t stride) {
  std::map<ssd::PageKind, uint64_t> cases;
  uint64_t lost = 0, unused = 0;
  for (uint64_t seed = 0; seed < images; ++seed) {
    if (!in_part(seed)) continue;
    const Image image = make_image(40 + seed);
    const auto before = contents(*image.fs);
    uint64_t number = seed;
    for (const std::string& path : image.data) {
      const size_t page_bytes = image.geometry.page_bytes, pages = before.at(path).size() / page_bytes;
      for (size_t page = 0; page < pages; ++page, ++number) {
        const ssd::PageKind kind = kind_at(image, path, page);
        if (kind == ssd::PageKind::kRows && number % stride != 0) continue;
        auto fs = image.fs->clone();
        flip(*fs, path, page * page_bytes + mix64(number) % page_bytes);
        const std::string context = "page " + std::to_string(page) + " of " + path;
        const RepairReport report = repair_store(fs, kPath, kRepair);
        const uint64_t absent = check_repaired(image, fs, report, context);
        if (report.losses.empty()) {
          CHECK_EQ(absent, 0u);
          if (report.rebuilt.empty()) {  // no commit needs the page
            ++unused;
            continue;
          }
          for (auto& [name, bytes] : before) {
            if (!name.starts_with(kPath + std::string("/"))) continue;  // a hard link in a checkpoint is damaged, too
            // A segment may have had bytes after its last commit.
            if (fs->exists(name) && (name == path ? bytes.starts_with(fs->bytes(name)) : fs->bytes(name) == bytes))
              continue;
            throw Failure(context + ": " + name + " was not rebuilt byte for byte");
          }
        } else {
          CHECK(kind == ssd::PageKind::kRows || kind == ssd::PageKind::kTombstones);
          CHECK_EQ(report.losses.size(), 1u);
          CHECK_EQ(report.losses[0].first_page, page);
        }
        ++cases[kind];
        lost += absent;
      }
    }
  }
  std::printf(
      "[pages: %llu header, %llu rows, %llu keys, %llu tombstones, %llu fences, %llu filter, %llu unused; %llu rows "
      "lost] ",
      (unsigned long long)cases[ssd::PageKind::kHeader], (unsigned long long)cases[ssd::PageKind::kRows],
      (unsigned long long)cases[ssd::PageKind::kKeys], (unsigned long long)cases[ssd::PageKind::kTombstones],
      (unsigned long long)cases[ssd::PageKind::kFences], (unsigned long long)cases[ssd::PageKind::kFilter],
      (unsigned long long)unused, (unsigned long long)lost);
  for (int kind = 1; kind <= 6; ++kind) CHECK(cases[ssd::PageKind(kind)] > 0);
}

TEST(StoreRepair, OneDamagedPageOfEachKind) { damage_single_pages(1, 16); }
TEST(FaultsRepair, EveryPage) { damage_single_pages(scaled(3, 12), 1); }

// Several damages at once: bits, zeroed pages, truncated and missing files, manifests, the identity.
void damage_at_random(uint64_t cases) {
  constexpr uint64_t kPerImage = 25;
  uint64_t done = 0, lost_rows = 0, lost_commits = 0, lossless = 0, refused = 0;
  std::mt19937_64 rng;
  Image image;
  for (uint64_t i = 0; i < cases; ++i) {
    if (!in_part(i / kPerImage)) continue;
    ++done;
    if (i % kPerImage == 0) {
      image = make_image(60 + i / kPerImage);
      rng.seed(17 + i / kPerImage);
    }
    auto fs = image.fs->clone();
    std::string context = "case " + std::to_string(i) + ":";
    for (uint64_t n = 1 + rng() % 3; n > 0; --n) {
      const uint64_t dice = rng() % 20;
      const auto& from = dice < 3 ? image.manifests : image.data;
      const std::string path = dice == 3 ? kPath + std::string("/STORE") : from[rng() % from.size()];
      if (!fs->exists(path) || fs->bytes(path).empty()) continue;
      std::string& bytes = fs->bytes(path);
      const size_t page = rng() % ((bytes.size() + kSector - 1) / kSector) * kSector;
      context += " " + path + " at " + std::to_string(page);
      if (dice < 14) flip(*fs, path, page + rng() % std::min<size_t>(kSector, bytes.size() - page));
      else if (dice < 17) std::fill_n(bytes.begin() + long(page), kSector, '\0');
      else if (dice < 19) bytes.resize(page + rng() % 2 * 512);
      else fs->unlink(path);
    }
    const auto damaged = contents(*fs);
    try {
      const RepairReport planned = repair_store(fs, kPath, kDryRun);
      auto after = contents(*fs);
      after.erase(kPath + std::string("/LOCK"));
      auto unchanged = damaged;
      unchanged.erase(kPath + std::string("/LOCK"));
      CHECK(after == unchanged);
      const RepairReport report = repair_store(fs, kPath, kRepair);
      CHECK_EQ(planned.rebuilt.size(), report.rebuilt.size());
      CHECK_EQ(planned.losses.size(), report.losses.size());
      CHECK_EQ(planned.rows_hidden, report.rows_hidden);
      lost_rows += check_repaired(image, fs, report, context);
      lost_commits += report.lost_commits.size();
      lossless += report.losses.empty() && report.lost_commits.empty();
      for (auto& [name, bytes] : damaged) {  // nothing is deleted
        if (name.find(kPath + std::string("/")) != 0 || name.ends_with("LOCK")) continue;
        const std::string kept = kPath + ("/damaged" + name.substr(std::strlen(kPath)));
        CHECK((fs->exists(name) && fs->bytes(name) == bytes) || (fs->exists(kept) && fs->bytes(kept) == bytes));
      }
      for (auto& name : report.set_aside) {  // a copy of every replaced file
        const std::string kept = kPath + ("/damaged/" + name);
        CHECK(fs->exists(kept) && fs->bytes(kept) == damaged.at(kPath + ("/" + name)));
      }
      StoreOptions o = image.options.store;
      auto store = SsdStore::open(fs, kPath, o);  // usable, and nothing refers to a removed file
      store->merge_all();
      store->commit(store->note());
      store->check();
    } catch (const CorruptionError& e) {
      // Only if all manifests are damaged, or the identity together with all headers.
      if (std::string(e.what()).find("restore a copy of the store") == std::string::npos)
        throw Failure(context + ": " + e.what());
      ++refused;
    } catch (const Error& e) {
      throw Failure(context + ": " + e.what());
    }
  }
  std::printf("[%llu cases: %llu without loss, %llu rows and %llu commits lost, %llu refused] ",
              (unsigned long long)done, (unsigned long long)lossless, (unsigned long long)lost_rows,
              (unsigned long long)lost_commits, (unsigned long long)refused);
  CHECK(lossless > 0 && lost_rows > 0 && refused < done / 20 + 1);
}

TEST(StoreRepair, RandomDamage) { damage_at_random(60); }
TEST(FaultsRepair, RandomDamage) { damage_at_random(scaled(1000, 20000)); }

// A crash at any operation of a repair: every commit is in its old or its repaired state, and a second repair ends.
void crash_repairs(uint64_t runs, size_t states) {
  uint64_t visited = 0;
  for (uint64_t seed = 0; seed < runs; ++seed) {
    if (!in_part(seed)) continue;
    const Image image = make_image(90 + seed);
    std::mt19937_64 rng(seed);
    auto damaged = image.fs->clone();
    for (int n = 0; n < 4; ++n) {
      const std::string& path = image.data[rng() % image.data.size()];
      flip(*damaged, path, rng() % damaged->bytes(path).size());
    }
    flip(*damaged, image.manifests.front(), 60);
    if (seed % 2) flip(*damaged, kPath + std::string("/STORE"), 30);
    auto fs = std::make_shared<RecordFs>(damaged);
    const RepairReport report = repair_store(fs, kPath, kRepair);
    visited += for_each_crash(fs->recording(), seed, states, [&](CrashState& state) {
      const std::string context = "seed " + std::to_string(seed) + ": crash " + state.what;
      try {
        for (uint64_t epoch = 1; epoch <= report.epoch; ++epoch) {
          std::unique_ptr<SsdStore> store;
          try {
            store = open_epoch(image, state.fs, epoch);
            check_rows(image, *store, report, context);
          } catch (const CorruptionError&) {  // the old state
          } catch (const NotFoundError&) {
          } catch (const FormatError&) {  // STORE is missing
          }
        }
        const RepairReport second = repair_store(state.fs, kPath, kRepair);
        CHECK_EQ(second.epoch, report.epoch);
        // Losses of the first repair may be in place already.
        check_repaired(image, state.fs, report, context);
      } catch (const Error& e) {
        throw Failure(context + ": " + e.what());
      }
    });
  }
  std::printf("[%llu crash states] ", (unsigned long long)visited);
}

TEST(StoreRepair, SomeCrashesDuringARepair) { crash_repairs(2, 40); }
TEST(FaultsRepair, CrashesDuringARepair) { crash_repairs(scaled(10, 60), scaled(150, 600)); }

// The error of opening names file, page and command; after the repair the store opens.
TEST(StoreRepair, OpeningNamesFilePageAndCommand) {
  const Image image = make_image(3);
  const auto m = ssd::Manifest::decode(image.fs->bytes(image.manifests.back()), "", image.geometry);
  const std::string path = kPath + ("/" + ssd::file_name(ssd::FileKind::kBase, m.partitions[0].file));
  const size_t fence_page = 1 + m.partitions[0].pages;
  flip(*image.fs, path, fence_page * image.geometry.page_bytes + 100);
  try {
    SsdStore::open(image.fs, kPath, image.options.store);
    throw Failure("opened with a damaged fence page");
  } catch (const CorruptionError& e) {
    const std::string what = e.what();
    CHECK(what.find(path + ": page " + std::to_string(fence_page)) != std::string::npos);
    CHECK(what.find("thermocline repair /d/store") != std::string::npos);
  }
  const RepairReport report = repair_store(image.fs, kPath, kRepair);
  CHECK(report.rebuilt.size() == 1 && report.losses.empty());
  CHECK_EQ(report.rebuilt[0].file, ssd::file_name(ssd::FileKind::kBase, m.partitions[0].file));
  SsdStore::open(image.fs, kPath, image.options.store)->check();
}

// A damaged old manifest stops all deletion: opening warns once, a repair sets it aside, and deletion works again.
TEST(StoreRepair, DamagedOldManifestWarnsAndIsSetAside) {
  const Image image = make_image(5);
  flip(*image.fs, image.manifests.front(), 70);
  const std::string name = image.manifests.front().substr(image.manifests.front().rfind('/') + 1);
  {
    auto store = SsdStore::open(image.fs, kPath, image.options.store);
    const std::vector<std::string> warnings = store->take_warnings();
    CHECK_EQ(warnings.size(), 1u);
    CHECK(warnings[0].find(name) != std::string::npos && warnings[0].find("thermocline repair") != std::string::npos);
    store->commit("more");
    CHECK(store->take_warnings().empty());
  }
  const RepairReport report = repair_store(image.fs, kPath, kRepair);
  CHECK(report.rebuilt.empty() && report.losses.empty());
  CHECK_EQ(report.lost_commits.size(), 1u);
  CHECK(image.fs->exists(kPath + ("/damaged/" + name)) && !image.fs->exists(image.manifests.front()));
  auto store = SsdStore::open(image.fs, kPath, image.options.store);
  CHECK(store->take_warnings().empty());
  const uint64_t files = store->stats().live_files;
  store->merge_all();
  store->commit("merged");
  for (uint64_t epoch : store->epochs())
    if (epoch != store->epoch()) store->release(epoch);
  CHECK(store->stats().live_files < files);
}

// Reads of one file fail: a sector that the device cannot read any more.
class UnreadableFs : public FaultFs {
 public:
  UnreadableFs(std::shared_ptr<FileSystem> inner, std::string bad) : FaultFs(std::move(inner)), bad_(std::move(bad)) {}
  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    auto file = FaultFs::open(path, mode);
    if (path != bad_) return file;
    return std::make_unique<BadFile>(std::move(file));
  }

 private:
  struct BadFile : File {
    explicit BadFile(std::unique_ptr<File> inner) : inner(std::move(inner)) {}
    void pread(void*, size_t, uint64_t) override { throw IoError("read of " + path() + ": bad sector", EIO); }
    void pwrite(const void* buf, size_t bytes, uint64_t offset) override { inner->pwrite(buf, bytes, offset); }
    void datasync() override { inner->datasync(); }
    uint64_t size() override { return inner->size(); }
    const std::string& path() const override { return inner->path(); }
    std::unique_ptr<File> inner;
  };
  const std::string bad_;
};

// An unreadable old manifest is like a damaged one; an unreadable newest one is an error that names the repair.
TEST(StoreRepair, UnreadableManifestsAndIdentity) {
  const Image image = make_image(5);
  const std::string last = image.manifests.back();
  for (const std::string& bad : {image.manifests.front(), last, kPath + std::string("/STORE")}) {
    auto mem = image.fs->clone();
    auto fs = std::make_shared<UnreadableFs>(mem, bad);
    if (bad == image.manifests.front()) {
      auto store = SsdStore::open(fs, kPath, image.options.store);
      const std::vector<std::string> warnings = store->take_warnings();
      CHECK_EQ(warnings.size(), 1u);
      CHECK(warnings[0].find(bad) != std::string::npos);
      CHECK_EQ(store->find_damage().size(), 1u);
      verify(*store, image.by_note.at(store->note()), "opened beside an unreadable manifest");
    } else {
      try {
        SsdStore::open(fs, kPath, image.options.store);
        throw Failure("opened with an unreadable file " + bad);
      } catch (const IoError& e) {
        const std::string text = e.what();
        CHECK(text.find(bad) != std::string::npos && text.find("thermocline repair /d/store") != std::string::npos);
      }
    }
    const RepairReport report = repair_store(fs, kPath, kRepair);
    CHECK_EQ(report.lost_commits.size(), bad == kPath + std::string("/STORE") ? 0u : 1u);
    CHECK_EQ(report.set_aside.empty(), false);
    auto store = SsdStore::open(mem, kPath, image.options.store);
    CHECK(store->take_warnings().empty());
    store->check();
    CHECK_EQ(store->epoch(), report.epoch);
  }
}

// Without any valid manifest the error does not name a command that cannot help.
TEST(StoreRepair, OpeningWithoutAValidManifestDoesNotAdviseARepair) {
  const Image image = make_image(5);
  for (const std::string& path : image.manifests) flip(*image.fs, path, 70);
  try {
    SsdStore::open(image.fs, kPath, image.options.store);
    throw Failure("opened without a valid manifest");
  } catch (const CorruptionError& e) {
    const std::string text = e.what();
    CHECK(text.find("restore a copy of the store") != std::string::npos);
    CHECK(text.find("thermocline repair") == std::string::npos);
  }
  CHECK_THROWS(CorruptionError, repair_store(image.fs, kPath, kDryRun));
}

// A manifest that states more pages of a segment than its file and its extents have: they are not written.
TEST(StoreRepair, PagesThatNoExtentHasAreNotWritten) {
  const Image image = make_image(5);
  const std::string& last = image.manifests.back();
  ssd::Manifest m = ssd::Manifest::decode(image.fs->bytes(last), last, image.geometry);
  m.segments.back().pages = 1u << 15;
  image.fs->set_bytes(last, m.encode());
  CHECK_THROWS(CorruptionError, SsdStore::open(image.fs, kPath, image.options.store));
  const uint64_t before = image.fs->total_bytes();
  const RepairReport report = repair_store(image.fs, kPath, kRepair);
  CHECK(image.fs->total_bytes() < 2 * before);
  CHECK(report.losses.empty() && report.lost_commits.empty());
  CHECK_EQ(report.rebuilt.size(), 1u);
  auto store = SsdStore::open(image.fs, kPath, image.options.store);
  verify(*store, image.by_note.at(store->note()), "repaired");
  store->check();
}

// A lost page of deletions hides all older rows of its range, unless the caller keeps them.
TEST(StoreRepair, OlderVersionsAreKeptOnRequest) {
  auto fs = std::make_shared<MemFs>();
  fs->make_dir("/d");
  DriverOptions options;
  StoreOptions o = options.store;
  o.row_bytes = 24;
  o.create = true;
  constexpr uint32_t kKeys = 500;
  std::vector<uint64_t> keys(kKeys);
  for (uint32_t i = 0; i < kKeys; ++i) keys[i] = test_key(i);
  std::vector<uint8_t> rows(kKeys * 24, 7), found(kKeys);
  {
    auto store = SsdStore::open(fs, kPath, o);
    store->put(keys.data(), kKeys, {rows.data(), 24});
    store->merge_all();
    store->erase(keys.data(), 20);
    store->commit("deleted");
  }
  const size_t page_bytes = ssd::Geometry::of(24).page_bytes;
  for (auto& [path, inode] : fs->files()) {
    std::string& bytes = fs->bytes(path);
    for (size_t at = 0; path.find("/log-") != std::string::npos && at < bytes.size(); at += page_bytes)
      if (bytes[at + 10] == char(ssd::PageKind::kTombstones)) bytes[at + 50] ^= 1;
  }
  o.create = false;
  for (bool keep : {false, true}) {
    auto copy = fs->clone();
    RepairOptions how = kRepair;
    how.keep_older = keep;
    const RepairReport report = repair_store(copy, kPath, how);
    CHECK_EQ(report.losses.size(), 1u);
    CHECK_EQ(report.losses[0].rows, 20u);
    CHECK_EQ(report.rows_hidden, keep ? 0u : kKeys);
    auto store = SsdStore::open(copy, kPath, o);
    store->check();
    CHECK_EQ(store->count(), keep ? kKeys : 0u);
    CHECK(keep || copy->exists(kPath + std::string("/damaged/base-000002.tc")) ||
          copy->exists(kPath + std::string("/damaged/base-000001.tc")));  // the base file with the older rows
  }
}

TEST(StoreRepair, RefusesWhatIsNoStoreOrOpen) {
  const Image image = make_image(7);
  CHECK_THROWS(FormatError, repair_store(image.fs, "/d", kDryRun));
  CHECK_THROWS(NotFoundError, repair_store(image.fs, "/d/none", kDryRun));
  auto store = SsdStore::open(image.fs, kPath, image.options.store);
  CHECK_THROWS(LockError, repair_store(image.fs, kPath, kDryRun));
}

}  // namespace
}  // namespace thermocline::testing
