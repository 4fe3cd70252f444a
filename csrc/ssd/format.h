// Constants and structures of the files, described in docs/formats.md. Persisted numbers never change. All integers are
// little endian.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "util/error.h"
#include "util/fs.h"
#include "util/hash.h"

namespace thermocline::ssd {

inline constexpr uint32_t kFormatVersion = 1;
inline constexpr char kStoreMagic[8] = {'T', 'H', 'M', 'C', 'S', 'T', 'O', 'R'};
inline constexpr char kFileMagic[8] = {'T', 'H', 'M', 'C', 'F', 'I', 'L', 'E'};
inline constexpr char kManifestMagic[8] = {'T', 'H', 'M', 'C', 'M', 'A', 'N', 'I'};

// Bounds of the numbers in files. A number that is read from a file is compared with its bound before it is used, so
// that no sum or product of sizes overflows 64 bits.
inline constexpr uint32_t kMaxRowBytes = 1u << 20;
inline constexpr uint64_t kMaxFilePages = (uint64_t{1} << 32) - 1;
inline constexpr uint64_t kMaxLogPages = (uint64_t{1} << 31) - 1;  // of all live segments: log pages have wrapping u32
inline constexpr uint64_t kMaxExtentRows = 1u << 20;
inline constexpr uint64_t kMaxNumber = ~uint64_t{0} >> 1;  // of epochs, files and extents
inline constexpr size_t kMaxRecordBytes = 1u << 30;        // of STORE or a manifest

enum class PageKind : uint8_t {
  kHeader = 1,      // first page of every data file
  kRows = 2,        // keys, then rows, in hash order
  kKeys = 3,        // key column of an extent of rows
  kTombstones = 4,  // key column of an extent of deletions
  kFences = 5,      // first hash of each row page of a base file
  kFilter = 6,      // bytes of a base file's filter
};

struct PageHeader {
  uint64_t checksum;  // xxh64 of the page after this field, seeded with page_seed(file, page number)
  uint16_t count;     // entries on the page
  PageKind kind;
  uint8_t reserved8;
  uint32_t reserved32;
};
static_assert(sizeof(PageHeader) == 16);

// Follows the PageHeader on page 0 of a data file.
struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t kind;  // FileKind
  uint64_t store_id[2];
  uint64_t number;
  uint64_t nonce;
  uint32_t row_bytes;
  uint32_t page_bytes;
};
static_assert(sizeof(FileHeader) == 56);

enum class FileKind : uint32_t { kSegment = 1, kBase = 2 };

// Follows the PageHeader on every key page.
struct ExtentInfo {
  uint64_t seq;        // of the extent; newer extents have larger numbers
  uint64_t first_row;  // index in the extent of the page's first key
  uint64_t rows;       // of the whole extent
};
static_assert(sizeof(ExtentInfo) == 24);

// Row and page size, equal for all files of a store.
struct Geometry {
  uint32_t row_bytes = 0;
  uint32_t page_bytes = 0;

  uint32_t entry_bytes() const { return row_bytes + 8; }
  uint32_t rows_per_page() const { return (page_bytes - sizeof(PageHeader)) / entry_bytes(); }
  uint32_t keys_per_page() const { return most((page_bytes - sizeof(PageHeader) - sizeof(ExtentInfo)) / 8); }
  uint32_t fences_per_page() const { return most((page_bytes - sizeof(PageHeader)) / 8); }
  static uint32_t most(size_t entries) {
    return static_cast<uint32_t>(entries < 65535 ? entries : 65535);
  }  // count: u16
  uint64_t row_pages(uint64_t rows) const { return (rows + rows_per_page() - 1) / rows_per_page(); }
  uint64_t key_pages(uint64_t rows) const { return (rows + keys_per_page() - 1) / keys_per_page(); }
  uint64_t fence_pages(uint64_t pages) const { return (pages + fences_per_page() - 1) / fences_per_page(); }
  uint32_t filter_bytes_per_page() const { return page_bytes - sizeof(PageHeader); }
  uint64_t filter_pages(uint64_t bytes) const {
    return (bytes + filter_bytes_per_page() - 1) / filter_bytes_per_page();
  }

