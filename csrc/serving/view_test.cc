// Snapshot files and views against a map: random bases, deltas with deletes, damage.
#include "serving/view.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "serving/snapshot_writer.h"
#include "testing/test.h"
#include "util/error.h"
#include "util/hash.h"
#include "util/posix_fs.h"

namespace thermocline::serving {
namespace {

constexpr uint32_t kDim = 5;
using Row = std::array<float, kDim>;
using Rows = std::map<uint64_t, Row>;

std::vector<uint64_t> in_hash_order(std::vector<uint64_t> keys) {
  std::sort(keys.begin(), keys.end(), [](uint64_t a, uint64_t b) { return hash_key(a) < hash_key(b); });
  return keys;
}

void write(const std::string& path, const Rows& rows, const std::vector<uint64_t>& deleted = {}) {
  SnapshotWriter writer(make_posix_fs(), path, sizeof(Row));
  std::vector<uint64_t> keys;
  for (const auto& [key, row] : rows) keys.push_back(key);
  keys = in_hash_order(keys);
  for (size_t first = 0; first < keys.size(); first += 1000) {
    size_t n = std::min<size_t>(1000, keys.size() - first);
    std::vector<Row> values;
    for (size_t i = 0; i < n; ++i) values.push_back(rows.at(keys[first + i]));
    writer.append(&keys[first], n, {reinterpret_cast<const uint8_t*>(values.data()), sizeof(Row)});
  }
  std::vector<uint64_t> erased = in_hash_order(deleted);
  writer.erase(erased.data(), erased.size());
  writer.finish();
  CHECK_EQ(writer.rows(), rows.size());
  CHECK_EQ(writer.deleted(), deleted.size());
}

Row random_row(std::mt19937_64& rng) {
  Row row;
  for (float& value : row) value = static_cast<float>(rng() % 100000) / 7;
  return row;
}

// A key of a small range, so that deltas change, delete and insert; key 0 and the largest key included.
uint64_t random_key(std::mt19937_64& rng, uint64_t range) {
  uint64_t key = rng() % range;
  return key == range - 1 ? ~uint64_t{0} : key;
}

void expect_lookup(const View& view, const Rows& rows, uint64_t range) {
  std::vector<uint64_t> keys(range);
  for (uint64_t i = 0; i < range; ++i) keys[i] = i == range - 1 ? ~uint64_t{0} : i;
  std::vector<uint8_t> found(range, 7);
  std::vector<Row> out(range, Row{-1, -1, -1, -1, -1});
  view.lookup(keys.data(), range, found.data(), out[0].data());
  for (uint64_t i = 0; i < range; ++i) {
    auto at = rows.find(keys[i]);
    CHECK_EQ(found[i], at != rows.end());
    CHECK(out[i] == (at != rows.end() ? at->second : Row{-1, -1, -1, -1, -1}));
  }
}

void expect_equal(const View& view, const Rows& rows, uint64_t range) {
  expect_lookup(view, rows, range);
  expect_lookup(*view.with_direct_reads(make_posix_fs()), rows, range);
  expect_lookup(*view.with_direct_reads(make_posix_fs(IoEngine::kPread, 1, 3)), rows, range);
}

void expect_scan(const std::shared_ptr<const View>& view, const Rows& rows, size_t step) {
  View::Scan scan(view);
  std::vector<uint64_t> keys(step);
  std::vector<Row> values(step);
  size_t count = 0;
  uint64_t last = 0;
  while (size_t n = scan.next(step, keys.data(), reinterpret_cast<uint8_t*>(values.data()))) {
    for (size_t i = 0; i < n; ++i) {
      CHECK(count + i == 0 || hash_key(keys[i]) > last);
      last = hash_key(keys[i]);
      CHECK(rows.at(keys[i]) == values[i]);
    }
    count += n;
  }
  CHECK_EQ(count, rows.size());
}

// A file system without O_DIRECT, whose device fails while the kernel writes pages back.
ssize_t buffered_pwrite(int fd, const void* buf, size_t bytes, off_t offset) {
  if ((::fcntl(fd, F_GETFL) & O_DIRECT) == 0) return ::pwrite(fd, buf, bytes, offset);
  errno = EINVAL;
  return -1;
}
int failing_fdatasync(int) {
  errno = EIO;
  return -1;
}

TEST(Snapshot, WriteErrorsAreReportedBeforeTheFileIsClosed) {
  testing::TempDir dir;
  PosixCalls calls = real_posix_calls();
  calls.pwrite = buffered_pwrite;
  calls.fdatasync = failing_fdatasync;
  const auto fs = make_posix_fs_on(calls, IoEngine::kPread, 0, 0);
  {
    SnapshotWriter writer(fs, dir / "f", sizeof(Row));
    CHECK_THROWS(IoError, writer.finish());
  }
  CHECK(!fs->exists(dir / "f"));
}

TEST(Snapshot, LookupAndScanEqualAMap) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    std::mt19937_64 rng(seed);
    testing::TempDir dir;
    uint64_t range = seed % 3 == 0 ? 1 + rng() % 50 : 1 + rng() % 30000;
    Rows rows;
    for (uint64_t i = seed % 5 == 0 ? range : 0; i < range; ++i) rows[random_key(rng, range)] = random_row(rng);
    write(dir / "base", rows);
    auto view = View::open(dir / "base", RowFormat::kFp32, kDim);
    expect_equal(*view, rows, range);
    int deltas = static_cast<int>(rng() % 12);
    for (int d = 0; d < deltas; ++d) {
      Rows changed;
      std::map<uint64_t, bool> deleted;
      uint64_t most = d % 4 == 3 ? range : 1 + range / 10;
      for (uint64_t i = rng() % (most + 1); i > 0; --i) changed[random_key(rng, range)] = random_row(rng);
      for (uint64_t i = rng() % (most + 1); i > 0; --i) {
        uint64_t key = random_key(rng, range);
        if (!changed.count(key)) deleted[key] = true;
      }
      std::vector<uint64_t> gone;
      for (const auto& [key, _] : deleted) gone.push_back(key), rows.erase(key);
      for (const auto& [key, row] : changed) rows[key] = row;
      std::string path = dir / ("delta" + std::to_string(d));
      write(path, changed, gone);
      auto before = view;
      view = view->with_delta(path);
      CHECK(before != view);
      std::remove(path.c_str());  // the mapping stays valid
    }
    expect_equal(*view, rows, range);
    expect_scan(view, rows, 1 + rng() % 500);
  }
}

