// Parsing of event times: seconds since 1970 as a number (parse_number.h), or a date and time of ISO 8601
//
//   YYYY-MM-DD [(T| )HH:MM[:SS[.digits]] [Z|(+|-)HH[:]MM]]
//
// without an offset in UTC; surrounding spaces are allowed. Fractions of a second are rounded down.
#pragma once

#include <cstdint>

#include "data/parse_number.h"

namespace thermocline {

// kOutOfRange: more than 2^53 seconds, or a month, day, hour, minute, second or offset that does not exist. A leap
// second (60) is the first second of the next minute.
NumberStatus parse_time(const char* p, const char* end, int64_t& out);

// Parts of a time, in UTC, that occur again: a model learns from the past what the future has, too.
enum class TimeBucket : uint8_t {
  kHourOfDay,   // 0 .. 23
  kWeekday,     // 0 (Monday) .. 6
  kHourOfWeek,  // 0 .. 167, from Monday 0:00
  kDayOfMonth,  // 1 .. 31
  kMonth,       // 1 .. 12
};

// `seconds` since 1970, at most 2^53 in magnitude.
int64_t time_bucket(TimeBucket bucket, int64_t seconds);

}  // namespace thermocline
