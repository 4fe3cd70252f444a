// Damaged files: no wrong row is returned, the error has the file, and rows of other pages stay readable.
#include <algorithm>
#include <cstdio>
#include <functional>

#include "ssd/format.h"
#include "ssd/manifest.h"
#include "ssd/store.h"
#include "testing/mem_fs.h"
#include "testing/store_driver.h"
#include "testing/test.h"
#include "util/error.h"

namespace thermocline::testing {
namespace {

constexpr const char* kPath = "/d/store";

// A closed store with base files, log and retained epochs. Tests damage it in place and repair it.
struct Image {
  std::shared_ptr<MemFs> fs = std::make_shared<MemFs>();
  DriverOptions options;
  Snapshot want;
  std::vector<std::string> data, manifests;  // paths; the newest manifest is the last
  std::vector<std::string> needed;           // those of `data` that the newest commit needs
  std::string identity;
  uint32_t rows_per_page;
};

Image make_image(uint64_t seed) {
  Image image;
  image.fs->make_dir("/d");
  image.options.seed = seed;
  image.options.store.write_buffer = seed % 2 ? 16u << 10 : 0;
  StoreDriver driver(image.fs, kPath, image.options);
  driver.open();
  for (int i = 0; i < 120; ++i) driver.step();
  driver.put(300);
  driver.store().merge_all();
  driver.put(300);
  driver.erase(40);
  driver.put(100);
  driver.commit();
  CHECK(driver.store().stats().rows_in_base > 0 && driver.store().stats().rows_in_log > 0);
  driver.close();
  image.want = driver.live();
  const auto geometry = ssd::Geometry::of(uint32_t(image.options.row_bytes));
  image.rows_per_page = geometry.rows_per_page();
  for (const auto& [path, inode] : image.fs->files()) {
    if (path.find("MANIFEST") != std::string::npos) image.manifests.push_back(path);
    else if (path.find("/STORE") != std::string::npos) image.identity = path;
    else if (path.find("/LOCK") == std::string::npos) image.data.push_back(path);
  }
  const auto m = ssd::Manifest::decode(image.fs->bytes(image.manifests.back()), "", geometry);
  for (const auto& p : m.partitions) {
    if (p.file) image.needed.push_back(kPath + ("/" + ssd::file_name(ssd::FileKind::kBase, p.file)));
  }
  for (const auto& s : m.segments)
    image.needed.push_back(kPath + ("/" + ssd::file_name(ssd::FileKind::kSegment, s.file)));
  CHECK(!image.manifests.empty() && image.needed.size() >= 4 && !image.identity.empty());
  return image;
}

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// The error of a damaged store must be CorruptionError with the path.
void check_named(const Error& e, const std::string& path) {
  const bool kind = dynamic_cast<const CorruptionError*>(&e) || dynamic_cast<const FormatError*>(&e);
  if (!kind || std::string(e.what()).find(base_name(path)) == std::string::npos) {
    throw Failure("damage to " + path + " is not reported by the error: " + e.what());
  }
}

std::unique_ptr<SsdStore> open_read_only(const Image& image) {
  StoreOptions o = image.options.store;
  o.read_only = true;
  return SsdStore::open(image.fs, kPath, o);
}

constexpr int kRefused = -1;

// Reads every key. Returns the number of unreadable keys, or kRefused if the store does not open.
int probe(const Image& image, const std::string& damaged, const std::string& context,
          std::unique_ptr<SsdStore> store = nullptr) {
  const size_t bytes = image.options.row_bytes;
  std::vector<uint8_t> rows(64 * bytes), expected(bytes);
  uint8_t found[64];
  uint64_t keys[64];
  auto check = [&](uint32_t first, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) keys[i] = test_key(first + i);
    try {
      store->get(keys, n, found, {rows.data(), bytes});
    } catch (const Error& e) {
      check_named(e, damaged);
      return false;
    }
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t version = image.want.version[first + i];
      make_row(keys[i], version, expected.data(), bytes);
      const bool right =
          version == 0 ? !found[i] : found[i] && std::equal(expected.begin(), expected.end(), &rows[i * bytes]);
      if (!right) throw Failure(context + ": WRONG ROW of key " + std::to_string(keys[i]));
    }
    return true;
  };
  if (!store) {
    try {
      store = open_read_only(image);
    } catch (const Error& e) {
      check_named(e, damaged);
      return kRefused;
    }
  }
  if (store->note() != image.want.note) throw Failure(context + ": opened another commit: LOST COMMIT");
  int bad = 0;
  for (uint32_t first = 0; first < image.options.keys; first += 64) {
    const uint32_t n = std::min(64u, image.options.keys - first);
    if (check(first, n)) continue;
    for (uint32_t i = 0; i < n; ++i) bad += !check(first + i, 1);
  }
  return bad;
}

bool is_row_page(const std::string& bytes, size_t offset) {
  const size_t page = offset / kSector * kSector;
  return page + sizeof(ssd::PageHeader) <= bytes.size() &&
         ssd::page_header(reinterpret_cast<const uint8_t*>(bytes.data()) + page).kind == ssd::PageKind::kRows;
}

