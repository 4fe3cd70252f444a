#include "ssd/repair.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "ssd/catalog.h"
#include "ssd/cursor.h"
#include "ssd/log_writer.h"
#include "ssd/repair_files.h"
#include "ssd/salvage.h"
#include "util/thread_pool.h"

namespace thermocline {

using namespace ssd;

namespace {

constexpr char kLockFile[] = "LOCK";
constexpr char kDamagedFolder[] = "damaged";

struct SegmentScan {
  std::string rebuild;                     // "" or the first damaged page of header and key columns
  std::map<uint64_t, ExtentScan> damaged;  // by seq
  bool lost = false;
};

// ---- the repair

class Repair {
 public:
  Repair(Context& ctx, const RepairOptions& options, RepairReport& report)
      : ctx_(ctx),
        options_(options),
        report_(report),
        catalog_(ctx),
        pool_(2),
        damaged_dir_(ctx.path + "/" + kDamagedFolder) {}

  void plan(std::string identity_cause) {
    identity_cause_ = std::move(identity_cause);
    if (!identity_cause_.empty()) report_.rebuilt.push_back({kIdentityFile, identity_cause_});
    catalog_.load();
    read_manifests();
    report_.epoch = manifests_.rbegin()->first;
    scan_bases();
    scan_segments();
  }

  // Counts the rows that apply() would hide.
  void count_hidden() {
    if (options_.keep_older) return;
    for (auto& [epoch, m] : manifests_)
      if (changed_.count(epoch)) count_hidden(m);
  }

  void apply() {
    if (report_.rebuilt.empty() && report_.losses.empty() && report_.lost_commits.empty() && bases_.empty()) return;
    remove_temporary_files();
    keep_damaged_files();
    if (!identity_cause_.empty()) publish_file(*ctx_.fs, ctx_.path, kIdentityFile, ctx_.id.encode());
    for (auto& [_, scan] : bases_)
      if (!scan.replaced()) replace_base(scan);
    for (auto& [number, scan] : segments_)
      if (!scan.lost) replace_segment(number, scan);
    ctx_.fs->sync_dir(ctx_.path);
    ctx_.fs->failpoint("repair.replaced");
    for (auto& [_, scan] : bases_)
      if (scan.replaced()) copy_rest(scan);
    for (auto& [number, scan] : segments_)
      if (scan.lost) copy_rest(number);
    ctx_.fs->failpoint("repair.copied");
    for (auto& [epoch, m] : manifests_) republish(m);
    for (auto& lost : report_.lost_commits)
      if (!manifests_.count(lost.epoch)) ctx_.fs->unlink(ctx_.path + "/" + manifest_name(lost.epoch));
    ctx_.fs->sync_dir(ctx_.path);
    ctx_.fs->failpoint("repair.published");
    // Only now: the files that no manifest lists any more. They stay in damaged/.
    Catalog rest(ctx_);
    rest.load();
    rest.collect();
    ctx_.fs->sync_dir(ctx_.path);
    ctx_.fs->failpoint("repair.done");
  }

 private:
  struct NewSegment {
    std::optional<SegmentRecord> segment;      // none: no row is left
    std::map<uint64_t, ExtentRecord> extents;  // by seq
  };

  // ---- plan

  void read_manifests() {
    std::vector<uint64_t> epochs;
    for (auto& name : ctx_.fs->list(ctx_.path))
      if (uint64_t epoch; parse_manifest_name(name, &epoch)) epochs.push_back(epoch);
    std::sort(epochs.rbegin(), epochs.rend());  // newest first: of two that contradict each other the newer counts
    for (uint64_t epoch : epochs) {
      try {
        Manifest m = catalog_.read(epoch);
        const bool trimmed = trim_segments(m);
        if (!uses_.add(m, ctx_.g))
          throw CorruptionError(manifest_name(epoch) + ": it contradicts the manifest of a newer commit");
        if (trimmed) {
          changed_.insert(epoch);
          report_.rebuilt.push_back(
              {manifest_name(epoch), "a segment has pages that neither its file nor an extent has"});
        }
        manifests_.emplace(epoch, std::move(m));
      } catch (const CorruptionError& e) {
        report_.lost_commits.push_back({epoch, cause_of(e)});
      } catch (const IoError& e) {
        if (!is_unreadable(e)) throw;
        report_.lost_commits.push_back({epoch, cause_of(e)});
      }
    }
    if (!manifests_.empty()) return;
    if (epochs != std::vector<uint64_t>{0})
      throw CorruptionError(ctx_.path +
                            ": no manifest is valid, so no commit can be recovered; restore a copy of the "
                            "store" +
                            (report_.lost_commits.empty() ? "" : ": " + report_.lost_commits.front().cause));
    // A store without a commit.
    report_.rebuilt.push_back({manifest_name(0), report_.lost_commits[0].cause});
    report_.lost_commits.clear();
    Manifest empty;
    std::copy(std::begin(ctx_.id.store_id), std::end(ctx_.id.store_id), empty.store_id);
    empty.partitions.emplace_back();
    manifests_.emplace(0, std::move(empty));
    changed_.insert(0);
  }

