#include "ssd/format.h"

#include <algorithm>
#include <cstdio>
#include <random>

namespace thermocline::ssd {
namespace {

const char* kind_name(PageKind kind) {
  switch (kind) {
    case PageKind::kHeader:
      return "header";
    case PageKind::kRows:
      return "rows";
    case PageKind::kKeys:
      return "keys";
    case PageKind::kTombstones:
      return "tombstones";
    case PageKind::kFences:
      return "fences";
    case PageKind::kFilter:
      return "filter";
  }
  return "unknown";
}

std::string checksum_damage(const uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number) {
  if (page_header(page).checksum == xxh64(page + 8, g.page_bytes - 8, page_seed(nonce, number))) return "";
  bool zero = true;
  for (uint32_t i = 0; i < g.page_bytes && zero; ++i) zero = page[i] == 0;
  return zero ? "checksum mismatch (the page is all zeros: a lost write)"
              : "checksum mismatch (damaged, stale or misplaced page)";
}

std::string count_damage(const uint8_t* page, const Geometry& g) {
  const auto& header = page_header(page);
  uint32_t most = header.kind == PageKind::kRows                                         ? g.rows_per_page()
                  : header.kind == PageKind::kFences                                     ? g.fences_per_page()
                  : header.kind == PageKind::kHeader || header.kind == PageKind::kFilter ? 0
                                                                                         : g.keys_per_page();
  if (header.count <= most) return "";
  return "count is " + std::to_string(header.count) + ", the maximum is " + std::to_string(most);
}

}  // namespace

std::string repair_command(const std::string& store_path) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+=:,@%";  // needs no quotes in a shell
  if (store_path.find_first_not_of(kPlain) == std::string::npos) return "thermocline repair " + store_path;
  std::string quoted;
  for (char c : store_path) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return "thermocline repair '" + quoted + "'";
}

std::string without_repair_hint(const std::string& message) { return message.substr(0, message.find(kRepairHint)); }

void throw_corrupt(const std::string& path, const std::string& cause) {
  const size_t slash = path.rfind('/');
  throw CorruptionError(path + ": " + cause + kRepairHint +
                        repair_command(slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1))));
}

void throw_corrupt_page(const std::string& path, uint64_t page, const std::string& cause) {
  throw_corrupt(path, "page " + std::to_string(page) + ": " + cause);
}

uint64_t random_nonce() {
  std::random_device device;
  return (uint64_t{device()} << 32) ^ device();
}

std::string page_damage(const uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number, PageKind kind) {
  std::string cause = checksum_damage(page, g, nonce, number);
  if (!cause.empty()) return cause;
  if (page_header(page).kind != kind)
    return std::string("kind is ") + kind_name(page_header(page).kind) + ", expected " + kind_name(kind);
  return count_damage(page, g);
}

void verify_page(const uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number, PageKind kind,
                 const std::string& path) {
  const std::string cause = page_damage(page, g, nonce, number, kind);
  if (!cause.empty()) throw_corrupt_page(path, number, cause);
}

PageKind verify_data_page(const uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number,
                          const std::string& path) {
  std::string cause = checksum_damage(page, g, nonce, number);
  const PageKind kind = page_header(page).kind;
  if (cause.empty() && kind != PageKind::kRows && kind != PageKind::kTombstones)
    cause = std::string("kind is ") + kind_name(kind) + ", expected rows or tombstones";
  if (cause.empty()) cause = count_damage(page, g);
  if (!cause.empty()) throw_corrupt_page(path, number, cause);
  return kind;
}

void write_file_header(uint8_t* page, const Geometry& g, FileKind kind, const uint64_t store_id[2], uint64_t number,
                       uint64_t nonce) {
  std::memset(page, 0, g.page_bytes);
  FileHeader header{};
  std::memcpy(header.magic, kFileMagic, 8);
  header.version = kFormatVersion;
  header.kind = static_cast<uint32_t>(kind);
  header.store_id[0] = store_id[0];
  header.store_id[1] = store_id[1];
  header.number = number;
  header.nonce = nonce;
  header.row_bytes = g.row_bytes;
  header.page_bytes = g.page_bytes;
  std::memcpy(page + sizeof(PageHeader), &header, sizeof header);
  seal_page(page, g, nonce, 0, PageKind::kHeader, 0);
}

std::string file_header_damage(const uint8_t* page, const Geometry& g, FileKind kind, const uint64_t store_id[2],
                               uint64_t number, uint64_t nonce) {
  std::string cause = page_damage(page, g, nonce, 0, PageKind::kHeader);
  if (!cause.empty()) return cause;
  FileHeader header;
  std::memcpy(&header, page + sizeof(PageHeader), sizeof header);
  if (std::memcmp(header.magic, kFileMagic, 8) != 0 || header.version != kFormatVersion ||
      header.kind != static_cast<uint32_t>(kind) || header.number != number || header.nonce != nonce ||
      header.store_id[0] != store_id[0] || header.store_id[1] != store_id[1] || header.row_bytes != g.row_bytes ||
      header.page_bytes != g.page_bytes)
    return "the file header belongs to another file or store";
  return "";
}

std::string file_name(FileKind kind, uint64_t number) {
  char text[40];
  std::snprintf(text, sizeof text, "%s-%06llu.tc", kind == FileKind::kSegment ? "log" : "base",
                static_cast<unsigned long long>(number));
  return text;
}

bool parse_number(std::string_view digits, uint64_t* number) {
  if (digits.empty() || digits.size() > 19) return false;  // 19 digits do not overflow
  uint64_t value = 0;
  for (char c : digits) {
    if (c < '0' || c > '9') return false;
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  *number = value;
  return value <= kMaxNumber;
}

bool parse_file_name(const std::string& name, FileKind* kind, uint64_t* number) {
  constexpr std::string_view kEnd = ".tc";
  if (!name.ends_with(kEnd)) return false;
  *kind = name.starts_with("log-") ? FileKind::kSegment : FileKind::kBase;
  const size_t start = *kind == FileKind::kSegment ? 4 : 5;
  if (*kind == FileKind::kBase && !name.starts_with("base-")) return false;
  return name.size() > start + kEnd.size() &&
         parse_number(std::string_view(name).substr(start, name.size() - start - kEnd.size()), number) && *number > 0;
}

}  // namespace thermocline::ssd
