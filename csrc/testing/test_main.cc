// thermocline_tests [--list] [--skip SUBSTRING] [SUBSTRING...]
// Runs the tests whose "Suite.Name" contains one of the substrings (without substrings: all), except the skipped ones.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "testing/test.h"

namespace thermocline::testing {
namespace {

struct Test {
  std::string name;
  TestBody body;
};

std::vector<Test>& tests() {
  static std::vector<Test> all;  // filled before main(), in any order
  return all;
}

bool contains_any(const std::string& name, const std::vector<std::string_view>& parts) {
  return std::any_of(parts.begin(), parts.end(), [&](auto p) { return name.find(p) != std::string::npos; });
}

// THERMOCLINE_PART=I/N.
struct Part {
  uint64_t index = 1, count = 1;
  bool used = false;  // by the present test
};

Part& part() {
  static Part of_process = [] {
    Part p;
    const char* value = std::getenv("THERMOCLINE_PART");
    unsigned long long index = 0, count = 0;
    if (!value) return p;
    if (std::sscanf(value, "%llu/%llu", &index, &count) != 2 || index == 0 || index > count) {
      std::fprintf(stderr, "THERMOCLINE_PART is '%s': it must be I/N with I from 1 to N\n", value);
      std::exit(2);
    }
    p.index = index;
    p.count = count;
    return p;
  }();
  return of_process;
}

// Returns the cause of the failure, or an empty string.
std::string run(const Test& test) {
  try {
    part().used = false;
    test.body();
    if (part().count > 1 && !part().used) return "the test has no parts: it ran whole";
    return {};
  } catch (const Failure& failure) {
    return failure.what();
  } catch (const std::exception& error) {
    return std::string("uncaught exception: ") + error.what();
  }
}

}  // namespace

bool register_test(const char* suite, const char* name, TestBody body) {
  tests().push_back({std::string(suite) + "." + name, body});
  return true;
}

uint64_t scaled(uint64_t quick, uint64_t full) {
  const char* value = std::getenv("THERMOCLINE_LONG");
  return value && std::strcmp(value, "1") == 0 ? full : quick;
}

bool in_part(uint64_t number) {
  part().used = true;
  return number % part().count == part().index - 1;
}

TempDir::TempDir() {
  const char* base = std::getenv("THERMOCLINE_TEST_DIR");
  std::string pattern =
      ((base ? std::filesystem::path(base) : std::filesystem::temp_directory_path()) / "thermocline-XXXXXX").string();
  if (!mkdtemp(pattern.data())) throw std::runtime_error("mkdtemp " + pattern + ": " + std::strerror(errno));
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;  // a failed removal must not hide the failure of the test
  std::filesystem::remove_all(path_, ignored);
}

void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

}  // namespace thermocline::testing

int main(int argc, char** argv) {
  using namespace thermocline::testing;
  std::vector<std::string_view> wanted, skipped;
  bool list = false;
  for (int i = 1; i < argc; ++i) {
    std::string_view arg = argv[i];
    if (arg == "--list") {
      list = true;
    } else if (arg == "--skip" && i + 1 < argc) {
      skipped.push_back(argv[++i]);
    } else if (arg.starts_with("-")) {
      std::fprintf(stderr, "usage: %s [--list] [--skip SUBSTRING] [SUBSTRING...]\n", argv[0]);
      return 2;
    } else {
      wanted.push_back(arg);
    }
  }
  auto& all = tests();
  std::sort(all.begin(), all.end(), [](const Test& a, const Test& b) { return a.name < b.name; });
  size_t passed = 0;
  std::vector<std::string> failed;
  for (const Test& test : all) {
    if ((!wanted.empty() && !contains_any(test.name, wanted)) || contains_any(test.name, skipped)) continue;
    if (list) {
      std::printf("%s\n", test.name.c_str());
      continue;
    }
    std::printf("%-64s ", test.name.c_str());
    std::fflush(stdout);
    auto start = std::chrono::steady_clock::now();
    std::string reason = run(test);
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%s %7.2f s\n", reason.empty() ? "ok    " : "FAILED", seconds);
    if (reason.empty()) {
      ++passed;
    } else {
      std::printf("  %s\n", reason.c_str());
      failed.push_back(test.name + ": " + reason);  // again at the end, which is what a cut output keeps
    }
  }
  if (list) return 0;
  std::printf("%zu passed, %zu failed\n", passed, failed.size());
  for (const auto& line : failed) std::printf("  %s\n", line.c_str());
  if (passed + failed.size() == 0) {
    std::fprintf(stderr, "no test matches\n");
    return 2;
  }
  return failed.empty() ? 0 : 1;
}
