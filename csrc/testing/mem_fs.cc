#include "testing/mem_fs.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "util/error.h"

namespace thermocline::testing {
namespace {

std::string clean(const std::string& path) {
  std::string out;
  for (char c : path) {
    if (c != '/' || out.empty() || out.back() != '/') out.push_back(c);
  }
  if (out.size() > 1 && out.back() == '/') out.pop_back();
  return out;
}

class MemFile : public File {
 public:
  MemFile(std::shared_ptr<MemInode> inode, std::string path, bool aligned, bool writable)
      : inode_(std::move(inode)), path_(std::move(path)), aligned_(aligned), writable_(writable) {}

  void pread(void* buf, size_t bytes, uint64_t offset) override {
    check(buf, bytes, offset);
    std::lock_guard lock(inode_->mutex);
    const std::string& from = *inode_->bytes;
    if (offset > from.size() || bytes > from.size() - offset) {
      throw IoError("read of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + " of " + path_ +
                        ": the file ends at " + std::to_string(from.size()) + ", it was truncated",
                    0);
    }
    std::memcpy(buf, from.data() + offset, bytes);
  }

  void pwrite(const void* buf, size_t bytes, uint64_t offset) override {
    if (!writable_) throw IoError("write to " + path_ + ": the file is open for reading", EBADF);
    check(buf, bytes, offset);
    std::lock_guard lock(inode_->mutex);
    std::string& to = inode_->own();
    if (to.size() < offset + bytes) to.resize(offset + bytes);
    std::memcpy(to.data() + offset, buf, bytes);
  }

  void datasync() override {}
  uint64_t size() override {
    std::lock_guard lock(inode_->mutex);
    return inode_->bytes->size();
  }
  const std::string& path() const override { return path_; }

 private:
  void check(const void* buf, size_t bytes, uint64_t offset) const {
    if (aligned_ && (reinterpret_cast<uintptr_t>(buf) | bytes | offset) % kSector != 0) {
      throw Error(path_ + ": buffer, length and offset of a data file must be multiples of a page");
    }
  }

  const std::shared_ptr<MemInode> inode_;
  const std::string path_;
  const bool aligned_, writable_;
};

}  // namespace

// May outlive its file system: it shares the set of locked paths.
class MemLock : public FileLock {
 public:
  MemLock(std::shared_ptr<std::set<std::string>> locked, std::string path)
      : locked_(std::move(locked)), path_(std::move(path)) {}
  ~MemLock() override { locked_->erase(path_); }

 private:
  const std::shared_ptr<std::set<std::string>> locked_;
  const std::string path_;
};

std::string& MemInode::own() {
  if (bytes.use_count() > 1) bytes = std::make_shared<std::string>(*bytes);
  return *bytes;
}

std::string MemFs::parent(const std::string& path) {
  const std::string p = clean(path);
  const size_t slash = p.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : p.substr(0, slash);
}

std::shared_ptr<MemInode> MemFs::find(const std::string& path) const {
  auto it = names_.find(clean(path));
  if (it == names_.end()) throw NotFoundError(path + ": No such file");
  return it->second;
}

void MemFs::need_dir(const std::string& path) const {
  if (path != "." && path != "/" && !dirs_.contains(path)) throw NotFoundError(path + ": No such folder");
}

std::unique_ptr<File> MemFs::open(const std::string& path, OpenMode mode) {
  std::lock_guard lock(mutex_);
  const bool aligned = mode == OpenMode::kCreate || mode == OpenMode::kRead;
  if (mode == OpenMode::kRead || mode == OpenMode::kReadMeta) {
    return std::make_unique<MemFile>(find(path), path, aligned, false);
  }
  need_dir(parent(path));
  auto [it, added] = names_.try_emplace(clean(path));
  if (!added) throw IoError("creating " + path + ": File exists", EEXIST);
  it->second = std::make_shared<MemInode>();
  return std::make_unique<MemFile>(it->second, path, aligned, true);
}

void MemFs::rename(const std::string& from, const std::string& to) {
  std::lock_guard lock(mutex_);
  auto inode = find(from);
  need_dir(parent(to));
  names_.erase(clean(from));
  names_[clean(to)] = inode;
}

void MemFs::unlink(const std::string& path) {
  std::lock_guard lock(mutex_);
  find(path);
  names_.erase(clean(path));
}

void MemFs::link(const std::string& from, const std::string& to) {
  std::lock_guard lock(mutex_);
  auto inode = find(from);
  need_dir(parent(to));
  if (!names_.try_emplace(clean(to), inode).second) throw IoError("hard link to " + to + ": File exists", EEXIST);
}

void MemFs::make_dir(const std::string& path) {
  std::lock_guard lock(mutex_);
  need_dir(parent(path));
  if (names_.contains(clean(path))) throw IoError("creating the folder " + path + ": File exists", EEXIST);
  dirs_.insert(clean(path));
}

void MemFs::sync_dir(const std::string& path) {
  std::lock_guard lock(mutex_);
  need_dir(clean(path));
}

bool MemFs::exists(const std::string& path) {
  std::lock_guard lock(mutex_);
  return names_.contains(clean(path)) || dirs_.contains(clean(path));
}

std::vector<std::string> MemFs::list(const std::string& dir) {
  std::lock_guard lock(mutex_);
  const std::string d = clean(dir);
  need_dir(d);
  std::vector<std::string> out;
  auto add = [&](const std::string& path) {
    if (parent(path) == d) out.push_back(path.substr(path.rfind('/') + 1));
  };
  for (const auto& [path, inode] : names_) add(path);
  for (const auto& path : dirs_) add(path);
  std::sort(out.begin(), out.end());
  return out;
}

std::unique_ptr<FileLock> MemFs::lock(const std::string& path) {
  std::lock_guard lock(mutex_);
  need_dir(parent(path));
  if (!locked_->insert(clean(path)).second) throw LockError("the store is already open for writing: " + path);
  auto& inode = names_[clean(path)];
  if (!inode) inode = std::make_shared<MemInode>();
  return std::make_unique<MemLock>(locked_, clean(path));
}

std::shared_ptr<MemFs> MemFs::clone() const {
  std::lock_guard lock(mutex_);
  auto copy = std::make_shared<MemFs>();
  std::map<const MemInode*, std::shared_ptr<MemInode>> made;
  for (const auto& [path, inode] : names_) {
    auto& twin = made[inode.get()];
    if (!twin) {
      twin = std::make_shared<MemInode>();
      twin->bytes = inode->bytes;
    }
    copy->names_[path] = twin;
  }
  copy->dirs_ = dirs_;
  return copy;
}

std::string& MemFs::bytes(const std::string& path) { return find(path)->own(); }

void MemFs::set(const std::string& path, std::shared_ptr<MemInode> inode) {
  if (!inode) {
    names_.erase(clean(path));
    return;
  }
  for (std::string d = parent(path); d != "." && d != "/"; d = parent(d)) dirs_.insert(d);
  names_[clean(path)] = std::move(inode);
}

void MemFs::set_bytes(const std::string& path, std::string bytes) {
  auto inode = std::make_shared<MemInode>();
  *inode->bytes = std::move(bytes);
  set(path, std::move(inode));
}

uint64_t MemFs::total_bytes() const {
  std::set<const MemInode*> seen;
  uint64_t sum = 0;
  for (const auto& [path, inode] : names_) {
    if (seen.insert(inode.get()).second) sum += inode->bytes->size();
  }
  return sum;
}

}  // namespace thermocline::testing