  // Lowers the pages of segments to the end of their extents where the file has fewer: a repaired file would have all
  // of them, and a hostile manifest states terabytes. Returns whether there are such segments.
  bool trim_segments(Manifest& m) {
    std::map<uint64_t, uint64_t> ends;  // by file number
    for (const ExtentRecord& e : m.extents)
      ends[e.segment] = end_of_keys(e) + (e.tombstones ? 0 : ctx_.g.row_pages(e.rows));
    bool trimmed = false;
    for (SegmentRecord& s : m.segments) {
      const uint64_t end = std::max<uint64_t>(ends[s.file], 1);
      if (s.pages <= end || PageReader(ctx_, FileKind::kSegment, s.file, s.nonce).count() >= s.pages) continue;
      s.pages = end;
      trimmed = true;
    }
    return trimmed;
  }

  void report(FileKind kind, uint64_t number, const std::string& rebuild, const std::vector<LostPages>& lost,
              const std::vector<uint64_t>& epochs) {
    const std::string file = file_name(kind, number);
    if (!rebuild.empty()) report_.rebuilt.push_back({file, rebuild});
    for (auto& l : lost)
      report_.losses.push_back({file, l.cause, l.first_page, l.pages, l.rows, l.range.lo, l.range.hi, epochs});
  }

  void scan_bases() {
    for (auto& [number, use] : uses_.bases) {
      BaseScan scan = scan_base(ctx_, use.record, use.range);
      if (!scan.damaged()) continue;
      if (scan.replaced()) changed_.insert(use.epochs.begin(), use.epochs.end());
      report(FileKind::kBase, number, scan.rebuild, scan.lost, use.epochs);
      bases_.emplace(number, std::move(scan));
    }
  }

  void scan_segments() {
    for (auto& [number, use] : uses_.segments) {
      SegmentScan scan;
      PageReader pages(ctx_, FileKind::kSegment, number, use.nonce);
      if (!pages.header()) scan.rebuild = "page 0: " + pages.cause();
      else if (pages.count() < use.pages) scan.rebuild = "the file is truncated";
      std::vector<LostPages> lost;
      for (auto& [_, record] : use.extents) {
        ExtentScan extent = scan_extent(ctx_, pages, record);
        if (!extent.damaged()) continue;
        if (scan.rebuild.empty()) scan.rebuild = extent.rebuild;
        scan.lost |= !extent.lost.empty();
        lost.insert(lost.end(), extent.lost.begin(), extent.lost.end());
        scan.damaged.emplace(record.seq, std::move(extent));
      }
      if (scan.rebuild.empty() && !scan.lost) continue;
      if (scan.lost) changed_.insert(use.epochs.begin(), use.epochs.end());
      report(FileKind::kSegment, number, scan.lost ? "" : scan.rebuild, lost, use.epochs);
      segments_.emplace(number, std::move(scan));
    }
  }

  // The lost versions of a commit.
  std::vector<const LostVersions*> lost_versions(const Manifest& m) const {
    std::vector<const LostVersions*> lost;
    for (auto& e : m.extents)
      if (auto segment = segments_.find(e.segment); segment != segments_.end())
        if (auto scan = segment->second.damaged.find(e.seq);
            scan != segment->second.damaged.end() && !scan->second.versions.empty())
          lost.push_back(&scan->second.versions);
    return lost;
  }

