// Limits of the numbers in STORE and manifests: each is refused outside of its range, although the checksum is right.
#include "ssd/manifest.h"

#include <functional>
#include <utility>

#include "testing/test.h"
#include "util/error.h"

namespace thermocline::ssd {
namespace {

const Geometry kGeometry = Geometry::of(24);

// Two partitions with a base, three extents in two segments.
Manifest valid_manifest() {
  const uint64_t per_page = kGeometry.rows_per_page();
  Manifest m;
  m.epoch = 3;
  m.next_file = 10;
  m.next_seq = 8;
  m.note = "note";
  m.partitions = {{0, 4, 1, 11, 3 * per_page, 3, 64}, {uint64_t{1} << 63, 4, 2, 12, 2 * per_page - 1, 2, 0}};
  m.segments = {{5, 13, 8}, {6, 14, 4}};
  m.extents = {{5, 5, 1, per_page, 0}, {6, 5, 4, 2 * per_page, 0}, {7, 6, 2, 9, 1}};
  return m;
}

TEST(StoreManifest, EncodesAndDecodes) {
  const Manifest m = valid_manifest();
  const Manifest back = Manifest::decode(m.encode(), "m", kGeometry);
  CHECK_EQ(back.encode(), m.encode());
  CHECK(back.partitions.size() == 2 && back.segments.size() == 2 && back.extents.size() == 3);
}

TEST(StoreManifest, RefusesNumbersOutsideTheirLimits) {
  const uint64_t huge = ~uint64_t{0};
  const std::pair<const char*, std::function<void(Manifest&)>> changes[] = {
      {"the epoch", [&](Manifest& m) { m.epoch = huge; }},
      {"the next file number", [&](Manifest& m) { m.next_file = huge; }},
      {"the next seq", [&](Manifest& m) { m.next_seq = 0; }},
      {"do not cover", [&](Manifest& m) { m.partitions.clear(); }},
      {"do not cover", [&](Manifest& m) { m.partitions[0].lo = 1; }},
      {"out of order", [&](Manifest& m) { m.partitions[1].lo = 0; }},
      {"merged_seq", [&](Manifest& m) { m.partitions[0].merged_seq = m.next_seq; }},
      {"the file number of a partition", [&](Manifest& m) { m.partitions[0].file = m.next_file; }},
      {"without a file", [&](Manifest& m) { m.partitions[0].file = 0; }},
      {"the row pages", [&](Manifest& m) { m.partitions[0].pages = kMaxFilePages + 1; }},
      {"the row pages", [&](Manifest& m) { m.partitions[0].pages = 0; }},
      {"the rows of a base", [&](Manifest& m) { m.partitions[0].rows = huge; }},
      {"rows and row pages", [&](Manifest& m) { m.partitions[0].rows = 1; }},
      {"the filter", [&](Manifest& m) { m.partitions[0].filter_bytes = huge - 63; }},
      {"part of a block", [&](Manifest& m) { m.partitions[0].filter_bytes = 65; }},
      {"listed twice", [&](Manifest& m) { m.partitions[1].file = 1; }},
      {"listed twice",
       [&](Manifest& m) {
         m.segments[1].file = 2;
         m.extents[2].segment = 2;
       }},
      {"the file number of a segment", [&](Manifest& m) { m.segments[0].file = 0; }},
      {"the pages of the log", [&](Manifest& m) { m.segments[0].pages = 0; }},
      {"the pages of the log", [&](Manifest& m) { m.segments[0].pages = m.segments[1].pages = kMaxLogPages - 5; }},
      {"the seq of an extent", [&](Manifest& m) { m.extents[1].seq = 5; }},
      {"the seq of an extent", [&](Manifest& m) { m.extents[2].seq = m.next_seq; }},
      {"the rows of an extent", [&](Manifest& m) { m.extents[0].rows = 0; }},
      {"the rows of an extent", [&](Manifest& m) { m.extents[0].rows = kMaxExtentRows + 1; }},
      {"the kind of an extent", [&](Manifest& m) { m.extents[0].tombstones = 2; }},
      {"no segment", [&](Manifest& m) { m.extents[0].segment = 7; }},
      {"the first page", [&](Manifest& m) { m.extents[0].first_page = 0; }},
      {"the first page", [&](Manifest& m) { m.extents[1].first_page = 2; }},
      {"the first page", [&](Manifest& m) { m.extents[1].first_page = huge; }},
      {"ends after the end", [&](Manifest& m) { m.extents[1].first_page = 7; }},
      {"ends after the end", [&](Manifest& m) { m.extents[2].rows = kMaxExtentRows; }},
  };
  for (auto& [cause, change] : changes) {
    Manifest m = valid_manifest();
    change(m);
    try {
      Manifest::decode(m.encode(), "/s/MANIFEST-000000000003", kGeometry);
    } catch (const CorruptionError& e) {
      const std::string what = e.what();
      if (what.find(cause) == std::string::npos || what.find("thermocline repair /s") == std::string::npos)
        testing::fail(__FILE__, __LINE__, std::string("expected '") + cause + "' and the command in: " + what);
      continue;
    }
    testing::fail(__FILE__, __LINE__, std::string("accepted: ") + cause);
  }
}

TEST(StoreManifest, RefusesRowAndPageSizesThatWrap) {
  for (auto [row_bytes, page_bytes] : {std::pair<uint32_t, uint32_t>{0xfffffff8u, 4096},
                                       {0xffffffffu, 4096},
                                       {0xffffffe8u, 0},
                                       {kMaxRowBytes + 1, 4096},
                                       {0, 4096},
                                       {kMaxRowBytes, 4096},
                                       {24, 0},
                                       {24, 4100},
                                       {24, 1u << 31}}) {
    Identity id;
    id.geometry = {row_bytes, page_bytes};
    CHECK_THROWS(CorruptionError, Identity::decode(id.encode(), "/s/STORE"));
  }
  for (uint32_t row_bytes : {1u, 24u, 128u, 4073u, 1u << 20}) {
    Identity id;
    id.geometry = Geometry::of(row_bytes);
    CHECK_EQ(Identity::decode(id.encode(), "/s/STORE").geometry.page_bytes, id.geometry.page_bytes);
  }
}

TEST(StoreManifest, NamesHaveBoundedNumbers) {
  uint64_t number = 0;
  FileKind kind;
  CHECK(parse_manifest_name("MANIFEST-000000000012", &number) && number == 12);
  CHECK(!parse_manifest_name("MANIFEST-99999999999999999999999", &number));
  CHECK(!parse_manifest_name("MANIFEST-18446744073709551615", &number));
  CHECK(!parse_manifest_name("MANIFEST-9223372036854775808", &number));
  CHECK(parse_file_name("base-000012.tc", &kind, &number) && kind == FileKind::kBase && number == 12);
  CHECK(parse_file_name("log-1000000.tc", &kind, &number) && kind == FileKind::kSegment && number == 1000000);
  for (const char* name : {"log-.tc", "base-.tc", "base-00000x.tc", "log-18446744073709551615.tc", "log-000000.tc",
                           "base-000012.tc.tmp", "xlog-000001.tc", "log-000001"})
    CHECK(!parse_file_name(name, &kind, &number));
}

}  // namespace
}  // namespace thermocline::ssd
