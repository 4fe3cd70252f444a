// Open, commit, release, checkpoint and close: the durability of SsdStore.
#include "ssd/store.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <random>
#include <span>
#include <thread>

#include "ssd/impl.h"

namespace thermocline {

using namespace ssd;

namespace {

constexpr char kIdentityFile[] = "STORE";
constexpr char kLockFile[] = "LOCK";
constexpr size_t kOpeningThreads = 16;
constexpr size_t kDeletionsShare = 16;  // of the memory of the write buffer, for deletions that wait for a put()

// Temporary file of a publish_file() or a repair that did not finish.
bool is_temporary(const std::string& name) {
  constexpr std::string_view kEnd = ".tmp";
  if (name.size() <= kEnd.size() || !name.ends_with(kEnd)) return false;
  uint64_t epoch;
  FileKind kind;
  std::string target = name.substr(0, name.size() - kEnd.size());
  return target == kIdentityFile || parse_manifest_name(target, &epoch) || parse_file_name(target, &kind, &epoch);
}

// A file that an interrupted create_store() may have left.
bool is_from_creation(const std::string& name) {
  uint64_t epoch;
  return name == kLockFile || (parse_manifest_name(name, &epoch) && epoch == 0) || is_temporary(name);
}

void validate(const StoreOptions& o) {
  auto require = [](bool ok, const char* rule) {
    if (!ok) throw Error(std::string("store options: ") + rule);
  };
  require(o.max_log_ratio >= 0.01 && o.max_log_ratio <= 100, "max_log_ratio must be from 0.01 to 100");
  require(o.segment_bytes >= kSector, "segment_bytes must be at least 4096");
  require(o.partition_bytes >= kSector, "partition_bytes must be at least 4096");
  require(o.filter_bits <= 64, "filter_bits must be at most 64");
  require(o.merge_threads >= 0 && o.merge_threads <= 64, "merge_threads must be 0 (default) to 64");
}

// A new folder is durable once its parent folder is synced.
void sync_parent(FileSystem& fs, const std::string& path) {
  std::string parent = std::filesystem::path(path).lexically_normal().parent_path().string();
  fs.sync_dir(parent.empty() ? "." : parent);
}

// Creates an empty store. The identity file is published last: a folder without it is not a store.
Identity create_store(FileSystem& fs, const std::string& path, const StoreOptions& options) {
  if (options.row_bytes == 0) throw FormatError(path + ": a new store needs row_bytes");
  Identity id;
  std::random_device device;
  for (auto& word : id.store_id) word = (uint64_t{device()} << 32) ^ device();
  id.geometry = Geometry::of(static_cast<uint32_t>(std::min<size_t>(options.row_bytes, UINT32_MAX)));
  Manifest empty;
  std::copy(std::begin(id.store_id), std::end(id.store_id), empty.store_id);
  empty.partitions.emplace_back();
  publish_file(fs, path, manifest_name(0), empty.encode());
  fs.failpoint("create.manifest");
  publish_file(fs, path, kIdentityFile, id.encode());
  fs.failpoint("create.identity");
  return id;
}

}  // namespace

std::unique_ptr<SsdStore> SsdStore::open(std::shared_ptr<FileSystem> fs, const std::string& where,
                                         const StoreOptions& options) {
  validate(options);
  std::string path = where;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (options.create && options.read_only) throw Error(path + ": create and read_only exclude each other");
  const std::string identity = path + "/" + kIdentityFile;
  const bool folder_exists = fs->exists(path);
  if (!folder_exists && !options.create)
    throw NotFoundError(path + ": no such folder; to create a store there, open it with create=True and row_bytes");
  if (!folder_exists) fs->make_dir(path);
  bool is_store = fs->exists(identity);
  if (!is_store) {
    for (auto& name : fs->list(path))
      if (!is_from_creation(name))
        throw FormatError(path + ": the folder contains '" + name +
                          "' and is not a Thermocline store; choose another folder");
    if (!options.create)
      throw NotFoundError(path + ": no store in this folder; to create one, open it with create=True and row_bytes");
    sync_parent(*fs, path);  // an earlier process may have created the folder and died before this sync
  }
  std::unique_ptr<FileLock> lock;
  if (!options.read_only) lock = fs->lock(path + "/" + kLockFile);
  Identity id = is_store || fs->exists(identity) ? Identity::decode(read_record(*fs, identity), identity)
                                                 : create_store(*fs, path, options);
  if (options.row_bytes != 0 && options.row_bytes != id.geometry.row_bytes)
    throw FormatError(path + ": the store has row_bytes=" + std::to_string(id.geometry.row_bytes) +
                      ", but it was opened with row_bytes=" + std::to_string(options.row_bytes));
  auto impl = std::make_shared<Impl>(std::move(fs), path, id, options, std::move(lock));
  return std::unique_ptr<SsdStore>(new SsdStore(std::move(impl)));
}

SsdStore::SsdStore(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

SsdStore::~SsdStore() {
  if (impl_->foreign()) {
    new std::shared_ptr<Impl>(std::move(impl_));  // leaked: its threads exist only in the parent process
    return;
  }
  try {
    impl_->close();
  } catch (...) {
    // Committed rows do not depend on a clean close.
  }
}

SsdStore::Impl::Impl(std::shared_ptr<FileSystem> fs, const std::string& path, const Identity& id,
                     const StoreOptions& options, std::unique_ptr<FileLock> lock)
    : ctx(fs, path, id, options.mem_budget, options.write_buffer, Merger::threads_of(options)),
      options_(options),
      lock_(std::move(lock)),
      pool_(std::max(2, fs->read_concurrency().workers)),
      catalog_(ctx),
      owner_(getpid()),
      log_(ctx, pool_, options.segment_bytes, [this](FileKind kind) { return catalog_.create(kind); }),
      index_(id.geometry, options.max_log_ratio),
      buffer_(id.geometry.row_bytes, ctx.sizes.write_buffer - ctx.sizes.write_buffer / kDeletionsShare),
      deletions_(0, ctx.sizes.write_buffer / kDeletionsShare),
      reader_(ctx) {
  for (int attempt = 0;; ++attempt) {
    catalog_.load();
    uint64_t epoch = options.epoch.value_or(catalog_.newest());
    if (!catalog_.has(epoch)) {
      if (!options.epoch)
        throw CorruptionError(path + ": the store has no manifest, so its commits are lost; restore a copy of it");
      std::string have;
      for (uint64_t e : catalog_.epochs()) have += (have.empty() ? "" : ", ") + std::to_string(e);
      throw NotFoundError(path + ": no epoch " + std::to_string(epoch) +
                          "; retained epochs: " + (have.empty() ? "none" : have));
    }
    try {
      index_.clear();
      load(catalog_.read(epoch));
      break;
    } catch (const Error& e) {
      // A writer may have released this commit while a read-only open was reading it: retry a few times.
      bool released = options.read_only && attempt < 3 && !ctx.fs->exists(path + "/" + manifest_name(epoch));
      if (released) continue;
      // A repair needs a valid manifest. (It rebuilds that of a store without a commit.)
      if (!catalog_.all_damaged() || catalog_.newest() == 0) throw;
      const std::string text = path + ": no manifest is valid, so no commit can be recovered; restore a copy of the " +
                               "store: " + without_repair_hint(e.what());
      if (auto* io = dynamic_cast<const IoError*>(&e)) throw IoError(text, io->code);
      throw CorruptionError(text);
    }
  }
  if (!options.read_only) {
    ctx.fs->sync_dir(path);  // the writer of the opened commit may have been killed before it was durable
    for (auto& name : ctx.fs->list(path))
      if (is_temporary(name)) ctx.fs->unlink(path + "/" + name);
    catalog_.collect();
  }
  merger_ = std::make_unique<Merger>(ctx, options_, index_, index_mutex_, catalog_);
  merger_->limit();  // throws if the index exceeds the budget
  if (options.expected_rows > 0 && !options.read_only) merger_->require_expected_rows(options.expected_rows);
  if (!options.read_only) {
    merger_->settle();
    return;
  }
  uint64_t need = index_.memory() + ctx.sizes.total(ctx.g);
  if (need > options.mem_budget)
    throw BudgetError(path + ": mem_budget is " + std::to_string(options.mem_budget) + " bytes, but reading it takes " +
                      std::to_string(need) + "; open it with a larger mem_budget");
}

SsdStore::Impl::~Impl() = default;

// Whether the filters of the base files fit beside the rest of the index. If not, they are given up before they are
// loaded.
bool SsdStore::Impl::filters_fit(const Manifest& m) {
  uint64_t filters = 0, rows = 0, rest = ctx.sizes.total(ctx.g) + Merger::kLeastLogRows * Merger::kLogRowBytes;
  for (auto& r : m.partitions) {
    filters += r.filter_bytes;
    rows += r.rows;
    rest += sizeof(Partition) + sizeof(BaseFile) + sizeof(DataFile) + r.pages * 8;
  }
  for (auto& r : m.extents) rest += r.rows * Merger::kLogRowBytes;
  if (filters == 0 || rest + filters <= options_.mem_budget) return true;
  index_.drop_filters();
  warn_filter_given_up(ctx, options_.mem_budget, rows, filters, rest + filters);
  return false;
}

void SsdStore::Impl::load(const Manifest& m) {
  const bool load_filters = options_.filter_bits > 0 && filters_fit(m);
  std::vector<Partition> partitions(m.partitions.size());
  const size_t most = std::min<size_t>(kOpeningThreads, std::max<size_t>(1, m.partitions.size() + m.extents.size()));
  ThreadPool threads(static_cast<int>(std::clamp<size_t>(std::thread::hardware_concurrency(), 1, most)));
  threads.parallel(partitions.size(), [&](size_t i) {
    const PartitionRecord& r = m.partitions[i];
    Partition& p = partitions[i];
    p.lo = r.lo;
    p.hi = i + 1 < m.partitions.size() ? m.partitions[i + 1].lo - 1 : std::numeric_limits<uint64_t>::max();
    p.merged_seq = r.merged_seq;
    if (r.file) p.base = open_base(ctx, r, load_filters);
  });
  std::vector<std::shared_ptr<Extent>> extents;
  std::shared_ptr<DataFile> segment;
  uint32_t vbase = 0;
  size_t next_segment = 0;
  for (auto& r : m.extents) {
    while (!segment || segment->number != r.segment) {
      if (segment) vbase += static_cast<uint32_t>(segment->pages);
      const SegmentRecord& s = m.segments.at(next_segment++);
      segment = open_data_file(ctx, FileKind::kSegment, s.file, s.nonce, s.pages);
      catalog_.opened(segment);
    }
    auto e = std::make_shared<Extent>();
    e->seq = r.seq;
    e->segment = segment;
    e->first_page = static_cast<uint32_t>(r.first_page);
    e->vbase = vbase;
    e->rows = r.rows;
    e->tombstones = r.tombstones != 0;
    extents.push_back(std::move(e));
  }
  if (segment) vbase += static_cast<uint32_t>(segment->pages);
  for (auto& p : partitions)
    if (p.base) catalog_.opened(p.base->data);
  index_.load_partitions(std::move(partitions));
  load_extents(extents, threads);
  log_.start_at(vbase, m.next_seq);
  index_.start_at(m.next_seq);
  epoch_ = m.epoch;
  note_ = m.note;
}

// Adds the extents in order. Several threads read and verify their keys, as many extents at a time as an eighth of the
// budget holds, and add them to the index.
void SsdStore::Impl::load_extents(const std::vector<std::shared_ptr<Extent>>& extents, ThreadPool& threads) {
  uint64_t largest = 1;
  for (auto& e : extents) largest = std::max<uint64_t>(largest, e->rows);
  const size_t fit = options_.mem_budget / 8 / (largest * sizeof(HashAndPage));
  std::vector<std::vector<HashAndPage>> rows(std::clamp<size_t>(fit, 1, static_cast<size_t>(threads.size())));
  for (size_t first = 0; first < extents.size(); first += rows.size()) {
    const size_t count = std::min(rows.size(), extents.size() - first);
    threads.parallel(count, [&](size_t i) {
      Extent& e = *extents[first + i];
      rows[i].clear();
      rows[i].reserve(e.rows);
      read_extent_keys(ctx, e, [&](uint64_t hash, uint32_t page) { rows[i].push_back({hash, page}); });
    });
    index_.add_extents(std::span(extents).subspan(first, count), std::span(rows).first(count), threads);
  }
}

bool SsdStore::Impl::foreign() const { return getpid() != owner_; }

std::shared_lock<FairMutex> SsdStore::Impl::alive() const {
  if (foreign())
    throw Error(ctx.path + ": the store was opened before this process was forked; open it again here, read_only");
  // Also checked before the lock, so that new calls do not delay close().
  if (closed_) throw Error(ctx.path + ": the store is closed");
  std::shared_lock lock(life_);
  if (closed_) throw Error(ctx.path + ": the store is closed");
  return lock;
}

void SsdStore::Impl::require_writable() const {
  if (options_.read_only) throw ReadOnlyError(ctx.path + ": the store was opened read_only");
  std::shared_lock lock(index_mutex_);
  if (!failed_.empty()) throw ReadOnlyError(failed_);
}

void SsdStore::Impl::fail(const std::string& cause) {
  {
    std::unique_lock lock(index_mutex_);
    failed_ = ctx.path + ": read-only since a sync failed (" + cause +
              "): the state on the device is unknown; reopen the store to continue from its last commit";
  }
  throw ReadOnlyError(failed_);
}

void SsdStore::Impl::sync_files(const std::vector<std::shared_ptr<DataFile>>& files) {
  // Marked before the sync: a put() that appends to a file meanwhile clears the mark, and the next commit syncs it.
  std::vector<DataFile*> unsynced;
  for (auto& file : files)
    if (!file->synced.exchange(true)) unsynced.push_back(file.get());
  try {
    // Threads of their own: those of pool_ serve reads, which must not wait for a sync.
    ThreadPool syncs(static_cast<int>(std::min<size_t>(ctx.fs->sync_concurrency(), unsynced.size())));
    syncs.parallel(unsynced.size(), [&](size_t i) {
      unsynced[i]->file->datasync();
      ctx.fs->failpoint("commit.file_synced");
    });
    ctx.fs->sync_dir(ctx.path);
  } catch (const std::exception& e) {
    // The kernel may have dropped the pages and cleared the error: a second sync could succeed without the data.
    fail(e.what());
  }
}

uint64_t SsdStore::Impl::commit(const std::string& note) {
  auto life = alive();
  std::lock_guard committing(commit_mutex_);
  Manifest m;
  std::vector<std::shared_ptr<DataFile>> files;  // keeps the files until the catalog retains them for the epoch
  {
    const auto write = begin_write();  // not held below: puts go on during the syncs
    require_writable();
    ctx.fs->failpoint("commit.begin");
    flush_buffer();
    ctx.fs->failpoint("commit.flushed");
    std::shared_lock lock(index_mutex_);
    m = index_.manifest();
    files = index_.files();
  }
  std::copy(std::begin(ctx.id.store_id), std::end(ctx.id.store_id), m.store_id);
  m.epoch = catalog_.newest() + 1;
  m.next_file = catalog_.next_file();
  m.note = note;
  sync_files(files);
  ctx.fs->failpoint("commit.synced");
  try {
    catalog_.publish(m);
  } catch (const DiskFullError& e) {
    // If the manifest does not exist, nothing is published and the commit can be repeated. If it exists, its durability
    // is unknown.
    if (ctx.fs->exists(ctx.path + "/" + manifest_name(m.epoch))) fail(e.what());
    throw;
  } catch (const Error& e) {
    fail(e.what());
  }
  ctx.fs->failpoint("commit.published");
  {
    std::unique_lock lock(index_mutex_);
    epoch_ = m.epoch;
    note_ = note;
  }
  files.clear();
  catalog_.collect();
  ctx.fs->failpoint("commit.done");
  return m.epoch;
}

void SsdStore::Impl::release(uint64_t epoch) {
  auto life = alive();
  std::lock_guard committing(commit_mutex_);
  require_writable();
  catalog_.require_releasable(epoch);
  try {
    catalog_.release(epoch);
  } catch (const Error& e) {
    fail(e.what());
  }
  catalog_.collect();
}

void SsdStore::Impl::link_checkpoint(const std::string& target) {
  auto life = alive();
  std::lock_guard committing(commit_mutex_);  // the epoch must not be released meanwhile
  uint64_t epoch = this->epoch();             // of the opened commit, which may not be the newest
  if (epoch == 0) throw Error(ctx.path + ": the store has no commit; call commit() before link_checkpoint()");
  if (!catalog_.has(epoch))
    throw NotFoundError(ctx.path + ": epoch " + std::to_string(epoch) + " was released; call commit() first");
  if (ctx.fs->exists(target)) {
    if (!ctx.fs->list(target).empty()) throw FormatError(target + ": the folder is not empty; choose another one");
  } else {
    ctx.fs->make_dir(target);
  }
  Manifest m = catalog_.read(epoch);
  std::vector<std::string> names;
  for (auto& p : m.partitions)
    if (p.file) names.push_back(file_name(FileKind::kBase, p.file));
  for (auto& s : m.segments) names.push_back(file_name(FileKind::kSegment, s.file));
  names.push_back(manifest_name(epoch));
  names.push_back(kIdentityFile);  // last: a folder without it is not a store
  size_t done = 0;
  try {
    for (; done < names.size(); ++done) {
      if (done + 1 == names.size()) ctx.fs->sync_dir(target);
      ctx.fs->link(ctx.path + "/" + names[done], target + "/" + names[done]);
      ctx.fs->failpoint("link.file");
    }
    ctx.fs->sync_dir(target);
    sync_parent(*ctx.fs, target);
  } catch (const Error&) {
    while (done-- > 0) ctx.fs->unlink(target + "/" + names[done]);
    throw;
  }
  ctx.fs->failpoint("link.done");
}

void SsdStore::Impl::close() {
  if (foreign() || closed_.exchange(true)) return;
  std::unique_lock life(life_);  // waits for running calls
  merger_->stop();
  if (!options_.read_only) {
    index_.clear();
    log_.close();
    catalog_.collect();  // deletes files that were never committed
  }
  lock_.reset();
}

uint64_t SsdStore::Impl::epoch() const {
  std::shared_lock lock(index_mutex_);
  return epoch_;
}

std::string SsdStore::Impl::note() const {
  std::shared_lock lock(index_mutex_);
  return note_;
}

}  // namespace thermocline