  // Those that may hide older versions of a partition's rows.
  static std::vector<const LostVersions*> hiding(const std::vector<const LostVersions*>& lost, const PartitionRecord& p,
                                                 const HashRange& range) {
    std::vector<const LostVersions*> here;
    for (auto* versions : lost)
      if (versions->seq > p.merged_seq && versions->intersects(range)) here.push_back(versions);
    return here;
  }

  static bool is_hidden(const std::vector<const LostVersions*>& lost, uint64_t hash, uint64_t seq) {
    return std::any_of(lost.begin(), lost.end(), [&](auto* l) { return l->seq > seq && l->contains(hash); });
  }

  void count_hidden(const Manifest& m) {
    struct Newest {
      uint64_t seq = 0;  // 0: the base
      bool deleted = false;
    };
    const std::vector<const LostVersions*> lost = lost_versions(m);
    for (size_t i = 0; i < m.partitions.size(); ++i) {
      const PartitionRecord& p = m.partitions[i];
      const HashRange range = range_of(m, i);
      const std::vector<const LostVersions*> here = hiding(lost, p, range);
      if (here.empty()) continue;
      std::unordered_map<uint64_t, Newest> newest;  // by hash, which is unique per key
      if (p.file) {
        const auto scan = bases_.find(p.file);
        PageReader pages(ctx_, FileKind::kBase, p.file, p.nonce);
        for (uint64_t page = 1; page <= p.pages; ++page) {
          if (scan != bases_.end() && scan->second.lost_page(page)) continue;
          const uint8_t* bytes = pages.read(page, PageKind::kRows);
          for (uint32_t k = 0; bytes && k < page_header(bytes).count; ++k)
            newest[hash_key(page_key(bytes, PageKind::kRows, k))];
        }
      }
      for (auto& e : m.extents) {
        if (e.seq <= p.merged_seq) continue;
        const std::vector<uint64_t>& hashes = kept_hashes(e);
        auto at = std::lower_bound(hashes.begin(), hashes.end(), range.lo);
        for (; at != hashes.end() && *at <= range.hi; ++at) newest[*at] = {e.seq, e.tombstones != 0};
      }
      for (auto& [hash, version] : newest)
        report_.rows_hidden += !version.deleted && is_hidden(here, hash, version.seq);
    }
  }

  // Hashes of the rows or deletions of an extent that are not lost, ascending.
  const std::vector<uint64_t>& kept_hashes(const ExtentRecord& e) {
    auto [it, added] = kept_hashes_.try_emplace(e.seq);
    if (!added) return it->second;
    PageReader pages(ctx_, FileKind::kSegment, e.segment, uses_.segments[e.segment].nonce);
    for (uint64_t key : scan_extent(ctx_, pages, e).keys) it->second.push_back(hash_key(key));
    return it->second;
  }

  // ---- apply

  void remove_temporary_files() {
    for (auto& name : ctx_.fs->list(ctx_.path)) {
      FileKind kind;
      uint64_t number;
      if (name.ends_with(".tc.tmp") && parse_file_name(name.substr(0, name.size() - 4), &kind, &number))
        ctx_.fs->unlink(ctx_.path + "/" + name);
    }
  }

  // Links every file that is about to be replaced or removed into damaged/.
  void keep_damaged_files() {
    std::set<std::string> names;
    if (!identity_cause_.empty()) names.insert(kIdentityFile);
    for (uint64_t epoch : changed_) names.insert(manifest_name(epoch));
    for (auto& lost : report_.lost_commits) names.insert(manifest_name(lost.epoch));
    for (auto& [number, _] : bases_) names.insert(file_name(FileKind::kBase, number));
    for (auto& [number, _] : segments_) names.insert(file_name(FileKind::kSegment, number));
    if (!report_.lost_commits.empty()) {
      FileKind kind;
      uint64_t number;
      for (auto& name : ctx_.fs->list(ctx_.path))
        if (parse_file_name(name, &kind, &number) && !uses_.names(number)) names.insert(name);
    }
    for (const std::string& name : names) set_aside(name);
    sync_damaged_dir();
    ctx_.fs->sync_dir(ctx_.path);
    ctx_.fs->failpoint("repair.linked");
  }

  void set_aside(const std::string& name) {
    const std::string from = ctx_.path + "/" + name;
    if (!ctx_.fs->exists(from) || !aside_.insert(name).second) return;
    report_.set_aside.push_back(ctx_.fs->link_unused(from, damaged_dir_, name));
  }

