// Files with errors as values. write_file_atomic writes beside the target, fsyncs and renames, so a
// reader sees the old bytes or the new ones, and a full disk leaves the old ones.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace f8 {

namespace fs = std::filesystem;

[[nodiscard]] Result<std::string> read_file(const fs::path& path);
[[nodiscard]] Status write_file_atomic(const fs::path& path, std::string_view bytes);
[[nodiscard]] Status write_file_synced(const fs::path& path, std::string_view bytes);  // no rename
[[nodiscard]] Status sync_directory(const fs::path& path);
// A fresh, private (0700) directory `<parent>/<prefix>XXXXXX`.
[[nodiscard]] Result<fs::path> make_temp_directory(const fs::path& parent, std::string_view prefix);

}  // namespace f8
