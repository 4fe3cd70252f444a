// Plan of a batched lookup: which page of which file each key is read from.
//
// Thread safety: a plan belongs to one thread. plan_reads() runs under the shared index lock.
// Invariants: 1. `items` are in hash order. 2. `lookups` are sorted by address, then by hash, base files first, so that
// each page is read once however many keys are on it. 3. `files` keeps every file open until the plan is destroyed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ssd/index.h"
#include "ssd/sorted_batch.h"

namespace thermocline::ssd {

// A page within the files of one plan: file index << 40 | page number. Pages of different files are far apart.
using PageAddress = uint64_t;
inline constexpr int kPageBits = 40;
inline constexpr PageAddress make_address(uint32_t file, uint64_t page) { return (uint64_t{file} << kPageBits) | page; }
inline constexpr size_t file_of(PageAddress address) { return address >> kPageBits; }
inline constexpr uint64_t page_of(PageAddress address) { return address & ((uint64_t{1} << kPageBits) - 1); }

// One key to look up on one page.
struct PageLookup {
  PageAddress address;
  uint32_t item;   // index into ReadPlan::items
  uint32_t vpage;  // log page, if in_log
  bool in_log;     // the page may not have the key; then an older log page or the base has it
};

struct ReadPlan {
  std::vector<Item> items;
  std::vector<uint32_t> before_page;  // per item, or empty: consider only log pages older than this one
  uint64_t copies = 0;                // Index::copies() when `before_page` was found
  std::vector<std::shared_ptr<DataFile>> files;
  std::vector<PageLookup> lookups;
  // Requests have at most `max_pages`. Up to `gap` unused pages between two lookups are read too.
  uint32_t gap = 0, max_pages = 1;

  void clear();  // keeps the memory
  uint32_t add_file(const std::shared_ptr<DataFile>& file);
  uint64_t memory() const;
};

// Working memory of planning, reused by one thread.
struct PlanScratch {
  std::vector<Item> items;
  std::vector<PageLookup> log_lookups;
  uint64_t memory() const { return items.capacity() * sizeof(Item) + log_lookups.capacity() * sizeof(PageLookup); }
};

// Fills `files` and `lookups` for all items. The caller holds the index lock, shared. If rows of the log were copied to
// newer pages since `before_page` was found, the search starts at the newest page again.
void plan_reads(const Index& index, ReadPlan& plan, PlanScratch& scratch);

// One read of consecutive pages, with the lookups that it serves.
struct ReadRequest {
  PageAddress address;
  uint32_t pages;
  uint32_t first_lookup, end_lookup;
};

// The request that serves the lookup `first` and those after it that can share it.
ReadRequest next_request(const ReadPlan& plan, uint32_t first);

}  // namespace thermocline::ssd