TEST(Snapshot, OneViewIsOneVersionWhileDeltasArrive) {
  constexpr uint64_t kKeys = 1000;
  testing::TempDir dir;
  Rows rows;
  for (uint64_t k = 0; k < kKeys; ++k) rows[k] = {0, 0, 0, 0, 0};
  write(dir / "base", rows);
  std::shared_ptr<const View> current = View::open(dir / "base", RowFormat::kFp32, kDim);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> lookups{0}, wrong{0};
  std::thread reader([&] {
    std::vector<uint64_t> keys(kKeys);
    for (uint64_t k = 0; k < kKeys; ++k) keys[k] = k;
    std::vector<uint8_t> found(kKeys);
    std::vector<Row> out(kKeys);
    while (!stop) {
      auto view = std::atomic_load(&current);
      view->lookup(keys.data(), kKeys, found.data(), out[0].data());
      float version = out[1][0];
      for (uint64_t k = 0; k < kKeys; ++k) {
        bool deleted = version > 0 && k == 2 + static_cast<uint64_t>(version) % 7;  // absent in this version only
        wrong += found[k] == deleted || (!deleted && out[k] != Row{version, version, version, version, version});
      }
      ++lookups;
    }
  });
  for (int version = 1; version <= 100 || lookups < 20; ++version) {
    auto value = static_cast<float>(version);
    Rows changed;
    uint64_t gone = 2 + static_cast<uint64_t>(version) % 7;
    for (uint64_t k = 0; k < kKeys; ++k)
      if (k != gone) changed[k] = {value, value, value, value, value};
    std::string path = dir / "delta";
    write(path, changed, {gone});
    std::atomic_store(&current, std::atomic_load(&current)->with_delta(path));
    std::remove(path.c_str());
  }
  stop = true;
  reader.join();
  CHECK_EQ(wrong.load(), 0u);
}