struct Tally {
  uint64_t cases = 0, harmless = 0, refused = 0, rows = 0;
  void add(int bad) {
    ++cases;
    if (bad == kRefused) ++refused;
    else if (bad == 0) ++harmless;
    else ++rows;
  }
  void print() const {
    std::printf("[%llu cases: %llu refused at open, %llu in get, %llu in unused bytes] ", (unsigned long long)cases,
                (unsigned long long)refused, (unsigned long long)rows, (unsigned long long)harmless);
  }
};

// Damages one page of a random file, alternately before and after the store is opened.
void damage_pages(uint64_t cases, const std::function<void(std::string&, size_t, std::mt19937_64&)>& damage) {
  Tally tally;
  std::mt19937_64 rng(99);
  Image image;
  for (uint64_t i = 0; i < cases; ++i) {
    if (i % 1000 == 0) image = make_image(100 + i / 1000);
    const auto& files = rng() % 16 == 0 ? image.data : image.needed;
    const std::string& path = files[rng() % files.size()];
    std::string& bytes = image.fs->bytes(path);
    const size_t page = rng() % (bytes.size() / kSector) * kSector;
    const bool rows = is_row_page(bytes, page);
    const std::string saved = bytes.substr(page, kSector);
    auto store = i % 2 ? open_read_only(image) : nullptr;
    damage(bytes, page, rng);
    const std::string context =
        "case " + std::to_string(i) + ", page " + std::to_string(page / kSector) + " of " + path;
    const int bad = probe(image, path, context, std::move(store));
    tally.add(bad);
    if (rows) CHECK(bad >= 0 && bad <= 2 * int(image.rows_per_page));  // twice: keys with equal tags
    image.fs->bytes(path).replace(page, kSector, saved);
  }
  CHECK_EQ(probe(image, "", "repaired"), 0);
  tally.print();
}

TEST(FaultsCorrupt, BitFlipsInDataFiles) {
  damage_pages(scaled(5000, 100000), [](std::string& bytes, size_t page, std::mt19937_64& rng) {
    const size_t bit = rng() % (rng() % 4 == 0 ? 64 * 8 : kSector * 8);  // headers more often than other bytes
    bytes[page + bit / 8] ^= char(1 << (bit % 8));
  });
}

// Some sectors of a page were not written: they have zeros, random bytes, or bytes of another page.
TEST(FaultsCorrupt, TornPages) {
  damage_pages(scaled(1000, 50000), [](std::string& bytes, size_t page, std::mt19937_64& rng) {
    const size_t sectors = kSector / 512, kept = rng() % sectors, other = rng() % (bytes.size() / kSector) * kSector;
    const int mode = int(rng() % 4);
    for (size_t s = 0; s < sectors; ++s) {
      if (mode == 3 ? rng() % 2 : s < kept) continue;
      for (size_t k = s * 512; k < (s + 1) * 512; ++k) {
        bytes[page + k] = mode == 0 ? '\0' : mode == 1 ? char(rng()) : bytes[other + k];
      }
    }
  });
}

TEST(StoreCorrupt, SomeBitFlipsAndTornPages) {
  damage_pages(300, [](std::string& bytes, size_t page, std::mt19937_64& rng) {
    const size_t bit = rng() % (kSector * 8);
    bytes[page + bit / 8] ^= char(1 << (bit % 8));
  });
  damage_pages(100, [](std::string& bytes, size_t page, std::mt19937_64&) {
    std::fill_n(bytes.begin() + long(page) + 512, kSector - 512, '\0');
  });
}

// Valid pages at the wrong location: another page of the file, or a page of another file.
TEST(FaultsCorrupt, MisdirectedPages) {
  Tally tally;
  const Image image = make_image(5);
  std::mt19937_64 rng(5);
  for (uint64_t i = 0; i < scaled(500, 20000); ++i) {
    const std::string& path = image.needed[rng() % image.needed.size()];
    const std::string& from = image.data[rng() % image.data.size()];
    std::string& bytes = image.fs->bytes(path);
    const size_t page = rng() % (bytes.size() / kSector) * kSector;
    const std::string saved = bytes.substr(page, kSector);
    const std::string& source = image.fs->bytes(from);
    const size_t other = rng() % 2 && page < source.size() ? page : rng() % (source.size() / kSector) * kSector;
    bytes.replace(page, kSector, std::string(source, other, kSector));
    tally.add(probe(image, path, "page " + std::to_string(page / kSector) + " of " + path + " from " + from));
    bytes.replace(page, kSector, saved);
  }
  tally.print();
}

// A store with a damaged newest manifest or identity must not open: an older commit would lose the newest.
void must_refuse(const Image& image, const std::string& path, const std::string& context) {
  if (probe(image, path, context) != kRefused) throw Failure(context + ": opened although " + path + " is damaged");
  StoreOptions o = image.options.store;  // a writer must not delete anything
  try {
    SsdStore::open(image.fs, kPath, o);
    throw Failure(context + ": opened for writing although " + path + " is damaged");
  } catch (const Error& e) {
    check_named(e, path);
  }
}

