#include "ssd/repair_files.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "util/aligned.h"

namespace thermocline::ssd {

HashRange range_of(const Manifest& m, size_t partition) {
  return {m.partitions[partition].lo, partition + 1 < m.partitions.size() ? m.partitions[partition + 1].lo - 1
                                                                          : std::numeric_limits<uint64_t>::max()};
}

std::string cause_of(const Error& e) { return without_repair_hint(e.what()); }

namespace {

// The identity in the header of a data file, if it is valid.
std::optional<Identity> identity_of(FileSystem& fs, const std::string& path, FileKind kind, uint64_t number) {
  try {
    auto file = fs.open(path, OpenMode::kRead);
    AlignedBuffer sector(kSector);
    file->pread(sector.data(), kSector, 0);
    FileHeader header;
    std::memcpy(&header, sector.data() + sizeof(PageHeader), sizeof header);
    Identity id;
    std::copy(std::begin(header.store_id), std::end(header.store_id), id.store_id);
    id.geometry = {header.row_bytes, header.page_bytes};
    if (!id.geometry.valid()) return std::nullopt;
    AlignedBuffer page(id.geometry.page_bytes);
    file->pread(page.data(), page.size(), 0);
    if (!file_header_damage(page.data(), id.geometry, kind, id.store_id, number, header.nonce).empty())
      return std::nullopt;
    return id;
  } catch (const IoError&) {
    return std::nullopt;
  }
}

}  // namespace

Identity rebuild_identity(FileSystem& fs, const std::string& path, const std::string& cause) {
  const std::vector<std::string> names = fs.list(path);
  for (const std::string& name : names) {
    FileKind kind;
    uint64_t number;
    if (!parse_file_name(name, &kind, &number)) continue;
    const std::optional<Identity> id = identity_of(fs, path + "/" + name, kind, number);
    for (const std::string& other : names) {
      if (!id || !parse_manifest_name(other, &number)) continue;
      try {
        const std::string file = path + "/" + other;
        const Manifest m = read_damaged(
            fs, file, [&](const std::string& bytes) { return Manifest::decode(bytes, file, id->geometry); });
        if (std::equal(std::begin(m.store_id), std::end(m.store_id), id->store_id)) return *id;
      } catch (const CorruptionError&) {
      }
    }
  }
  throw CorruptionError(path + "/" + kIdentityFile + ": " + cause +
                        "; it cannot be rebuilt, because no data file has a valid header that belongs to a valid "
                        "manifest: restore a copy of the store");
}

bool FileUses::add(const Manifest& m, const Geometry& g) {
  FileUses next = *this;
  for (size_t i = 0; i < m.partitions.size(); ++i)
    if (m.partitions[i].file && !next.add_base(m, i)) return false;
  for (const SegmentRecord& s : m.segments)
    if (!next.add_segment(m, s)) return false;
  for (const ExtentRecord& e : m.extents)
    if (!next.segments[e.segment].extents.try_emplace(e.first_page, e).second) {
      const ExtentRecord& old = next.segments[e.segment].extents[e.first_page];
      if (old.seq != e.seq || old.rows != e.rows || old.tombstones != e.tombstones) return false;
    }
  for (auto& [_, segment] : next.segments) {
    uint64_t end = 1, seq = 0;
    for (auto& [page, e] : segment.extents) {
      if (page < end || e.seq <= seq) return false;
      end = page + g.key_pages(e.rows) + (e.tombstones ? 0 : g.row_pages(e.rows));
      seq = e.seq;
    }
  }
  *this = std::move(next);
  return true;
}

bool FileUses::add_base(const Manifest& m, size_t i) {
  const PartitionRecord& r = m.partitions[i];
  const HashRange range = range_of(m, i);
  auto [it, added] = bases.try_emplace(r.file, BaseUse{r, range, {}});
  const BaseUse& old = it->second;
  it->second.epochs.push_back(m.epoch);
  return !segments.count(r.file) && old.record.nonce == r.nonce && old.record.rows == r.rows &&
         old.record.filter_bytes == r.filter_bytes && old.range.lo == range.lo && old.range.hi == range.hi;
}

bool FileUses::add_segment(const Manifest& m, const SegmentRecord& s) {
  auto [it, added] = segments.try_emplace(s.file);
  SegmentUse& use = it->second;
  if (added) use.nonce = s.nonce;
  use.pages = std::max(use.pages, s.pages);
  use.epochs.push_back(m.epoch);
  return use.nonce == s.nonce && !bases.count(s.file);
}

}  // namespace thermocline::ssd