TEST(Snapshot, DecodesHalfAndBytes) {
  testing::TempDir dir;
  uint64_t key = 9;
  const _Float16 half[3] = {static_cast<_Float16>(0.5f), static_cast<_Float16>(-3.25f), static_cast<_Float16>(1e-7f)};
  {
    SnapshotWriter writer(make_posix_fs(), dir / "half", sizeof half);
    writer.append(&key, 1, {reinterpret_cast<const uint8_t*>(half), 6});
    writer.finish();
  }
  uint8_t found = 0;
  float out[3];
  View::open(dir / "half", RowFormat::kFp16, 3)->lookup(&key, 1, &found, out);
  for (int i = 0; i < 3; ++i) CHECK_EQ(out[i], static_cast<float>(half[i]));
  std::vector<uint8_t> bytes(row_bytes_of(RowFormat::kInt8, 3));
  const float scale = 0.125f, offset = -4;
  std::memcpy(&bytes[0], &scale, 4);
  std::memcpy(&bytes[4], &offset, 4);
  bytes[8] = 0, bytes[9] = 255, bytes[10] = 32;
  {
    SnapshotWriter writer(make_posix_fs(), dir / "bytes", static_cast<uint32_t>(bytes.size()));
    writer.append(&key, 1, {bytes.data(), bytes.size()});
    writer.finish();
  }
  View::open(dir / "bytes", RowFormat::kInt8, 3)->lookup(&key, 1, &found, out);
  CHECK_EQ(out[0], -4.0f);
  CHECK_EQ(out[1], -4.0f + 0.125f * 255);
  CHECK_EQ(out[2], 0.0f);
}

// The dim comes from a manifest. In 32 bits, 4 * (2^30 + kDim) is the size of these rows.
TEST(Snapshot, RefusesADimWhoseRowBytesOverflow) {
  testing::TempDir dir;
  write(dir / "base", {{1, Row{}}});
  CHECK_THROWS(FormatError, View::open(dir / "base", RowFormat::kFp32, (1u << 30) + kDim));
  CHECK_THROWS(FormatError, View::open(dir / "base", RowFormat::kFp16, (1u << 31) + 2 * kDim));
  CHECK_THROWS(FormatError, View::open(dir / "base", RowFormat::kInt8, ~0u));
}

TEST(Snapshot, RefusesWrongOrder) {
  testing::TempDir dir;
  std::vector<uint64_t> keys = in_hash_order({1, 2, 3});
  std::vector<Row> rows(3);
  auto in = [&](size_t i) { return RowsIn{reinterpret_cast<const uint8_t*>(&rows[i]), sizeof(Row)}; };
  {
    SnapshotWriter writer(make_posix_fs(), dir / "a", sizeof(Row));
    writer.append(&keys[1], 1, in(0));
    CHECK_THROWS(Error, writer.append(&keys[0], 1, in(0)));
    CHECK_THROWS(Error, writer.append(&keys[1], 1, in(0)));
  }
  CHECK(!make_posix_fs()->exists(dir / "a"));  // not finished: deleted
}

TEST(Snapshot, EveryChangedByteIsFound) {
  testing::TempDir dir;
  std::mt19937_64 rng(5);
  Rows rows;
  for (uint64_t k = 0; k < 700; ++k) rows[k] = random_row(rng);
  write(dir / "good", rows, {1000, 1001});
  write(dir / "base", rows);
  std::ifstream in(dir / "good", std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  auto base = View::open(dir / "base", RowFormat::kFp32, kDim);
  for (int trial = 0; trial < 3000; ++trial) {
    std::string damaged = bytes;
    if (trial % 10 == 0) {
      damaged.resize(rng() % bytes.size());
    } else {
      damaged[rng() % bytes.size()] ^= static_cast<char>(1 + rng() % 255);
    }
    std::string path = dir / "damaged";
    std::ofstream(path, std::ios::binary) << damaged;
    CHECK_THROWS(Error, base->with_delta(path));
    std::remove(path.c_str());
  }
}

}  // namespace
}  // namespace thermocline::serving
