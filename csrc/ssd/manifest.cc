#include "ssd/manifest.h"

#include <cstdio>
#include <limits>
#include <type_traits>

namespace thermocline::ssd {
namespace {

// Different seeds, so that one kind of record does not pass the check of the other.
constexpr uint64_t kIdentitySeed = 0x53544f5245ULL, kManifestSeed = 0x4d414e4946455354ULL;

template <class T>
void append(std::string& out, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

struct Reader {
  std::string_view bytes;
  const std::string& path;

  template <class T>
  T take() {
    if (bytes.size() < sizeof(T)) fail("the file ends inside a field");
    T value;
    std::memcpy(&value, bytes.data(), sizeof value);
    bytes.remove_prefix(sizeof value);
    return value;
  }
  template <class T>
  std::vector<T> take_array() {
    auto n = take<uint64_t>();
    if (n > bytes.size() / sizeof(T)) fail("a list is longer than the file");
    std::vector<T> out(n);
    if (n > 0) std::memcpy(out.data(), bytes.data(), n * sizeof(T));
    bytes.remove_prefix(n * sizeof(T));
    return out;
  }
  [[noreturn]] void fail(const std::string& cause) const { throw CorruptionError(path + ": " + cause); }
};

template <class T>
void append_array(std::string& out, const std::vector<T>& values) {
  append(out, uint64_t{values.size()});
  out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Checks the frame of a record (magic, version, total bytes ... checksum) and returns a reader of its body.
Reader open_frame(std::string_view bytes, const std::string& path, const char magic[8], uint64_t seed) {
  Reader in{bytes, path};
  if (bytes.size() < 8 || std::memcmp(bytes.data(), magic, 8) != 0)
    throw CorruptionError(path + ": not a Thermocline file, or its first bytes are damaged");
  in.bytes.remove_prefix(8);
  auto version = in.take<uint32_t>();
  in.take<uint32_t>();
  auto total = in.take<uint64_t>();
  if (total != bytes.size())
    in.fail("the file has " + std::to_string(bytes.size()) + " bytes, its header states " + std::to_string(total));
  uint64_t stored;
  std::memcpy(&stored, bytes.data() + bytes.size() - 8, 8);
  if (bytes.size() < 32 || stored != xxh64(bytes.data(), bytes.size() - 8, seed)) in.fail("checksum mismatch");
  // After the checksum: a damaged version number is corruption, not a newer format.
  if (version != kFormatVersion)
    throw FormatError(path + ": format version " + std::to_string(version) + ", this build reads version " +
                      std::to_string(kFormatVersion) + "; upgrade thermocline to open it");
  in.bytes.remove_suffix(8);
  return in;
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
  Reader in = open_frame(bytes, path, kStoreMagic, kIdentitySeed);
  Identity id;
  id.store_id[0] = in.take<uint64_t>();
  id.store_id[1] = in.take<uint64_t>();
  id.geometry.row_bytes = in.take<uint32_t>();
  id.geometry.page_bytes = in.take<uint32_t>();
  if (!in.bytes.empty() || id.geometry.page_bytes % kSector != 0 || id.geometry.row_bytes == 0 ||
      id.geometry.page_bytes < id.geometry.row_bytes + 8 + sizeof(PageHeader))
    in.fail("row_bytes or page_bytes are invalid");
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

Manifest Manifest::decode(std::string_view bytes, const std::string& path) {
  Reader in = open_frame(bytes, path, kManifestMagic, kManifestSeed);
  Manifest m;
  m.store_id[0] = in.take<uint64_t>();
  m.store_id[1] = in.take<uint64_t>();
  m.epoch = in.take<uint64_t>();
  m.next_file = in.take<uint64_t>();
  m.next_seq = in.take<uint64_t>();
  auto note_bytes = in.take<uint64_t>();
  if (note_bytes > in.bytes.size()) in.fail("the note is longer than the file");
  m.note.assign(in.bytes.data(), note_bytes);
  in.bytes.remove_prefix(note_bytes);
  m.partitions = in.take_array<PartitionRecord>();
  m.segments = in.take_array<SegmentRecord>();
  m.extents = in.take_array<ExtentRecord>();
  if (!in.bytes.empty()) in.fail("the file has bytes after the last field");
  if (m.partitions.empty() || m.partitions[0].lo != 0) in.fail("the partitions do not cover all hashes");
  for (size_t i = 1; i < m.partitions.size(); ++i)
    if (m.partitions[i].lo <= m.partitions[i - 1].lo) in.fail("the partitions are out of order");
  constexpr uint64_t kMaxPages = std::numeric_limits<uint32_t>::max();
  for (auto& p : m.partitions)
    if (p.pages > kMaxPages || p.filter_bytes % 64 != 0) in.fail("the size of a base file is invalid");
  for (size_t i = 0, s = 0; i < m.extents.size(); ++i) {
    auto& e = m.extents[i];
    if (i > 0 && e.seq <= m.extents[i - 1].seq) in.fail("the extents are out of order");
    while (s < m.segments.size() && m.segments[s].file != e.segment) ++s;
    if (s == m.segments.size()) in.fail("an extent has no segment");
    if (e.rows == 0 || e.first_page == 0 || e.first_page >= m.segments[s].pages || m.segments[s].pages > kMaxPages)
      in.fail("an extent is outside its segment");
  }
  return m;
}

std::string manifest_name(uint64_t epoch) {
  char text[40];
  std::snprintf(text, sizeof text, "MANIFEST-%012llu", static_cast<unsigned long long>(epoch));
  return text;
}

bool parse_manifest_name(const std::string& name, uint64_t* epoch) {
  constexpr std::string_view kPrefix = "MANIFEST-";
  if (name.size() < kPrefix.size() + 12 || name.compare(0, kPrefix.size(), kPrefix) != 0) return false;
  uint64_t value = 0;
  for (size_t i = kPrefix.size(); i < name.size(); ++i) {
    if (name[i] < '0' || name[i] > '9') return false;
    value = value * 10 + static_cast<uint64_t>(name[i] - '0');
  }
  *epoch = value;
  return true;
}

}  // namespace thermocline::ssd
