#include "testing/crash.h"

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <tuple>

namespace thermocline::testing {
namespace {

constexpr size_t kDiskSector = 512;

enum class Fill { kZeros, kGarbage, kOtherFile };  // content of lost sectors of a file that grew
enum class Tear { kWhole, kHead, kTail, kScattered };

// The unsynced changes that survive.
struct Survivors {
  std::vector<bool> kept;
  std::vector<Tear> tear;  // of kept writes
  Fill fill = Fill::kZeros;
  bool grown = false;  // sizes survive even if bytes do not
  uint64_t seed = 0;   // of tears and garbage
  std::string what;
};

bool is_name(OpKind kind) {
  return kind == OpKind::kCreate || kind == OpKind::kRename || kind == OpKind::kUnlink || kind == OpKind::kLink ||
         kind == OpKind::kMakeDir;
}

// State of the disk after a prefix of the recording: durable changes and pending ones.
class Disk {
 public:
  explicit Disk(const Recording& recording) : rec_(recording), base_(recording.start->clone()) {
    for (const auto& [path, number] : rec_.start_files) {
      files_[number] = base_->files().at(path);
      names_[path] = number;
      base_->set(path, nullptr);  // keeps the folders
    }
  }

  void apply(size_t i) {
    const RecordedOp& op = rec_.ops[i];
    if (op.kind == OpKind::kWrite || is_name(op.kind)) {
      pending_.push_back(i);
    } else if (op.kind == OpKind::kDatasync) {
      settle([&](const RecordedOp& p) { return p.kind == OpKind::kWrite && p.file == op.file; });
    } else if (op.kind == OpKind::kSyncDir) {
      // A rename between folders is durable after the sync of its target folder.
      settle([&](const RecordedOp& p) {
        return is_name(p.kind) && MemFs::parent(p.to.empty() ? p.path : p.to) == op.path;
      });
    }
  }

  const std::vector<size_t>& pending() const { return pending_; }
  const RecordedOp& op(size_t i) const { return rec_.ops[i]; }

  std::shared_ptr<MemFs> build(const Survivors& s) const {
    auto fs = base_->clone();
    auto names = names_;
    std::map<uint32_t, std::vector<size_t>> writes;  // positions in pending_
    for (size_t i = 0; i < pending_.size(); ++i) {
      const RecordedOp& op = rec_.ops[pending_[i]];
      if (op.kind == OpKind::kWrite) {
        writes[op.file].push_back(i);
      } else if (s.kept[i]) {
        apply_name(op, names, *fs);
      }
    }
    std::map<uint32_t, std::shared_ptr<MemInode>> inodes;
    for (const auto& [path, number] : names) {
      const std::string dir = MemFs::parent(path);
      if (dir != "/" && dir != "." && !fs->exists(dir)) continue;  // the folder is lost
      auto& inode = inodes[number];
      if (!inode) inode = contents(number, writes[number], s);
      fs->set(path, inode);
    }
    return fs;
  }

 private:
  template <typename Match>
  void settle(Match match) {
    std::vector<size_t> rest;
    for (size_t i : pending_) {
      const RecordedOp& op = rec_.ops[i];
      if (!match(op)) {
        rest.push_back(i);
      } else if (op.kind == OpKind::kWrite) {
        write(file(op.file)->own(), op.offset, op.data);
      } else {
        apply_name(op, names_, *base_);
      }
    }
    pending_ = std::move(rest);
  }

  static void apply_name(const RecordedOp& op, std::map<std::string, uint32_t>& names, MemFs& fs) {
    switch (op.kind) {
      case OpKind::kCreate:
        names[op.path] = op.file;
        break;
      case OpKind::kRename:
        names.erase(op.path);
        names[op.to] = op.file;
        break;
      case OpKind::kLink:
        names[op.to] = op.file;
        break;
      case OpKind::kUnlink:
        names.erase(op.path);
        break;
      default: {
        const std::string dir = MemFs::parent(op.path);
        if (dir == "/" || dir == "." || fs.exists(dir)) fs.make_dir(op.path);
      }
    }
  }

  static void write(std::string& to, uint64_t offset, std::string_view data) {
    if (to.size() < offset + data.size()) to.resize(offset + data.size());
    to.replace(offset, data.size(), data);
  }

  std::shared_ptr<MemInode>& file(uint32_t number) {
    auto& inode = files_[number];
    if (!inode) inode = std::make_shared<MemInode>();
    return inode;
  }

