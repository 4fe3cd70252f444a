#include "ssd/read_cost.h"

#include <algorithm>

namespace thermocline::ssd {

uint32_t ReadCost::gap() const {
  if (page_us <= 0) return 3;
  return static_cast<uint32_t>(std::clamp(read_us / page_us, 0.0, 255.0));
}

ReadCost ReadCosts::get() const {
  std::lock_guard lock(mutex_);
  return cost_;
}

uint64_t ReadCosts::probes() const {
  std::lock_guard lock(mutex_);
  return probes_;
}

bool ReadCosts::begin_probe() {
  std::lock_guard lock(mutex_);
  if (probing_ || (cost_.page_us > 0 && lookup_s_ * kProbeShare < probe_s_)) return false;
  probing_ = true;
  return true;
}

void ReadCosts::end_probe(const std::optional<ReadCost>& measured, double seconds) {
  std::lock_guard lock(mutex_);
  probing_ = false;
  if (!measured) return;
  const double weight = probes_++ == 0 ? 1.0 : kWeight;
  cost_.read_us += weight * (measured->read_us - cost_.read_us);
  cost_.page_us += weight * (measured->page_us - cost_.page_us);
  lookup_s_ = 0;
  probe_s_ = seconds;
}

void ReadCosts::add_lookup(double seconds) {
  std::lock_guard lock(mutex_);
  lookup_s_ += seconds;
}

ReadPlan probe_plan(const std::shared_ptr<DataFile>& file, uint32_t pages_per_read, size_t reads, uint64_t salt) {
  ReadPlan plan;
  plan.add_file(file);
  plan.gap = plan.max_pages = pages_per_read;
  for (size_t i = 0; i < reads; ++i) {
    const uint64_t page = mix64(i + salt) % (file->pages - pages_per_read);
    plan.lookups.push_back({make_address(0, page), 0, 0, false});
    if (pages_per_read > 1) plan.lookups.push_back({make_address(0, page + pages_per_read - 1), 0, 0, false});
  }
  return plan;
}

}  // namespace thermocline::ssd