  // The smallest page, in sectors, with at most 1/8 unused (or the best of the first 16 sizes).
  static Geometry of(uint32_t row_bytes) {
    if (row_bytes == 0 || row_bytes > kMaxRowBytes)
      throw FormatError("row_bytes is " + std::to_string(row_bytes) + "; it must be 1 to " +
                        std::to_string(kMaxRowBytes));
    uint32_t need = row_bytes + 8 + sizeof(PageHeader);
    uint32_t first = (need + kSector - 1) / kSector, best = first;
    double best_use = 0;
    for (uint32_t sectors = first; sectors < first + 16; ++sectors) {
      Geometry g{row_bytes, static_cast<uint32_t>(sectors * kSector)};
      double use = double(g.rows_per_page()) * g.entry_bytes() / g.page_bytes;
      if (use > best_use) best_use = use, best = sectors;
      if (use >= 0.875) break;
    }
    return {row_bytes, static_cast<uint32_t>(best * kSector)};
  }
  // The geometry of a file: its page size must be the one of its row size.
  bool valid() const { return row_bytes > 0 && row_bytes <= kMaxRowBytes && of(row_bytes).page_bytes == page_bytes; }
};

// A file's nonce is random: pages of an older file at the same location of the device do not pass the check.
uint64_t random_nonce();
inline uint64_t page_seed(uint64_t nonce, uint64_t page) { return nonce ^ mix64(page + 1); }

inline void seal_page(uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number, PageKind kind,
                      uint32_t count) {
  auto* header = reinterpret_cast<PageHeader*>(page);
  header->count = static_cast<uint16_t>(count);
  header->kind = kind;
  header->reserved8 = 0;
  header->reserved32 = 0;
  header->checksum = xxh64(page + 8, g.page_bytes - 8, page_seed(nonce, number));
}

inline constexpr char kRepairHint[] = ". Close the store and run: ";  // before the command in error messages
// Throws CorruptionError: file, cause and the command that repairs the store. `path` is a file of the store.
[[noreturn]] void throw_corrupt(const std::string& path, const std::string& cause);
[[noreturn]] void throw_corrupt_page(const std::string& path, uint64_t page, const std::string& cause);
std::string repair_command(const std::string& store_path);  // "thermocline repair /path"
std::string without_repair_hint(const std::string& message);

// Returns why the page is damaged (checksum, kind or count), or "" if it is valid.
std::string page_damage(const uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number, PageKind kind);
// Throws CorruptionError unless checksum, kind and count of the page are valid.
void verify_page(const uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number, PageKind kind,
                 const std::string& path);
// Verifies a row page or a tombstone page and returns its kind.
PageKind verify_data_page(const uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number,
                          const std::string& path);

inline const PageHeader& page_header(const uint8_t* page) { return *reinterpret_cast<const PageHeader*>(page); }
inline uint32_t keys_offset(PageKind kind) {
  return kind == PageKind::kRows ? sizeof(PageHeader) : sizeof(PageHeader) + sizeof(ExtentInfo);
}
inline uint64_t page_key(const uint8_t* page, PageKind kind, uint32_t i) {
  uint64_t key;
  std::memcpy(&key, page + keys_offset(kind) + 8ull * i, 8);
  return key;
}
// Row i of a row page. The rows follow the keys.
inline const uint8_t* page_row(const uint8_t* page, const Geometry& g, uint32_t i) {
  return page + sizeof(PageHeader) + 8ull * page_header(page).count + uint64_t{g.row_bytes} * i;
}

// Page 0 of a data file.
void write_file_header(uint8_t* page, const Geometry& g, FileKind kind, const uint64_t store_id[2], uint64_t number,
                       uint64_t nonce);
// Returns why the header is damaged, or "".
std::string file_header_damage(const uint8_t* page, const Geometry& g, FileKind kind, const uint64_t store_id[2],
                               uint64_t number, uint64_t nonce);

std::string file_name(FileKind kind, uint64_t number);  // "log-000007.tc", "base-000012.tc"
bool parse_file_name(const std::string& name, FileKind* kind, uint64_t* number);
// Parses a number of at most kMaxNumber that is all of `digits`.
bool parse_number(std::string_view digits, uint64_t* number);

}  // namespace thermocline::ssd
