#include "ssd/manifest.h"

#include <algorithm>
#include <cstdio>
#include <type_traits>

#include "ssd/checked_reader.h"

namespace thermocline::ssd {
namespace {

// Different seeds, so that one kind of record does not pass the check of the other.
constexpr uint64_t kIdentitySeed = 0x53544f5245ULL, kManifestSeed = 0x4d414e4946455354ULL;

template <class T>
void append(std::string& out, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
void append_array(std::string& out, const std::vector<T>& values) {
  append(out, uint64_t{values.size()});
  out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Checks the frame of a record (magic, version, total bytes ... checksum) and returns a reader of its body.
CheckedReader open_frame(std::string_view bytes, const std::string& path, const char magic[8], uint64_t seed) {
  constexpr size_t kHead = 24, kTail = 8;
  CheckedReader frame(bytes, path);
  frame.check(bytes.size() >= kHead + kTail && std::memcmp(bytes.data(), magic, 8) == 0,
              "not a Thermocline file, or its first bytes are damaged");
  frame.take_bytes(8, "the magic");
  const auto version = frame.take<uint32_t>();
  frame.take<uint32_t>();
  const auto total = frame.take<uint64_t>();
  if (total != bytes.size())
    frame.fail("the file has " + std::to_string(bytes.size()) + " bytes, its header states " + std::to_string(total));
  uint64_t stored;
  std::memcpy(&stored, bytes.data() + bytes.size() - kTail, kTail);
  frame.check(stored == xxh64(bytes.data(), bytes.size() - kTail, seed), "checksum mismatch");
  // After the checksum: a damaged version number is corruption, not a newer format.
  if (version != kFormatVersion)
    throw FormatError(path + ": format version " + std::to_string(version) + ", this build reads version " +
                      std::to_string(kFormatVersion) + "; upgrade thermocline to open it");
  return {bytes.substr(kHead, bytes.size() - kHead - kTail), path};
}

std::string close_frame(const std::string& body, const char magic[8], uint64_t seed) {
  std::string out(magic, 8);
  append(out, kFormatVersion);
  append(out, uint32_t{0});
  append(out, uint64_t{24 + body.size() + 8});
  out += body;
  append(out, xxh64(out.data(), out.size(), seed));
  return out;
}

}  // namespace

std::string Identity::encode() const {
  std::string body;
  append(body, store_id[0]);
  append(body, store_id[1]);
  append(body, geometry.row_bytes);
  append(body, geometry.page_bytes);
  return close_frame(body, kStoreMagic, kIdentitySeed);
}

Identity Identity::decode(std::string_view bytes, const std::string& path) {
  CheckedReader in = open_frame(bytes, path, kStoreMagic, kIdentitySeed);
  Identity id;
  id.store_id[0] = in.take<uint64_t>();
  id.store_id[1] = in.take<uint64_t>();
  id.geometry.row_bytes = in.take_between<uint32_t>("row_bytes", 1, kMaxRowBytes);
  id.geometry.page_bytes = in.take<uint32_t>();
  in.check(id.geometry.valid(), "page_bytes is not the page size of rows of this size");
  in.check_end();
  return id;
}

std::string Manifest::encode() const {
  std::string body;
  append(body, store_id[0]);
  append(body, store_id[1]);
  append(body, epoch);
  append(body, next_file);
  append(body, next_seq);
  append(body, uint64_t{note.size()});
  body += note;
  append_array(body, partitions);
  append_array(body, segments);
  append_array(body, extents);
  return close_frame(body, kManifestMagic, kManifestSeed);
}

namespace {

void check_partitions(const CheckedReader& in, const Manifest& m, const Geometry& g) {
  in.check(!m.partitions.empty() && m.partitions[0].lo == 0, "the partitions do not cover all hashes");
  for (size_t i = 0; i < m.partitions.size(); ++i) {
    const PartitionRecord& p = m.partitions[i];
    in.check(i == 0 || p.lo > m.partitions[i - 1].lo, "the partitions are out of order");
    in.check_between("merged_seq of a partition", p.merged_seq, 0, m.next_seq - 1);
    in.check_between("the file number of a partition", p.file, 0, m.next_file - 1);
    if (p.file == 0) {
      in.check(p.rows == 0 && p.pages == 0 && p.filter_bytes == 0, "a partition without a file has rows");
      continue;
    }
    in.check_between("the row pages of a base file", p.pages, 1, kMaxFilePages);
    in.check_between("the rows of a base file", p.rows, 1, p.pages * g.rows_per_page());
    in.check(g.row_pages(p.rows) == p.pages, "rows and row pages of a base file differ");
    in.check_between("the filter of a base file", p.filter_bytes, 0, kMaxFilePages);
    in.check(p.filter_bytes % 64 == 0, "the filter of a base file has part of a block");
    in.check(1 + p.pages + g.fence_pages(p.pages) + g.filter_pages(p.filter_bytes) <= kMaxFilePages,
             "a base file has 2^32 pages or more");
  }
}

void check_extents(const CheckedReader& in, const Manifest& m, const Geometry& g) {
  uint64_t log_pages = 0;
  for (const SegmentRecord& s : m.segments) {
    in.check_between("the file number of a segment", s.file, 1, m.next_file - 1);
    in.check_between("the pages of the log", s.pages, 1, kMaxLogPages - log_pages);
    log_pages += s.pages;
  }
  uint64_t seq = 0, page = 1;  // of the next extent: at least these
  size_t at = 0;
  for (const ExtentRecord& e : m.extents) {
    in.check_between("the seq of an extent", e.seq, seq + 1, m.next_seq - 1);
    in.check_between("the rows of an extent", e.rows, 1, kMaxExtentRows);
    in.check_between("the kind of an extent", e.tombstones, 0, 1);
    for (; at < m.segments.size() && m.segments[at].file != e.segment; ++at) page = 1;
    in.check(at < m.segments.size(), "an extent has no segment");
    in.check_between("the first page of an extent", e.first_page, page, kMaxLogPages);
    seq = e.seq;
    page = e.first_page + g.key_pages(e.rows) + (e.tombstones ? 0 : g.row_pages(e.rows));
    in.check(page <= m.segments[at].pages, "an extent ends after the end of its segment");
  }
}

void check_unique_files(const CheckedReader& in, const Manifest& m) {
  std::vector<uint64_t> numbers;
  for (const PartitionRecord& p : m.partitions)
    if (p.file) numbers.push_back(p.file);
  for (const SegmentRecord& s : m.segments) numbers.push_back(s.file);
  std::sort(numbers.begin(), numbers.end());
  in.check(std::adjacent_find(numbers.begin(), numbers.end()) == numbers.end(), "a file is listed twice");
}

}  // namespace

Manifest Manifest::decode(std::string_view bytes, const std::string& path, const Geometry& g) {
  CheckedReader in = open_frame(bytes, path, kManifestMagic, kManifestSeed);
  Manifest m;
  m.store_id[0] = in.take<uint64_t>();
  m.store_id[1] = in.take<uint64_t>();
  m.epoch = in.take_between<uint64_t>("the epoch", 0, kMaxNumber);
  m.next_file = in.take_between<uint64_t>("the next file number", 1, kMaxNumber);
  m.next_seq = in.take_between<uint64_t>("the next seq", 1, kMaxNumber);
  m.note = in.take_text("the note");
  m.partitions = in.take_list<PartitionRecord>("partitions");
  m.segments = in.take_list<SegmentRecord>("segments");
  m.extents = in.take_list<ExtentRecord>("extents");
  in.check_end();
  check_partitions(in, m, g);
  check_extents(in, m, g);
  check_unique_files(in, m);
  return m;
}

std::string read_record(FileSystem& fs, const std::string& path) {
  try {
    return read_whole(fs, path, kMaxRecordBytes);
  } catch (const IoError& e) {
    if (!is_unreadable(e)) throw;
    throw IoError(e.what() + (kRepairHint + repair_command(path.substr(0, path.rfind('/')))), e.code);
  }
}

std::string manifest_name(uint64_t epoch) {
  char text[40];
  std::snprintf(text, sizeof text, "MANIFEST-%012llu", static_cast<unsigned long long>(epoch));
  return text;
}

bool parse_manifest_name(const std::string& name, uint64_t* epoch) {
  constexpr std::string_view kPrefix = "MANIFEST-";
  return name.size() >= kPrefix.size() + 12 && name.starts_with(kPrefix) &&
         parse_number(std::string_view(name).substr(kPrefix.size()), epoch);
}

}  // namespace thermocline::ssd