  // The folder does not exist if nothing is set aside: a missing STORE is rebuilt.
  void sync_damaged_dir() {
    if (!aside_.empty()) ctx_.fs->sync_dir(damaged_dir_);
  }

  // Writes a file with the undamaged bytes under a temporary name and renames it.
  template <class Fn>
  void replace(FileKind kind, uint64_t number, uint64_t nonce, Fn&& write) {
    const std::string path = ctx_.file_path(kind, number), temp = path + ".tmp";
    std::shared_ptr<DataFile> file = create_data_file(ctx_, kind, number, nonce, temp);
    write(file);
    file->file->datasync();
    ctx_.fs->rename(temp, path);
    ctx_.fs->failpoint("repair.renamed");
  }

  void replace_base(const BaseScan& scan) {
    replace(FileKind::kBase, scan.record.file, scan.record.nonce, [&](std::shared_ptr<DataFile> file) {
      copy_base(ctx_, scan, file, scan.record.filter_bytes ? Filter::of_bytes(scan.record.filter_bytes) : Filter());
    });
  }

  void replace_segment(uint64_t number, const SegmentScan& scan) {
    const SegmentUse& use = uses_.segments[number];
    replace(FileKind::kSegment, number, use.nonce, [&](std::shared_ptr<DataFile> file) {
      PageReader old(ctx_, FileKind::kSegment, number, use.nonce);
      PageAppender out(ctx_, *file);
      auto extent = scan.damaged.begin();
      for (uint64_t p = 1; p < use.pages; ++p) {
        uint8_t* page = out.next();
        while (extent != scan.damaged.end() && p >= end_of_keys(extent->second.record)) ++extent;
        if (extent != scan.damaged.end() && p >= extent->second.record.first_page)
          write_key_page(page, extent->second, p, use.nonce);
        else if (const uint8_t* bytes = old.raw(p))  // else no extent needs it
          std::memcpy(page, bytes, ctx_.g.page_bytes);
      }
      out.flush();
    });
  }

  uint64_t end_of_keys(const ExtentRecord& e) const { return e.first_page + ctx_.g.key_pages(e.rows); }

  void write_key_page(uint8_t* page, const ExtentScan& extent, uint64_t number, uint64_t nonce) const {
    const uint64_t first = (number - extent.record.first_page) * ctx_.g.keys_per_page();
    const uint64_t count = std::min<uint64_t>(ctx_.g.keys_per_page(), extent.record.rows - first);
    const ExtentInfo info{extent.record.seq, first, extent.record.rows};
    std::memcpy(page + sizeof(PageHeader), &info, sizeof info);
    std::memcpy(page + keys_offset(PageKind::kKeys), extent.keys.data() + first, count * 8);
    seal_page(page, ctx_.g, nonce, number, PageKind::kKeys, static_cast<uint32_t>(count));
  }

  // A filter for `rows` rows with the bits per row of the old file.
  static Filter filter_like(const PartitionRecord& old, uint64_t rows) {
    if (old.filter_bytes == 0 || old.rows == 0) return {};
    return Filter(rows, static_cast<uint32_t>(std::clamp<uint64_t>(old.filter_bytes * 8 / old.rows, 1, 64)));
  }

  PartitionRecord record_of(PartitionRecord r, const std::shared_ptr<const BaseFile>& base) const {
    r.file = r.nonce = r.rows = r.pages = r.filter_bytes = 0;
    if (!base) return r;
    base->data->file->datasync();
    r.file = base->data->number;
    r.nonce = base->data->nonce;
    r.rows = base->rows;
    r.pages = base->pages();
    r.filter_bytes = base->filter_bytes;
    return r;
  }

  // A new base file with the rows of the pages that are not lost.
  void copy_rest(const BaseScan& scan) {
    uint64_t lost = 0;
    for (auto& l : scan.lost) lost += l.rows;
    std::shared_ptr<const BaseFile> base;
    if (const uint64_t rows = scan.record.rows - lost)
      base = copy_base(ctx_, scan, catalog_.create(FileKind::kBase),
                       scan.drop_filter ? Filter() : filter_like(scan.record, rows));
    new_bases_[scan.record.file] = record_of(scan.record, base);
  }