TEST(FaultsCorrupt, EveryBitOfManifestAndIdentity) {
  const Image image = make_image(7);
  uint64_t cases = 0;
  for (const std::string& path : {image.manifests.back(), image.identity}) {
    const size_t size = image.fs->bytes(path).size();
    for (size_t bit = 0; bit < size * 8; ++bit, ++cases) {
      image.fs->bytes(path)[bit / 8] ^= char(1 << (bit % 8));
      must_refuse(image, path, "bit " + std::to_string(bit));
      image.fs->bytes(path)[bit / 8] ^= char(1 << (bit % 8));
    }
  }
  CHECK_EQ(probe(image, "", "repaired"), 0);
  std::printf("[%llu bits] ", (unsigned long long)cases);
}

TEST(FaultsCorrupt, ManifestAndIdentityTruncatedAtEveryByte) {
  const Image image = make_image(8);
  for (const std::string& path : {image.manifests.back(), image.identity}) {
    const std::string saved = image.fs->bytes(path);
    for (size_t n = 0; n < saved.size(); ++n) {
      image.fs->bytes(path).resize(n);
      must_refuse(image, path, "truncated at " + std::to_string(n));
      image.fs->bytes(path) = saved;
    }
    image.fs->bytes(path) += '\0';
    must_refuse(image, path, "one byte too long");
    image.fs->bytes(path) = saved;
  }
  CHECK_EQ(probe(image, "", "repaired"), 0);
}

// A damaged manifest of an older epoch does not affect the newest.
TEST(StoreCorrupt, DamagedOldManifestDoesNotAffectTheNewest) {
  const Image image = make_image(9);
  CHECK(image.manifests.size() >= 2);
  image.fs->bytes(image.manifests.front())[50] ^= 1;
  CHECK_EQ(probe(image, image.manifests.front(), "old manifest"), 0);
}

TEST(FaultsCorrupt, DataFilesTruncatedAtEverySectorAndHeadersAtEveryByte) {
  Tally tally;
  const Image image = make_image(10);
  for (const std::string& path : image.needed) {
    const std::string saved = image.fs->bytes(path);
    auto cut = [&](size_t n) {
      image.fs->bytes(path).resize(n);
      tally.add(probe(image, path, path + " cut at " + std::to_string(n)));
      image.fs->bytes(path) = saved;
    };
    for (size_t n = 0; n < saved.size(); n += 512) cut(n);
  }
  for (const std::string& path : {image.needed.front(), image.needed.back()}) {  // a base, a segment
    const std::string saved = image.fs->bytes(path);
    for (size_t n = 1; n <= kSector; ++n) {
      image.fs->bytes(path).resize(n);
      tally.add(probe(image, path, path + " cut at " + std::to_string(n)));
      image.fs->bytes(path) = saved;
    }
  }
  tally.print();
}

TEST(FaultsCorrupt, EveryByteOfAHeaderPage) {
  Tally tally;
  const Image image = make_image(11);
  for (const std::string& path : {image.needed.front(), image.needed.back()}) {
    for (size_t i = 0; i < kSector; ++i) {
      image.fs->bytes(path)[i] ^= char(1 << (i % 8));
      tally.add(probe(image, path, "byte " + std::to_string(i) + " of " + path));
      image.fs->bytes(path)[i] ^= char(1 << (i % 8));
    }
  }
  tally.print();
}

TEST(StoreCorrupt, MissingFilesAreReported) {
  const Image image = make_image(12);
  Tally tally;
  for (const std::string& path : image.needed) {
    auto inode = image.fs->files().at(path);
    image.fs->set(path, nullptr);
    tally.add(probe(image, path, path + " is missing"));
    image.fs->set(path, inode);
  }
  CHECK_EQ(tally.refused, tally.cases);
}

// Merging a damaged store may fail, but never loses an undamaged row or returns a wrong one.
TEST(FaultsCorrupt, MergingADamagedStoreReturnsNoWrongRow) {
  std::mt19937_64 rng(13);
  for (uint64_t i = 0; i < scaled(100, 2000); ++i) {
    Image image = make_image(200 + i % 10);
    const std::string& path = image.needed[rng() % image.needed.size()];
    std::string& bytes = image.fs->bytes(path);
    const size_t bit = rng() % (bytes.size() * 8);
    bytes[bit / 8] ^= char(1 << (bit % 8));
    const std::string context = "bit " + std::to_string(bit) + " of " + path;
    try {
      auto store = SsdStore::open(image.fs, kPath, image.options.store);
      store->merge_all();
    } catch (const Error& e) {
      check_named(e, path);
    }
    try {
      auto store = SsdStore::open(image.fs, kPath, image.options.store);
      store->commit(image.want.note);
    } catch (const Error& e) {
      check_named(e, path);
    }
    probe(image, path, context);
  }
}

}  // namespace
}  // namespace thermocline::testing
