// Minimal test harness: gtest is not available from pip.
//
//   TEST(Hash, IsABijection) { CHECK_EQ(unmix64(mix64(7)), 7u); }
//
// A failed CHECK throws, which ends the test: call it on the thread of the test, or in a ThreadPool task, whose
// exceptions are rethrown by parallel(). Suites named Faults* run in `make test-faults`, all others in `make test`.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <string>

namespace thermocline::testing {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using TestBody = void (*)();
bool register_test(const char* suite, const char* name, TestBody body);

// Returns `quick`, or `full` in `make test-long` (THERMOCLINE_LONG=1).
uint64_t scaled(uint64_t quick, uint64_t full);

// Whether this process runs the seed or case `number`: all of them, or every N-th with THERMOCLINE_PART=I/N, from the
// I-th. For tests that take hours; with THERMOCLINE_PART, a test that does not call it fails.
bool in_part(uint64_t number);

// A new empty folder, removed by the destructor. In THERMOCLINE_TEST_DIR, else in TMPDIR.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string path() const { return path_.string(); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

[[noreturn]] void fail(const char* file, int line, const std::string& what);

template <typename T>
std::string show(const T& value) {
  if constexpr (requires(std::ostringstream& out) { out << value; }) {
    std::ostringstream out;
    out << std::boolalpha;
    if constexpr (sizeof(T) == 1 && requires { +value; } && !std::is_same_v<T, bool>) {
      out << +value;  // bytes as numbers
    } else {
      out << value;
    }
    return out.str();
  } else {
    return "<" + std::to_string(sizeof(T)) + " bytes>";
  }
}

template <typename A, typename B>
void check_eq(const A& a, const B& b, const char* text, const char* file, int line) {
  if (!(a == b)) fail(file, line, std::string(text) + ": " + show(a) + " != " + show(b));
}

}  // namespace thermocline::testing

#define TEST(suite, name)                                                          \
  static void suite##_##name##_body();                                             \
  [[maybe_unused]] static const bool suite##_##name##_registered =                 \
      ::thermocline::testing::register_test(#suite, #name, suite##_##name##_body); \
  static void suite##_##name##_body()

#define CHECK(...)                                                                      \
  do {                                                                                  \
    if (!(__VA_ARGS__)) ::thermocline::testing::fail(__FILE__, __LINE__, #__VA_ARGS__); \
  } while (0)

#define CHECK_EQ(a, b) ::thermocline::testing::check_eq((a), (b), #a " == " #b, __FILE__, __LINE__)

// The expression must throw Type (or a type derived from it).
#define CHECK_THROWS(Type, ...)                                                                                \
  do {                                                                                                         \
    bool thrown_ = false;                                                                                      \
    try {                                                                                                      \
      (void)(__VA_ARGS__);                                                                                     \
    } catch (const Type&) {                                                                                    \
      thrown_ = true;                                                                                          \
    } catch (const std::exception& other) {                                                                    \
      ::thermocline::testing::fail(__FILE__, __LINE__,                                                         \
                                   std::string(#__VA_ARGS__ " did not throw " #Type " but: ") + other.what()); \
    }                                                                                                          \
    if (!thrown_) ::thermocline::testing::fail(__FILE__, __LINE__, #__VA_ARGS__ " did not throw " #Type);      \
  } while (0)