  // A new segment with the rows and deletions of the pages that are not lost.
  void copy_rest(uint64_t number) {
    const SegmentUse& use = uses_.segments[number];
    PageReader pages(ctx_, FileKind::kSegment, number, use.nonce);
    LogWriter log(ctx_, pool_, std::numeric_limits<size_t>::max(), [this](FileKind k) { return catalog_.create(k); });
    NewSegment out;
    std::shared_ptr<DataFile> file;
    for (auto& [_, record] : use.extents) {
      const ExtentScan scan = scan_extent(ctx_, pages, record);
      if (scan.keys.empty()) continue;
      std::vector<Item> items(scan.keys.size());
      for (size_t i = 0; i < items.size(); ++i) items[i] = {hash_key(scan.keys[i]), static_cast<uint32_t>(i)};
      const bool tombstones = record.tombstones != 0;
      const std::vector<uint8_t> bytes = tombstones ? std::vector<uint8_t>() : read_rows(ctx_, pages, scan);
      const RowsIn rows{bytes.data(), ctx_.g.row_bytes};
      log.start_at(0, record.seq);
      std::vector<HashAndPage> entries;
      const auto extent = log.write(items, scan.keys.data(), tombstones ? nullptr : &rows, 0, entries);
      file = extent->segment;
      out.extents[record.seq] = {record.seq, file->number, extent->first_page, extent->rows, record.tombstones};
    }
    if (file) {
      file->file->datasync();
      out.segment = SegmentRecord{file->number, file->nonce, file->pages};
    }
    new_segments_[number] = std::move(out);
  }

  // Publishes a manifest that lists the new files, if it listed one that is replaced.
  void republish(Manifest& m) {
    if (!changed_.count(m.epoch)) return;
    const std::vector<const LostVersions*> lost = lost_versions(m);
    for (auto& p : m.partitions)
      if (auto it = new_bases_.find(p.file); p.file && it != new_bases_.end()) {
        const PartitionRecord old = p;
        p = it->second;
        p.lo = old.lo;
        p.merged_seq = old.merged_seq;
      }
    substitute_segments(m);
    if (!options_.keep_older) remove_hidden_versions(m, lost);
    m.next_file = catalog_.next_file();
    ++m.next_seq;  // rows may have changed without an extent: see SsdStore::changes_since
    sync_damaged_dir();
    ctx_.fs->sync_dir(ctx_.path);
    publish_file(*ctx_.fs, ctx_.path, manifest_name(m.epoch), m.encode());
    ctx_.fs->failpoint("repair.manifest");
  }

  void substitute_segments(Manifest& m) const {
    std::vector<ExtentRecord> extents;
    std::vector<SegmentRecord> segments;
    for (auto& e : m.extents) {
      auto it = new_segments_.find(e.segment);
      if (it == new_segments_.end()) extents.push_back(e);
      else if (auto at = it->second.extents.find(e.seq); at != it->second.extents.end()) extents.push_back(at->second);
    }
    for (auto& s : m.segments) {
      auto it = new_segments_.find(s.file);
      const SegmentRecord record = it == new_segments_.end() ? s : it->second.segment.value_or(SegmentRecord{});
      const bool used = std::any_of(extents.begin(), extents.end(), [&](auto& e) { return e.segment == record.file; });
      if (used) segments.push_back(record);
    }
    m.extents = std::move(extents);
    m.segments = std::move(segments);
  }

  // Merges the partitions that may have older versions of lost rows, without these versions.
  void remove_hidden_versions(Manifest& m, const std::vector<const LostVersions*>& lost) {
    std::vector<std::shared_ptr<const Extent>> extents;
    for (size_t i = 0; i < m.partitions.size(); ++i) {
      PartitionRecord& p = m.partitions[i];
      const HashRange range = range_of(m, i);
      const std::vector<const LostVersions*> here = hiding(lost, p, range);
      if (here.empty()) continue;
      if (extents.empty()) extents = open_extents(m);
      if (uses_.bases.count(p.file)) set_aside(file_name(FileKind::kBase, p.file));
      p = merge_without(p, range, here, extents);
      p.merged_seq = m.next_seq - 1;
      ctx_.fs->failpoint("repair.merged");
    }
  }

