#include "util/fs.h"

#include <deque>
#include <exception>

#include "util/error.h"

namespace thermocline {
namespace {

// Reads inside submit(). The wait() that would return the tag of a failed read throws its error.
class SyncReadQueue : public ReadQueue {
 public:
  explicit SyncReadQueue(size_t depth) : depth_(depth < 1 ? 1 : depth) {}

  void submit(const ReadOp& op, uint64_t tag) override {
    if (done_.size() >= depth_) throw Error("read queue is full: call wait() first");
    std::exception_ptr error;
    try {
      op.file->pread(op.buf, op.bytes, op.offset);
    } catch (...) {
      error = std::current_exception();
    }
    done_.push_back({tag, error});
  }

  uint64_t wait() override {
    if (done_.empty()) throw Error("read queue is empty: nothing to wait for");
    Done d = done_.front();
    done_.pop_front();
    if (d.error) std::rethrow_exception(d.error);
    return d.tag;
  }

  size_t depth() const override { return depth_; }

 private:
  struct Done {
    uint64_t tag;
    std::exception_ptr error;
  };
  const size_t depth_;
  std::deque<Done> done_;
};

}  // namespace

std::unique_ptr<ReadQueue> FileSystem::read_queue(size_t depth) { return std::make_unique<SyncReadQueue>(depth); }

std::string FileSystem::link_unused(const std::string& from, const std::string& dir, const std::string& name) {
  if (!exists(dir)) make_dir(dir);
  std::string to = name;
  for (int i = 1; exists(dir + "/" + to); ++i) to = name + "." + std::to_string(i);
  link(from, dir + "/" + to);
  return to;
}

std::string read_whole(FileSystem& fs, const std::string& path, size_t max_bytes) {
  auto file = fs.open(path, OpenMode::kReadMeta);
  const uint64_t size = file->size();
  if (size > max_bytes)
    throw CorruptionError(path + ": the file has " + std::to_string(size) + " bytes, at most " +
                          std::to_string(max_bytes) + " are possible");
  std::string bytes(size, '\0');
  if (!bytes.empty()) file->pread(bytes.data(), bytes.size(), 0);
  return bytes;
}

void publish_file(FileSystem& fs, const std::string& dir, const std::string& name, std::string_view bytes) {
  const std::string path = dir + "/" + name, temp = path + ".tmp";
  if (fs.exists(temp)) fs.unlink(temp);  // of a crashed process
  bool created = false;
  try {
    {
      auto file = fs.open(temp, OpenMode::kCreateMeta);
      created = true;
      fs.failpoint("publish.created");
      if (!bytes.empty()) file->pwrite(bytes.data(), bytes.size(), 0);
      fs.failpoint("publish.written");
      file->datasync();
      fs.failpoint("publish.synced");
    }
    fs.rename(temp, path);
  } catch (...) {
    if (created) {
      try {
        fs.unlink(temp);
      } catch (const Error&) {
        // Report the first failure. The next publish_file() removes the temporary file.
      }
    }
    throw;
  }
  fs.failpoint("publish.renamed");
  fs.sync_dir(dir);
  fs.failpoint("publish.done");
}

}  // namespace thermocline
