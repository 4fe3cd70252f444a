// Tests of the test file systems: a crash simulator that misses states would prove nothing.
#include <algorithm>
#include <cstring>
#include <functional>
#include <set>

#include "testing/crash.h"
#include "testing/fault_fs.h"
#include "testing/mem_fs.h"
#include "testing/record_fs.h"
#include "testing/test.h"
#include "util/aligned.h"
#include "util/error.h"

namespace thermocline::testing {
namespace {

AlignedBuffer pages(size_t n, char fill) {
  AlignedBuffer b(n * kSector);
  std::memset(b.data(), fill, b.size());
  return b;
}

void write_file(FileSystem& fs, const std::string& path, std::string_view text, bool sync) {
  auto f = fs.open(path, OpenMode::kCreateMeta);
  f->pwrite(text.data(), text.size(), 0);
  if (sync) f->datasync();
}

TEST(MemFs, BehavesLikeAFileSystem) {
  MemFs fs;
  CHECK_THROWS(NotFoundError, fs.open("/d/x", OpenMode::kCreate));  // the folder does not exist
  fs.make_dir("/d");
  fs.make_dir("/d/");
  auto f = fs.open("/d/x", OpenMode::kCreate);
  CHECK_THROWS(IoError, fs.open("/d//x", OpenMode::kCreate));
  auto b = pages(2, 'a');
  f->pwrite(b.data(), b.size(), kSector);
  CHECK_EQ(f->size(), 3 * kSector);
  CHECK_EQ(fs.bytes("/d/x")[0], '\0');
  CHECK_EQ(fs.bytes("/d/x")[kSector], 'a');
  CHECK_THROWS(Error, f->pwrite(b.data() + 512, kSector, 0));
  CHECK_THROWS(IoError, f->pread(b.data(), 2 * kSector, 2 * kSector));
  CHECK_THROWS(IoError, fs.open("/d/x", OpenMode::kRead)->pwrite(b.data(), kSector, 0));
  fs.link("/d/x", "/d/y");
  CHECK_THROWS(IoError, fs.link("/d/x", "/d/y"));
  fs.unlink("/d/x");
  CHECK(!fs.exists("/d/x"));
  f->pwrite(b.data(), kSector, 0);  // still open
  CHECK_EQ(fs.bytes("/d/y")[0], 'a');
  write_file(fs, "/d/z", "new", true);
  fs.rename("/d/z", "/d/y");
  CHECK_EQ(read_whole(fs, "/d/y"), "new");
  CHECK(fs.list("/d") == std::vector<std::string>{"y"});
  CHECK_THROWS(NotFoundError, fs.list("/e"));
  auto lock = fs.lock("/d/LOCK");
  CHECK_THROWS(LockError, fs.lock("/d/LOCK"));
  lock.reset();
  fs.lock("/d/LOCK");
}

TEST(MemFs, CopiesAreIndependent) {
  MemFs fs;
  fs.set_bytes("/d/a", "one");
  fs.link("/d/a", "/d/b");
  auto copy = fs.clone();
  copy->bytes("/d/a") = "two";
  CHECK_EQ(read_whole(fs, "/d/a"), "one");
  CHECK_EQ(read_whole(*copy, "/d/b"), "two");  // the link was copied as a link
  CHECK_EQ(fs.total_bytes(), 3u);
}

TEST(RecordFs, RecordsChangesInOrder) {
  auto mem = std::make_shared<MemFs>();
  mem->set_bytes("/d/old", "x");
  RecordFs fs(mem);
  publish_file(fs, "/d", "f", "hello");
  fs.marker("published");
  fs.unlink("/d/old");
  const Recording r = fs.recording();
  const std::vector<OpKind> want = {OpKind::kCreate,  OpKind::kWrite,  OpKind::kDatasync, OpKind::kRename,
                                    OpKind::kSyncDir, OpKind::kMarker, OpKind::kUnlink};
  CHECK_EQ(r.ops.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) CHECK(r.ops[i].kind == want[i]);
  CHECK_EQ(r.ops[1].data, "hello");
  CHECK(r.start_files.contains("/d/old"));
}

// All contents of /d/f after a crash during `body`; "-": no file.
std::set<std::string> outcomes(const std::function<void(RecordFs&)>& body, size_t cap = 100000) {
  auto mem = std::make_shared<MemFs>();
  mem->set_bytes("/d/f", "old");
  RecordFs fs(mem);
  body(fs);
  std::set<std::string> seen;
  for_each_crash(fs.recording(), 1, cap, [&](CrashState& state) {
    seen.insert(state.fs->exists("/d/f") ? read_whole(*state.fs, "/d/f") : "-");
  });
  return seen;
}

TEST(Crash, PublishFileLeavesOldOrNew) {
  const auto seen = outcomes([](RecordFs& fs) { publish_file(fs, "/d", "f", "new"); });
  CHECK(seen == (std::set<std::string>{"old", "new"}));
}

TEST(Crash, PublishWithoutSyncIsDetected) {
  const auto seen = outcomes([](RecordFs& fs) {
    write_file(fs, "/d/f.tmp", "new", false);
    fs.rename("/d/f.tmp", "/d/f");
    fs.sync_dir("/d");
  });
  CHECK(seen.contains(""));  // renamed but empty
}

TEST(Crash, OverwritingInPlaceIsDetected) {
  const auto seen = outcomes([](RecordFs& fs) {
    fs.unlink("/d/f");
    write_file(fs, "/d/f", "new", true);
    fs.sync_dir("/d");
  });
  CHECK(seen.contains("-") && seen.contains("old") && seen.contains("new"));
}

TEST(Crash, SyncedChangesSurvive) {
  auto mem = std::make_shared<MemFs>();
  mem->make_dir("/d");
  RecordFs fs(mem);
  publish_file(fs, "/d", "f", "one");
  const size_t safe = fs.size();
  write_file(fs, "/d/g", "two", false);
  fs.rename("/d/f", "/d/h");
  size_t after = 0;
  for_each_crash(fs.recording(), 7, 100000, [&](CrashState& state) {
    if (state.prefix < safe) return;
    ++after;
    const bool f = state.fs->exists("/d/f"), h = state.fs->exists("/d/h");
    CHECK(f != h);  // a rename is atomic
    CHECK_EQ(read_whole(*state.fs, f ? "/d/f" : "/d/h"), "one");
  });
  CHECK(after > 10);
}

TEST(Crash, TearsAtSectorsAndFillsWithOldBytes) {
  auto mem = std::make_shared<MemFs>();
  mem->set_bytes("/d/other", std::string(16 * kSector, 'o'));
  RecordFs fs(mem);
  auto b = pages(4, 'n');
  auto f = fs.open("/d/f", OpenMode::kCreate);
  fs.sync_dir("/d");
  f->pwrite(b.data(), b.size(), 0);
  f->pwrite(b.data(), b.size(), b.size());
  std::set<size_t> sizes;
  bool head = false, hole = false, other = false, garbage = false, second_alone = false;
  for_each_crash(fs.recording(), 3, 5000, [&](CrashState& state) {
    if (!state.fs->exists("/d/f")) return;
    const std::string got = read_whole(*state.fs, "/d/f");
    sizes.insert(got.size());
    CHECK(got.size() % 512 == 0 && got.size() <= 8 * kSector);
    const size_t kept = std::count(got.begin(), got.end(), 'n');
    head |= kept > 0 && kept == got.size() && kept % kSector != 0;
    hole |= got.find('\0') != std::string::npos && kept > 0;
    other |= got.find('o') != std::string::npos;
    garbage |= got.find('\x7f') != std::string::npos;
    second_alone |= got.size() == 8 * kSector && got[0] != 'n' && got.back() == 'n';
  });
  CHECK(sizes.contains(0) && sizes.contains(4 * kSector) && sizes.contains(8 * kSector));
  CHECK(head && hole && other && garbage && second_alone);
}

TEST(Crash, UnsyncedFolderMayBeLost) {
  auto mem = std::make_shared<MemFs>();
  mem->make_dir("/d");
  RecordFs fs(mem);
  fs.make_dir("/d/sub");
  publish_file(fs, "/d/sub", "f", "x");
  bool without = false, with = false;
  for_each_crash(fs.recording(), 1, 10000, [&](CrashState& state) {
    (state.fs->exists("/d/sub/f") ? with : without) = true;
    if (!state.fs->exists("/d/sub")) CHECK(!state.fs->exists("/d/sub/f"));
  });
  CHECK(with && without);
}

TEST(Crash, IsDeterministicAndLimited) {
  auto mem = std::make_shared<MemFs>();
  mem->make_dir("/d");
  RecordFs fs(mem);
  for (int i = 0; i < 50; ++i)
    publish_file(fs, "/d", "f" + std::to_string(i % 7), std::string(2000, char('a' + i % 26)));
  std::vector<std::string> first, second;
  CHECK(for_each_crash(fs.recording(), 5, 300, [&](CrashState& s) { first.push_back(s.what); }) <= 300);
  for_each_crash(fs.recording(), 5, 300, [&](CrashState& s) { second.push_back(s.what); });
  CHECK(first == second);
  CHECK(first.size() > 250);
}

TEST(FaultFs, FailsTheChosenOperation) {
  auto mem = std::make_shared<MemFs>();
  mem->make_dir("/d");
  FaultFs fs(mem);
  fs.arm({.fault = Fault::kDiskFull, .ops = kWrites, .at = 1});
  write_file(fs, "/d/a", "a", true);
  CHECK_THROWS(DiskFullError, write_file(fs, "/d/b", "b", true));
  write_file(fs, "/d/c", "c", true);  // once
  CHECK_EQ(fs.seen(), 3u);
  CHECK_EQ(fs.fired(), 1u);
  fs.arm({.fault = Fault::kIoError, .ops = kSyncs, .at = 0, .for_good = true});
  CHECK_THROWS(IoError, write_file(fs, "/d/e", "e", true));
  CHECK_THROWS(IoError, fs.sync_dir("/d"));
  CHECK_EQ(fs.fired(), 2u);
  fs.arm({.fault = Fault::kIoError, .ops = kNames, .at = 0});
  CHECK_THROWS(IoError, fs.rename("/d/a", "/d/z"));
  CHECK(fs.exists("/d/a"));
  fs.disarm();
  fs.rename("/d/a", "/d/z");
}

TEST(FaultFs, ShortReadsTornWritesAndFlips) {
  auto mem = std::make_shared<MemFs>();
  mem->make_dir("/d");
  FaultFs fs(mem);
  auto f = fs.open("/d/a", OpenMode::kCreate);
  auto b = pages(4, 'x');
  fs.arm({.fault = Fault::kTornWrite, .ops = kWrites, .at = 0});
  CHECK_THROWS(IoError, f->pwrite(b.data(), b.size(), 0));
  CHECK_EQ(f->size(), 2 * kSector);
  fs.arm({.fault = Fault::kShortRead, .ops = kReads, .at = 0});
  CHECK_THROWS(IoError, f->pread(b.data(), kSector, 0));
  fs.arm({.fault = Fault::kFlip, .ops = kReads, .at = 0, .bit = 8 * 5 + 1});
  auto q = fs.read_queue(2);  // reads of a queue are counted too
  q->submit({f.get(), 0, kSector, b.data()}, 1);
  CHECK_EQ(q->wait(), 1u);
  CHECK_EQ(b.data()[5], 'x' ^ 2);
  CHECK_EQ(b.data()[4], 'x');
}

TEST(FaultFs, CallsTheHookAtFailpoints) {
  auto mem = std::make_shared<MemFs>();
  mem->make_dir("/d");
  FaultFs fs(mem);
  publish_file(fs, "/d", "f", "1");
  CHECK_EQ(fs.points().at("publish.synced"), 1u);
  fs.on_point([](std::string_view point) {
    if (point == "publish.written") throw Error("stopped");
  });
  CHECK_THROWS(Error, publish_file(fs, "/d", "f", "2"));
  CHECK_EQ(read_whole(fs, "/d/f"), "1");
  CHECK(!fs.exists("/d/f.tmp"));
}

}  // namespace
}  // namespace thermocline::testing
