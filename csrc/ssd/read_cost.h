// Costs of reads on this device: running estimates, from small probes between lookups.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "ssd/read_plan.h"

namespace thermocline::ssd {

struct ReadCost {
  double read_us = 0, page_us = 0;  // per request, per page; 0: not measured yet
  uint32_t gap() const;             // unused pages that are cheaper to read than another request
};

// Each probe moves the estimates by a quarter of the difference, so that they follow the device and one disturbed probe
// has little effect. Thread safety: all methods may run concurrently.
class ReadCosts {
 public:
  ReadCost get() const;
  // Whether to probe now: at the first large lookup, then whenever a probe takes less than kProbeShare of the time of
  // lookups since the last one. If true, the caller must call end_probe().
  bool begin_probe();
  void end_probe(const std::optional<ReadCost>& measured, double seconds);  // nullopt: the probe was not possible
  void add_lookup(double seconds);
  uint64_t probes() const;

  static constexpr double kProbeShare = 0.01;
  static constexpr double kWeight = 0.25;  // of a probe

 private:
  mutable std::mutex mutex_;  // protects all members below
  ReadCost cost_;
  bool probing_ = false;
  uint64_t probes_ = 0;
  double lookup_s_ = 0, probe_s_ = 0;  // lookups since the last probe; the last probe
};

// A plan of one probe: random requests of `pages_per_read` pages of one file.
ReadPlan probe_plan(const std::shared_ptr<DataFile>& file, uint32_t pages_per_read, size_t reads, uint64_t salt);

}  // namespace thermocline::ssd
