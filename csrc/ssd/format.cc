#include "ssd/format.h"

#include <cstdio>

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

[[noreturn]] void corrupt(const std::string& path, uint64_t page, const std::string& cause) {
  throw CorruptionError(path + ": page " + std::to_string(page) + ": " + cause +
                        ". Rows on other pages stay readable; restore this file from a checkpoint");
}

void verify_checksum(const uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number, const std::string& path) {
  if (page_header(page).checksum == xxh64(page + 8, g.page_bytes - 8, page_seed(nonce, number))) return;
  bool zero = true;
  for (uint32_t i = 0; i < g.page_bytes && zero; ++i) zero = page[i] == 0;
  corrupt(path, number,
          zero ? "checksum mismatch (the page is all zeros: a lost write)"
               : "checksum mismatch (damaged, stale or misplaced page)");
}

void verify_count(const uint8_t* page, const Geometry& g, uint64_t number, const std::string& path) {
  const auto& header = page_header(page);
  uint32_t most = header.kind == PageKind::kRows                                         ? g.rows_per_page()
                  : header.kind == PageKind::kFences                                     ? g.fences_per_page()
                  : header.kind == PageKind::kHeader || header.kind == PageKind::kFilter ? 0
                                                                                         : g.keys_per_page();
  if (header.count > most)
    corrupt(path, number, "count is " + std::to_string(header.count) + ", the maximum is " + std::to_string(most));
}

}  // namespace

void verify_page(const uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number, PageKind kind,
                 const std::string& path) {
  verify_checksum(page, g, nonce, number, path);
  if (page_header(page).kind != kind)
    corrupt(path, number,
            std::string("kind is ") + kind_name(page_header(page).kind) + ", expected " + kind_name(kind));
  verify_count(page, g, number, path);
}

PageKind verify_data_page(const uint8_t* page, const Geometry& g, uint64_t nonce, uint64_t number,
                          const std::string& path) {
  verify_checksum(page, g, nonce, number, path);
  PageKind kind = page_header(page).kind;
  if (kind != PageKind::kRows && kind != PageKind::kTombstones)
    corrupt(path, number, std::string("kind is ") + kind_name(kind) + ", expected rows or tombstones");
  verify_count(page, g, number, path);
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

void verify_file_header(const uint8_t* page, const Geometry& g, FileKind kind, const uint64_t store_id[2],
                        uint64_t number, uint64_t nonce, const std::string& path) {
  verify_page(page, g, nonce, 0, PageKind::kHeader, path);
  FileHeader header;
  std::memcpy(&header, page + sizeof(PageHeader), sizeof header);
  if (std::memcmp(header.magic, kFileMagic, 8) != 0 || header.kind != static_cast<uint32_t>(kind) ||
      header.number != number || header.nonce != nonce || header.store_id[0] != store_id[0] ||
      header.store_id[1] != store_id[1] || header.row_bytes != g.row_bytes || header.page_bytes != g.page_bytes)
    corrupt(path, 0, "the file header belongs to another file or store");
}

std::string file_name(FileKind kind, uint64_t number) {
  char text[40];
  std::snprintf(text, sizeof text, "%s-%06llu.tc", kind == FileKind::kSegment ? "log" : "base",
                static_cast<unsigned long long>(number));
  return text;
}

}  // namespace thermocline::ssd
