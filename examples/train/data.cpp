#include "data.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "error.hpp"
#include "files.hpp"

namespace train {
namespace fs = std::filesystem;
namespace {

constexpr std::array<std::string_view, 17> kTextEndings = {
    ".c",  ".cc", ".cmake", ".cpp", ".cu",  ".cuh", ".cxx", ".h",  ".hpp",
    ".md", ".py", ".rst",   ".sh",  ".sql", ".tex", ".txt", ".inl"};

bool is_skipped(const fs::path& folder) {
  const std::string name = folder.filename().string();
  return name.starts_with('.') || name == "build";
}

std::vector<fs::path> files_under(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  fs::recursive_directory_iterator it(folder, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    std::error_code of_entry;
    if (it->is_directory(of_entry)) {
      if (is_skipped(it->path())) it.disable_recursion_pending();
    } else if (it->is_regular_file(of_entry) &&
               std::ranges::find(kTextEndings, it->path().extension().string()) !=
                   kTextEndings.end()) {
      files.push_back(it->path());
    }
  }
  if (error) {
    fail(FLOAT8_IO, "cannot list %s: %s", folder.c_str(), error.message().c_str());
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

Text load_text(std::span<const fs::path> paths, int64_t context) {
  Text text;
  for (const fs::path& path : paths) {
    std::error_code error;
    std::vector<fs::path> files = {path};
    if (fs::is_directory(path, error)) files = files_under(path);
    for (const fs::path& file : files) {
      text.bytes += read_file(file);
      ++text.files;
    }
  }
  if (std::cmp_less_equal(text.bytes.size(), context)) {
    fail(FLOAT8_INVALID_ARGUMENT,
         "the text has %zu bytes in %zu files, and a prediction needs %ld and one more; name "
         "larger files with --data",
         text.bytes.size(), text.files, context);
  }
  if (text.bytes.size() > std::numeric_limits<uint32_t>::max()) {
    fail(FLOAT8_INVALID_ARGUMENT, "the text has %zu bytes; 4 GiB are the most", text.bytes.size());
  }
  text.hash = hash_hex(text.bytes);
  return text;
}

}  // namespace train
