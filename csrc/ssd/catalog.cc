#include "ssd/catalog.h"

#include <algorithm>

namespace thermocline::ssd {

void Catalog::load() {
  std::lock_guard lock(mutex_);
  files_.clear();
  epochs_.clear();
  std::vector<uint64_t> found;
  for (auto& name : ctx_.fs->list(ctx_.path)) {
    FileKind kind;
    uint64_t number;
    if (parse_file_name(name, &kind, &number)) {
      files_[number].kind = kind;
      next_file_ = std::max(next_file_, number + 1);
    } else if (parse_manifest_name(name, &number)) {
      found.push_back(number);
    }
  }
  for (uint64_t epoch : found) {
    epochs_[epoch];
    try {
      retain(read(epoch));
    } catch (const NotFoundError&) {
      epochs_.erase(epoch);  // released by a concurrent writer
    } catch (const IoError& e) {
      if (!is_unreadable(e)) throw;
      damaged(epoch, e.what());
    } catch (const CorruptionError& e) {
      damaged(epoch, e.what());
    } catch (const FormatError& e) {
      damaged(epoch, e.what());
    }
  }
}

void Catalog::damaged(uint64_t epoch, const std::string& cause) {
  epochs_[epoch].damaged = true;
  ctx_.warnings.add(
      ctx_.path +
      ": no file of this store is deleted, so it grows with every commit, because a manifest is damaged: " + cause);
}

Manifest Catalog::read(uint64_t epoch) const {
  std::string path = ctx_.path + "/" + manifest_name(epoch);
  Manifest m = Manifest::decode(read_record(*ctx_.fs, path), path, ctx_.g);
  if (m.epoch != epoch || m.store_id[0] != ctx_.id.store_id[0] || m.store_id[1] != ctx_.id.store_id[1])
    throw_corrupt(path, "the manifest belongs to another epoch or store");
  return m;
}

void Catalog::retain(const Manifest& m) {
  Epoch epoch;
  auto need = [&](uint64_t number, FileKind kind, uint64_t pages) {
    epoch.files.push_back(number);
    Entry& entry = files_[number];
    ++entry.epochs;
    entry.kind = kind;
    entry.pages = std::max(entry.pages, pages);
  };
  for (auto& p : m.partitions)
    if (p.file) need(p.file, FileKind::kBase, BaseFile::file_pages(ctx_.g, p.pages, p.filter_bytes));
  for (auto& s : m.segments) need(s.file, FileKind::kSegment, s.pages);
  next_file_ = std::max(next_file_, m.next_file);
  epochs_[m.epoch] = std::move(epoch);
}

void Catalog::forget(uint64_t epoch) {
  for (uint64_t number : epochs_[epoch].files) --files_[number].epochs;
  epochs_.erase(epoch);
}

std::vector<uint64_t> Catalog::epochs() const {
  std::lock_guard lock(mutex_);
  std::vector<uint64_t> out;
  for (auto& [epoch, _] : epochs_)
    if (epoch > 0) out.push_back(epoch);
  return out;
}

uint64_t Catalog::newest() const {
  std::lock_guard lock(mutex_);
  return epochs_.empty() ? 0 : epochs_.rbegin()->first;
}

bool Catalog::all_damaged() const {
  std::lock_guard lock(mutex_);
  return std::all_of(epochs_.begin(), epochs_.end(), [](auto& entry) { return entry.second.damaged; });
}

bool Catalog::has(uint64_t epoch) const {
  std::lock_guard lock(mutex_);
  return epochs_.count(epoch) > 0;
}

std::shared_ptr<DataFile> Catalog::create(FileKind kind) {
  uint64_t number;
  {
    std::lock_guard lock(mutex_);
    number = next_file_++;
  }
  // Registered only once it is open: a concurrent collect() would delete an entry without a holder.
  std::shared_ptr<DataFile> file;
  try {
    file = create_data_file(ctx_, kind, number);
  } catch (...) {
    std::lock_guard lock(mutex_);
    files_[number].kind = kind;  // the file may exist: the next collect() deletes it
    throw;
  }
  opened(file);
  ctx_.fs->failpoint(kind == FileKind::kSegment ? "segment.created" : "base.created");
  return file;
}

void Catalog::opened(const std::shared_ptr<DataFile>& file) {
  std::lock_guard lock(mutex_);
  files_[file->number].kind = file->kind;
  files_[file->number].open = file;
}

void Catalog::publish(const Manifest& manifest) {
  const std::string name = manifest_name(manifest.epoch);
  try {
    publish_file(*ctx_.fs, ctx_.path, name, manifest.encode());
  } catch (...) {
    // The manifest may exist without being durable: the next open may find it and need its files.
    if (ctx_.fs->exists(ctx_.path + "/" + name)) {
      std::lock_guard lock(mutex_);
      retain(manifest);
    }
    throw;
  }
  std::lock_guard lock(mutex_);
  retain(manifest);
  if (manifest.epoch == 0 || epochs_.erase(0) == 0) return;  // epoch 0 has no files
  try {
    ctx_.fs->unlink(ctx_.path + "/" + manifest_name(0));
  } catch (const Error&) {
    // The commit is valid; a remaining empty epoch 0 has no effect.
  }
}

void Catalog::require_releasable(uint64_t epoch) const {
  std::lock_guard lock(mutex_);
  if (epoch == 0 || epochs_.count(epoch) == 0)
    throw NotFoundError(ctx_.path + ": no epoch " + std::to_string(epoch) + " to release");
  if (epochs_.rbegin()->first == epoch)
    throw Error(ctx_.path + ": epoch " + std::to_string(epoch) + " is the newest commit and cannot be released");
}

void Catalog::release(uint64_t epoch) {
  ctx_.fs->unlink(ctx_.path + "/" + manifest_name(epoch));
  ctx_.fs->failpoint("release.unlinked");
  // Durable before any file of the epoch is deleted: a manifest that reappears after a crash needs its files. If this
  // fails, the files stay until the next open.
  ctx_.fs->sync_dir(ctx_.path);
  {
    std::lock_guard lock(mutex_);  // not during the sync: put() creates segments
    forget(epoch);
  }
  ctx_.fs->failpoint("release.synced");
}

void Catalog::collect() {
  std::lock_guard lock(mutex_);
  for (auto& [_, epoch] : epochs_)
    if (epoch.damaged) return;  // its files are unknown
  for (auto it = files_.begin(); it != files_.end();) {
    if (it->second.epochs > 0 || !it->second.open.expired()) {
      ++it;
      continue;
    }
    std::string path = ctx_.file_path(it->second.kind, it->first);
    ctx_.fs->failpoint("collect.unlink");
    try {
      if (ctx_.fs->exists(path)) ctx_.fs->unlink(path);
      it = files_.erase(it);
    } catch (const Error&) {
      ++it;  // the next collect() or open retries
    }
  }
  ctx_.fs->failpoint("collect.done");
}

uint64_t Catalog::disk_bytes() const {
  std::lock_guard lock(mutex_);
  uint64_t pages = 0;
  for (auto& [_, entry] : files_) {
    auto file = entry.open.lock();
    pages += file ? std::max(file->pages.load(), entry.pages) : entry.pages;
  }
  return pages * ctx_.g.page_bytes;
}

uint64_t Catalog::files() const {
  std::lock_guard lock(mutex_);
  return files_.size();
}

uint64_t Catalog::next_file() const {
  std::lock_guard lock(mutex_);
  return next_file_;
}

}  // namespace thermocline::ssd