  std::shared_ptr<MemInode> contents(uint32_t number, const std::vector<size_t>& writes, const Survivors& s) const {
    auto inode = std::make_shared<MemInode>();
    if (auto it = files_.find(number); it != files_.end()) inode->bytes = it->second->bytes;
    if (writes.empty()) return inode;
    std::string& bytes = inode->own();
    const size_t safe = bytes.size();
    std::mt19937_64 rng(s.seed ^ number);
    size_t end = safe;
    std::vector<bool> there;  // sectors after `safe` that were written
    for (size_t i : writes) {
      const RecordedOp& op = rec_.ops[pending_[i]];
      if (s.grown) end = std::max(end, op.offset + op.data.size());
      if (!s.kept[i]) continue;
      const size_t sectors = (op.data.size() + kDiskSector - 1) / kDiskSector;
      const size_t cut = sectors > 1 ? 1 + rng() % (sectors - 1) : sectors;
      for (size_t k = 0; k < sectors; ++k) {
        if (s.tear[i] == Tear::kHead && k >= cut) break;
        if (s.tear[i] == Tear::kTail && k < cut) continue;
        if (s.tear[i] == Tear::kScattered && rng() % 2) continue;
        const size_t at = k * kDiskSector, n = std::min(kDiskSector, op.data.size() - at);
        write(bytes, op.offset + at, std::string_view(op.data).substr(at, n));
        const size_t sector = (op.offset + at) / kDiskSector;
        if (there.size() <= sector) there.resize(sector + 1);
        there[sector] = true;
      }
    }
    if (bytes.size() < end) bytes.resize(end);
    fill_lost(bytes, safe, there, s, number, rng);
    return inode;
  }

  void fill_lost(std::string& bytes, size_t safe, const std::vector<bool>& there, const Survivors& s, uint32_t number,
                 std::mt19937_64& rng) const {
    if (s.fill == Fill::kZeros) return;
    const std::string* other = nullptr;
    for (const auto& [n, inode] : files_) {
      if (n != number && (!other || inode->bytes->size() >= other->size())) other = inode->bytes.get();
    }
    for (size_t at = safe; at < bytes.size();) {
      const size_t sector = at / kDiskSector, next = std::min(bytes.size(), (sector + 1) * kDiskSector);
      if (sector >= there.size() || !there[sector]) {
        for (; at < next; ++at) {
          const bool copy = s.fill == Fill::kOtherFile && other && at < other->size();
          bytes[at] = copy ? (*other)[at] : char(rng());
        }
      }
      at = next;
    }
  }

