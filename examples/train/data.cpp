#include "data.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "base/file.hpp"
#include "base/hash.hpp"

namespace f8::train {
namespace {

constexpr std::array<std::string_view, 17> kTextEndings = {
    ".c",  ".cc", ".cmake", ".cpp", ".cu",  ".cuh", ".cxx", ".h",  ".hpp",
    ".md", ".py", ".rst",   ".sh",  ".sql", ".tex", ".txt", ".inl"};

bool is_skipped(const fs::path& folder) {
  const std::string name = folder.filename().string();
  return name.starts_with('.') || name == "build";
}

Result<std::vector<fs::path>> files_under(const fs::path& folder) {
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
    return fail(ErrorCode::kIo, "cannot list {}: {}", folder.string(), error.message());
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

Result<Text> load_text(std::span<const fs::path> paths, int64_t context) {
  Text text;
  for (const fs::path& path : paths) {
    std::error_code error;
    std::vector<fs::path> files = {path};
    if (fs::is_directory(path, error)) files = F8_TRY(files_under(path));
    for (const fs::path& file : files) {
      text.bytes += F8_TRY(read_file(file));
      ++text.files;
    }
  }
  if (std::cmp_less_equal(text.bytes.size(), context)) {
    return fail(ErrorCode::kInvalidArgument,
                "the text has {} bytes in {} files, and a prediction needs {} and one more; name "
                "larger files with --data",
                text.bytes.size(), text.files, context);
  }
  if (text.bytes.size() > std::numeric_limits<uint32_t>::max()) {
    return fail(ErrorCode::kInvalidArgument, "the text has {} bytes; 4 GiB are the most",
                text.bytes.size());
  }
  text.hash = hash_hex(text.bytes);
  return text;
}

}  // namespace f8::train
