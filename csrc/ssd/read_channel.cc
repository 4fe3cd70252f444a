#include "ssd/read_channel.h"

namespace thermocline::ssd {

ReadChannels::Lease::Lease(ReadChannels& channels) : channels_(channels) {
  std::unique_ptr<ReadChannel> outdated;  // destroyed after the lock is released
  {
    std::unique_lock lock(channels.mutex_);
    channels.returned_.wait(
        lock, [&] { return !channels.idle_.empty() || channels.leased_ < channels.ctx_.sizes.read_channels; });
    ++channels.leased_;
    if (!channels.idle_.empty()) {
      channel_ = std::move(channels.idle_.back());
      channels.idle_.pop_back();
    }
    if (channel_ && channel_->engine() != channels.ctx_.fs->name()) {  // the file system changed its engine
      channels.bytes_ -= channel_->bytes();
      outdated = std::move(channel_);
    }
  }
  if (channel_) return;
  try {
    const Context& ctx = channels.ctx_;
    channel_ = std::make_unique<ReadChannel>(*ctx.fs, ctx.sizes, ctx.g.page_bytes);
  } catch (...) {
    std::lock_guard lock(channels.mutex_);
    --channels.leased_;
    channels.returned_.notify_one();
    throw;
  }
  std::lock_guard lock(channels.mutex_);
  channels.bytes_ += channel_->bytes();
}

ReadChannels::Lease::~Lease() {
  std::unique_ptr<ReadChannel> discarded;  // destroyed after the lock is released
  std::lock_guard lock(channels_.mutex_);
  --channels_.leased_;
  if (keep_) {
    channels_.idle_.push_back(std::move(channel_));
  } else {
    channels_.bytes_ -= channel_->bytes();
    discarded = std::move(channel_);
  }
  channels_.returned_.notify_one();
}

uint64_t ReadChannels::memory() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace thermocline::ssd
