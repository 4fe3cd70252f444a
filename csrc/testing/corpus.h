// The corpus of a fuzz test: every file of a folder.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace thermocline::testing {

// Returns the path of `name` beside the source file `file`, which is __FILE__. A compiler cache makes that relative to
// the build folder, where this program is.
inline std::filesystem::path beside_source(const char* file, const char* name) {
  const std::filesystem::path source(file);
  const auto build = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  return (source.is_relative() ? build / source : source).parent_path() / name;
}

// Returns the contents of the files in `folder`, in order of their names.
inline std::vector<std::string> read_corpus(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> inputs;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

}  // namespace thermocline::testing
