#include "ssd/read_plan.h"

#include <algorithm>
#include <unordered_map>

namespace thermocline::ssd {

uint32_t ReadPlan::add_file(const std::shared_ptr<DataFile>& file) {
  files.push_back(file);
  return static_cast<uint32_t>(files.size() - 1);
}

void ReadPlan::clear() {
  items.clear();
  before_page.clear();
  files.clear();
  lookups.clear();
  copies = 0;
}

uint64_t ReadPlan::memory() const {
  return items.capacity() * sizeof(Item) + before_page.capacity() * sizeof(uint32_t) +
         files.capacity() * sizeof(files[0]) + lookups.capacity() * sizeof(PageLookup);
}

void plan_reads(const Index& index, ReadPlan& plan, PlanScratch& scratch) {
  constexpr uint32_t kNoFile = ~uint32_t{0};
  if (plan.copies != index.copies()) plan.before_page.clear();
  plan.copies = index.copies();
  plan.lookups.reserve(plan.items.size());
  std::vector<PageLookup>& log_lookups = scratch.log_lookups;
  log_lookups.clear();
  std::unordered_map<const DataFile*, uint32_t> segments;  // index into plan.files
  auto log_address = [&](uint32_t vpage) {
    LogPage at = index.log_page(vpage);
    auto [it, added] = segments.try_emplace(at.segment.get(), 0);
    if (added) it->second = plan.add_file(at.segment);
    return make_address(it->second, at.page);
  };
  size_t at = plan.items.empty() ? 0 : index.partition_of(plan.items[0].hash);
  uint32_t base_file = kNoFile, hint = 0;
  for (uint32_t i = 0; i < plan.items.size(); ++i) {
    const uint64_t hash = plan.items[i].hash;
    if (hash > index.partition(at).hi) {
      at = index.partition_of(hash);
      base_file = kNoFile;
      hint = 0;
    }
    const Partition& p = index.partition(at);
    uint32_t page;
    if (Index::candidate(p, hash, plan.before_page.empty() ? nullptr : &plan.before_page[i], &page)) {
      log_lookups.push_back({log_address(page), i, page, true});
    } else if (p.base && Index::base_page(*p.base, hash, &page, hint)) {
      hint = page;
      if (base_file == kNoFile) base_file = plan.add_file(p.base->data);
      plan.lookups.push_back({make_address(base_file, 1 + page), i, 0, false});
    }
  }
  // Base lookups are already in order of address: items are in hash order.
  std::sort(log_lookups.begin(), log_lookups.end(), [](const PageLookup& a, const PageLookup& b) {
    return a.address != b.address ? a.address < b.address : a.item < b.item;
  });
  plan.lookups.insert(plan.lookups.end(), log_lookups.begin(), log_lookups.end());
}

ReadRequest next_request(const ReadPlan& plan, uint32_t first) {
  const PageAddress address = plan.lookups[first].address;
  ReadRequest request{address, 1, first, first + 1};
  for (; request.end_lookup < plan.lookups.size(); ++request.end_lookup) {
    const uint64_t next = plan.lookups[request.end_lookup].address - address;  // pages after the first one
    if (next > uint64_t{request.pages} + plan.gap || next >= plan.max_pages) break;
    request.pages = std::max(request.pages, static_cast<uint32_t>(next) + 1);
  }
  return request;
}

}  // namespace thermocline::ssd
