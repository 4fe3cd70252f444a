#include "testing/record_fs.h"

#include "util/error.h"

namespace thermocline::testing {

class RecordFile : public File {
 public:
  RecordFile(RecordFs& fs, std::unique_ptr<File> inner, uint32_t file)
      : fs_(fs), inner_(std::move(inner)), file_(file) {}
  void pread(void* buf, size_t bytes, uint64_t offset) override { inner_->pread(buf, bytes, offset); }
  void pwrite(const void* buf, size_t bytes, uint64_t offset) override {
    std::lock_guard lock(fs_.mutex_);
    inner_->pwrite(buf, bytes, offset);
    fs_.log_.ops.push_back(
        {OpKind::kWrite, file_, inner_->path(), "", offset, std::string(static_cast<const char*>(buf), bytes)});
  }
  void datasync() override {
    std::lock_guard lock(fs_.mutex_);
    inner_->datasync();
    fs_.log_.ops.push_back({OpKind::kDatasync, file_, inner_->path(), "", 0, ""});
  }
  uint64_t size() override { return inner_->size(); }
  const std::string& path() const override { return inner_->path(); }

 private:
  RecordFs& fs_;
  const std::unique_ptr<File> inner_;
  const uint32_t file_;
};

RecordFs::RecordFs(std::shared_ptr<MemFs> inner) : inner_(std::move(inner)) {
  auto start = inner_->clone();
  std::map<const MemInode*, uint32_t> numbers;
  for (const auto& [path, inode] : start->files()) {
    auto [it, added] = numbers.try_emplace(inode.get(), next_file_);
    if (added) ++next_file_;
    files_[path] = it->second;
  }
  log_.start = start;
  log_.start_files = files_;
}

void RecordFs::marker(const std::string& text) {
  std::lock_guard lock(mutex_);
  log_.ops.push_back({OpKind::kMarker, 0, text, "", 0, ""});
}

Recording RecordFs::recording() const {
  std::lock_guard lock(mutex_);
  return log_;
}

size_t RecordFs::size() const {
  std::lock_guard lock(mutex_);
  return log_.ops.size();
}

void RecordFs::repeat(const Recording& recording, size_t count) {
  std::map<uint32_t, std::unique_ptr<File>> files;  // with the numbers of `recording`
  for (size_t i = 0; i < count; ++i) {
    const RecordedOp& op = recording.ops[i];
    switch (op.kind) {
      case OpKind::kCreate:
        files[op.file] = open(op.path, OpenMode::kCreateMeta);  // no alignment rules for recorded bytes
        break;
      case OpKind::kWrite:
        files.at(op.file)->pwrite(op.data.data(), op.data.size(), op.offset);
        break;
      case OpKind::kDatasync:
        files.at(op.file)->datasync();
        break;
      case OpKind::kRename:
        rename(op.path, op.to);
        break;
      case OpKind::kUnlink:
        unlink(op.path);
        break;
      case OpKind::kLink:
        link(op.path, op.to);
        break;
      case OpKind::kMakeDir:
        make_dir(op.path);
        break;
      case OpKind::kSyncDir:
        sync_dir(op.path);
        break;
      case OpKind::kMarker:
        marker(op.path);
    }
  }
}

std::unique_ptr<File> RecordFs::open(const std::string& path, OpenMode mode) {
  std::lock_guard lock(mutex_);
  auto inner = inner_->open(path, mode);
  uint32_t& number = files_[path];
  if (mode == OpenMode::kCreate || mode == OpenMode::kCreateMeta) {
    number = next_file_++;
    log_.ops.push_back({OpKind::kCreate, number, path, "", 0, ""});
  }
  return std::make_unique<RecordFile>(*this, std::move(inner), number);
}

void RecordFs::rename(const std::string& from, const std::string& to) {
  std::lock_guard lock(mutex_);
  inner_->rename(from, to);
  const uint32_t number = files_[from];
  files_.erase(from);
  files_[to] = number;
  log_.ops.push_back({OpKind::kRename, number, from, to, 0, ""});
}

void RecordFs::unlink(const std::string& path) {
  std::lock_guard lock(mutex_);
  inner_->unlink(path);
  files_.erase(path);
  log_.ops.push_back({OpKind::kUnlink, 0, path, "", 0, ""});
}

void RecordFs::link(const std::string& from, const std::string& to) {
  std::lock_guard lock(mutex_);
  inner_->link(from, to);
  files_[to] = files_[from];
  log_.ops.push_back({OpKind::kLink, files_[from], from, to, 0, ""});
}

void RecordFs::make_dir(const std::string& path) {
  std::lock_guard lock(mutex_);
  const bool there = inner_->exists(path);
  inner_->make_dir(path);
  if (!there) log_.ops.push_back({OpKind::kMakeDir, 0, path, "", 0, ""});
}

void RecordFs::sync_dir(const std::string& path) {
  std::lock_guard lock(mutex_);
  inner_->sync_dir(path);
  log_.ops.push_back({OpKind::kSyncDir, 0, path, "", 0, ""});
}

}  // namespace thermocline::testing