  std::vector<std::shared_ptr<const Extent>> open_extents(const Manifest& m) {
    std::vector<std::shared_ptr<const Extent>> out;
    std::shared_ptr<DataFile> segment;
    for (auto& r : m.extents) {
      if (!segment || segment->number != r.segment) {
        auto s = std::find_if(m.segments.begin(), m.segments.end(), [&](auto& s) { return s.file == r.segment; });
        segment = open_data_file(ctx_, FileKind::kSegment, s->file, s->nonce, s->pages);
      }
      auto extent = std::make_shared<Extent>();
      extent->seq = r.seq;
      extent->segment = segment;
      extent->first_page = static_cast<uint32_t>(r.first_page);
      extent->rows = r.rows;
      extent->tombstones = r.tombstones != 0;
      read_extent_keys(ctx_, *extent, [](uint64_t, uint32_t) {});
      out.push_back(std::move(extent));
    }
    return out;
  }

  PartitionRecord merge_without(const PartitionRecord& p, const HashRange& range,
                                const std::vector<const LostVersions*>& lost,
                                const std::vector<std::shared_ptr<const Extent>>& extents) {
    PartitionView view{range.lo, range.hi, p.file ? open_base(ctx_, p, false) : nullptr, {}};
    // Estimate of the rows, for the size of the filter: hashes are uniform.
    const double share = (static_cast<double>(range.hi - range.lo) + 1) / 0x1p64;
    double rows = static_cast<double>(p.rows);
    for (auto& extent : extents)
      if (extent->seq > p.merged_seq) {
        view.extents.push_back(extent);
        rows += share * static_cast<double>(extent->rows);
      }
    PartitionCursor cursor(ctx_, std::move(view), ctx_.sizes.merge_bytes);
    std::unique_ptr<BaseWriter> writer;
    while (cursor.next()) {
      const bool hidden = is_hidden(lost, hash_key(cursor.key()), cursor.seq());
      report_.rows_hidden += hidden;
      if (hidden) continue;
      if (!writer)
        writer = std::make_unique<BaseWriter>(ctx_, catalog_.create(FileKind::kBase),
                                              filter_like(p, static_cast<uint64_t>(rows) + 64));
      writer->add(cursor.key(), cursor.row());
    }
    return record_of(p, writer ? writer->finish() : nullptr);
  }

  Context& ctx_;
  const RepairOptions options_;
  RepairReport& report_;
  Catalog catalog_;  // numbers new files
  ThreadPool pool_;
  const std::string damaged_dir_;
  std::string identity_cause_;  // damage of STORE; "": none
  std::map<uint64_t, Manifest> manifests_;
  std::set<std::string> aside_;  // names of files that are in damaged/ now
  std::set<uint64_t> changed_;   // epochs whose manifests are published again
  FileUses uses_;
  std::map<uint64_t, BaseScan> bases_;             // damaged files, by number
  std::map<uint64_t, SegmentScan> segments_;       // the same
  std::map<uint64_t, PartitionRecord> new_bases_;  // by the number of the replaced file
  std::map<uint64_t, NewSegment> new_segments_;
  std::map<uint64_t, std::vector<uint64_t>> kept_hashes_;  // by seq, for count_hidden()
};

}  // namespace

RepairReport repair_store(std::shared_ptr<FileSystem> fs, const std::string& where, const RepairOptions& options) {
  std::string path = where;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (!fs->exists(path)) throw NotFoundError(path + ": no such folder");
  const std::vector<std::string> names = fs->list(path);
  uint64_t epoch;
  if (std::none_of(names.begin(), names.end(),
                   [&](auto& name) { return name == kIdentityFile || parse_manifest_name(name, &epoch); }))
    throw FormatError(path + ": not a store: it has neither the file " + kIdentityFile + " nor a manifest");
  const std::unique_ptr<FileLock> lock = fs->lock(path + "/" + kLockFile);
  const std::string file = path + "/" + kIdentityFile;
  std::string cause = "the file is missing";
  std::optional<Identity> id;
  try {
    if (fs->exists(file))
      id = read_damaged(*fs, file, [&](const std::string& bytes) { return Identity::decode(bytes, file); });
  } catch (const CorruptionError& e) {
    cause = cause_of(e);
  }
  if (id) cause.clear();
  else id = rebuild_identity(*fs, path, cause);
  Context ctx(fs, path, *id, options.mem_budget, 0);
  RepairReport report;
  Repair repair(ctx, options, report);
  repair.plan(cause);
  if (options.dry_run) repair.count_hidden();
  else repair.apply();
  return report;
}

}  // namespace thermocline
