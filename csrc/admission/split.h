// Divides a batch by admission: ids that are trained, and the others, which have no row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dram/dedup.h"
#include "dram/lookup_plan.h"
#include "util/recycled.h"

namespace thermocline {

// The trained ids and the others, each in the order of the batch.
struct SplitBags {
  size_t kept = 0, others = 0;
  Recycled<uint64_t> ids, other_ids;       // [kept], [others]
  Recycled<float> weights, other_weights;  // likewise, if the batch has weights
  Recycled<int64_t> offsets;               // [bags + 1] of all bags, into ids
  size_t places = 0;
  Recycled<int64_t> place;          // [places] bags that have other ids, ascending
  Recycled<int64_t> other_offsets;  // [places + 1] of these bags, into other_ids
};

// refused[i] is 1 if ids[i] is one of the others, else 0. The offsets must be valid (check_offsets).
SplitBags split_bags(const uint64_t* ids, const Bags& bags, const uint8_t* refused);

// The working set of the ids that are not refused, from that of all ids: equal to Dedup::run on them. All occurrences
// of a key must have the same flag.
WorkingSet split_working_set(const WorkingSetView& all, const uint8_t* refused);

// Adds rows[i], of `dim` floats, to out[places[i]]. No place may repeat.
void add_at_places(const int64_t* places, size_t n, size_t dim, const float* rows, float* out);

}  // namespace thermocline
