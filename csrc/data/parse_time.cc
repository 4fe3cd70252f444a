#include "data/parse_time.h"

#include <chrono>
#include <cmath>

namespace thermocline {
namespace {

// Reads the digits at `p` one by one; `p` moves behind what was read.
struct Cursor {
  const char* p;
  const char* end;

  bool at(char c) const { return p < end && *p == c; }
  bool skip(char c) {
    if (!at(c)) return false;
    ++p;
    return true;
  }
  bool digit() const { return p < end && *p >= '0' && *p <= '9'; }
  // Exactly `digits` digits.
  bool number(int digits, int& out) {
    out = 0;
    for (int i = 0; i < digits; ++i, ++p) {
      if (!digit()) return false;
      out = 10 * out + (*p - '0');
    }
    return true;
  }
};

struct Parts {
  int year = 0, month = 0, day = 0;
  int hour = 0, minute = 0, second = 0;
  int offset_hour = 0, offset_minute = 0;
  bool west = false;
};

bool parse_parts(Cursor cursor, Parts& to) {
  if (!cursor.number(4, to.year) || !cursor.skip('-') || !cursor.number(2, to.month) || !cursor.skip('-') ||
      !cursor.number(2, to.day)) {
    return false;
  }
  if (cursor.p == cursor.end) return true;
  if (!cursor.skip('T') && !cursor.skip(' ')) return false;
  if (!cursor.number(2, to.hour) || !cursor.skip(':') || !cursor.number(2, to.minute)) return false;
  if (cursor.skip(':')) {
    if (!cursor.number(2, to.second)) return false;
    if (cursor.skip('.')) {
      if (!cursor.digit()) return false;
      while (cursor.digit()) ++cursor.p;
    }
  }
  if (cursor.at('+') || cursor.at('-')) {
    to.west = *cursor.p++ == '-';
    if (!cursor.number(2, to.offset_hour)) return false;
    cursor.skip(':');
    if (!cursor.number(2, to.offset_minute)) return false;
  } else {
    cursor.skip('Z');
  }
  return cursor.p == cursor.end;
}

}  // namespace

NumberStatus parse_time(const char* p, const char* end, int64_t& out) {
  double number = 0;
  const NumberStatus status = parse_number(p, end, number);
  if (status == NumberStatus::kOk) {
    if (std::abs(number) > 0x1p53) return NumberStatus::kOutOfRange;
    out = static_cast<int64_t>(std::floor(number));
  }
  if (status != NumberStatus::kNotANumber) return status;

  while (p < end && *p == ' ') ++p;
  while (end > p && end[-1] == ' ') --end;
  Parts parts;
  if (!parse_parts({p, end}, parts)) return NumberStatus::kNotANumber;
  const std::chrono::year_month_day date{std::chrono::year(parts.year),
                                         std::chrono::month(static_cast<unsigned>(parts.month)),
                                         std::chrono::day(static_cast<unsigned>(parts.day))};
  if (!date.ok() || parts.hour > 23 || parts.minute > 59 || parts.second > 60 || parts.offset_hour > 23 ||
      parts.offset_minute > 59) {
    return NumberStatus::kOutOfRange;
  }
  const int64_t days = std::chrono::sys_days(date).time_since_epoch().count();
  const int64_t offset = 3600 * parts.offset_hour + 60 * parts.offset_minute;
  out = 86400 * days + 3600 * parts.hour + 60 * parts.minute + parts.second + (parts.west ? offset : -offset);
  return NumberStatus::kOk;
}

int64_t time_bucket(TimeBucket bucket, int64_t seconds) {
  const int64_t hours = (seconds - (seconds % 3600 + 3600) % 3600) / 3600;
  const int64_t hour = (hours % 24 + 24) % 24, days = (hours - hour) / 24;
  const int64_t weekday = ((days + 3) % 7 + 7) % 7;  // 1 January 1970 was a Thursday
  // The calendar repeats after 400 years, which std::chrono represents.
  constexpr int64_t kCycle = 146097;
  const std::chrono::year_month_day date{
      std::chrono::sys_days(std::chrono::days(static_cast<int>((days % kCycle + kCycle) % kCycle)))};
  switch (bucket) {
    case TimeBucket::kHourOfDay:
      return hour;
    case TimeBucket::kWeekday:
      return weekday;
    case TimeBucket::kHourOfWeek:
      return 24 * weekday + hour;
    case TimeBucket::kDayOfMonth:
      return static_cast<int64_t>(static_cast<unsigned>(date.day()));
    case TimeBucket::kMonth:
      return static_cast<int64_t>(static_cast<unsigned>(date.month()));
  }
  __builtin_unreachable();
}

}  // namespace thermocline
