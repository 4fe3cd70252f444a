// Formats batches as LibSVM ("label id:1 ...") or LibFFM ("label field:id:1 ..."), ids as unsigned decimal numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace thermocline {

// One line per example, in order. The ids of (example e, field f) start at offsets[e * fields + f]. Labels are 0 or 1.
std::string to_text(const uint64_t* ids, const int64_t* offsets, size_t examples, size_t fields, const float* labels,
                    bool with_fields);

}  // namespace thermocline