  const Recording& rec_;
  const std::shared_ptr<MemFs> base_;  // durable folders, no files
  std::map<std::string, uint32_t> names_;
  std::map<uint32_t, std::shared_ptr<MemInode>> files_;
  std::vector<size_t> pending_;  // operations that are not durable yet, in order
};

// Kinds of survivors. count() and make() enumerate those of one prefix.
enum Kind { kBasic, kSingle, kPair, kTorn, kMixed, kKinds };
constexpr std::array<double, kKinds> kShare = {0.30, 0.25, 0.15, 0.15, 0.15};

size_t count(Kind kind, const Disk& disk) {
  const size_t m = disk.pending().size();
  if (kind == kBasic) return m == 0 ? 1 : 4;
  if (kind == kSingle) return 2 * m;
  if (kind == kPair) return m * (m - 1);  // 0 for m = 0
  if (kind == kMixed) return m < 2 ? 0 : 6;
  size_t writes = 0;
  for (size_t i : disk.pending()) writes += disk.op(i).kind == OpKind::kWrite;
  return writes * 12;
}

Survivors make(Kind kind, size_t variant, const Disk& disk, uint64_t seed) {
  const size_t m = disk.pending().size();
  auto is_write = [&](size_t i) { return disk.op(disk.pending()[i]).kind == OpKind::kWrite; };
  auto label = [&](size_t i) {
    const RecordedOp& op = disk.op(disk.pending()[i]);
    return "op " + std::to_string(disk.pending()[i]) + " (" + (is_write(i) ? "write to " : "name ") + op.path + ")";
  };
  Survivors s;
  s.kept.assign(m, true);
  s.tear.assign(m, Tear::kWhole);
  s.seed = seed;
  std::mt19937_64 rng(seed);
  if (kind == kBasic) {
    for (size_t i = 0; i < m; ++i)
      s.kept[i] = variant == 0 || (variant == 2 && !is_write(i)) || (variant == 3 && is_write(i));
    s.what = variant == 0   ? "all kept"
             : variant == 1 ? "all dropped"
             : variant == 2 ? "writes dropped"
                            : "names dropped";
  } else if (kind == kSingle) {
    const size_t i = variant / 2;
    if (variant % 2) s.kept.assign(m, false);
    s.kept[i] = variant % 2;
    s.what = (variant % 2 ? "kept only " : "dropped only ") + label(i);
  } else if (kind == kPair) {
    const size_t pair = variant / 2;  // index of (i, j) with i < j, ordered by j
    size_t j = 1;
    while (j * (j + 1) / 2 <= pair) ++j;
    const size_t i = pair - j * (j - 1) / 2;
    if (variant % 2) s.kept.assign(m, false);
    s.kept[i] = s.kept[j] = variant % 2;
    s.what = (variant % 2 ? "kept only " : "dropped only ") + label(i) + " and " + label(j);
  } else if (kind == kTorn) {
    size_t nth = variant / 12, i = 0;
    for (;; ++i) {
      if (is_write(i) && nth-- == 0) break;
    }
    if (variant % 2) {
      for (size_t k = 0; k < m; ++k) s.kept[k] = !is_write(k) || k == i;  // the only write
    }
    s.tear[i] = std::array{Tear::kHead, Tear::kTail, Tear::kScattered}[variant / 2 % 3];
    s.grown = variant / 6 % 2;
    s.fill = Fill(rng() % 3);
    s.what = "torn " + label(i) + ", variant " + std::to_string(variant % 12);
  } else {
    for (size_t i = 0; i < m; ++i) {
      s.kept[i] = rng() % 2;
      s.tear[i] = rng() % 4 == 0 ? Tear(1 + rng() % 3) : Tear::kWhole;
    }
    s.grown = rng() % 2;
    s.fill = Fill(rng() % 3);
    s.what = "mixture " + std::to_string(variant);
  }
  return s;
}

}  // namespace

size_t for_each_crash(const Recording& recording, uint64_t seed, size_t cap,
                      const std::function<void(CrashState&)>& visit, size_t first_prefix) {
  // First pass: the number of states of each kind per prefix.
  const size_t prefixes = recording.ops.size() + 1;
  std::array<std::vector<size_t>, kKinds> ends;  // running sums
  {
    Disk disk(recording);
    for (size_t p = 0; p < prefixes; ++p) {
      if (p > 0) disk.apply(p - 1);
      for (int k = 0; k < kKinds; ++k) {
        ends[k].push_back((p ? ends[k].back() : 0) + (p < first_prefix ? 0 : count(Kind(k), disk)));
      }
    }
  }
  // An even sample of each kind; a kind with fewer states leaves its share to the next.
  struct Pick {
    size_t prefix;
    Kind kind;
    size_t variant;
    bool operator<(const Pick& o) const {
      return std::tie(prefix, kind, variant) < std::tie(o.prefix, o.kind, o.variant);
    }
  };
  std::vector<Pick> picks;
  std::mt19937_64 rng(seed);
  double allowance = 0;
  for (int k = 0; k < kKinds; ++k) {
    allowance += kShare[k] * double(cap);
    const size_t total = ends[k].back(), take = std::min(total, size_t(allowance));
    allowance -= double(take);
    for (size_t j = 0; j < take; ++j) {
      const size_t low = size_t(__uint128_t(total) * j / take), high = size_t(__uint128_t(total) * (j + 1) / take);
      const size_t index = low + rng() % (high - low);
      const size_t p = size_t(std::upper_bound(ends[k].begin(), ends[k].end(), index) - ends[k].begin());
      picks.push_back({p, Kind(k), index - (p ? ends[k][p - 1] : 0)});
    }
  }
  std::sort(picks.begin(), picks.end());
  // Second pass: build them.
  Disk disk(recording);
  size_t applied = 0;
  for (const Pick& pick : picks) {
    while (applied < pick.prefix) disk.apply(applied++);
    const Survivors s = make(pick.kind, pick.variant, disk, seed ^ (pick.prefix * 1000003 + pick.variant));
    CrashState state{disk.build(s), pick.prefix, "after " + std::to_string(pick.prefix) + " operations, " + s.what};
    visit(state);
  }
  return picks.size();
}

}  // namespace thermocline::testing
