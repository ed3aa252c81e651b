// Reading and writing whole files, with errors as values. write_file_atomic writes a temporary file
// beside the target, flushes it and renames it: a reader sees the old bytes or the new ones, and a
// full disk leaves the old ones.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace f8 {

namespace fs = std::filesystem;

[[nodiscard]] Result<std::string> read_file(const fs::path& path);
[[nodiscard]] Status write_file_atomic(const fs::path& path, std::string_view bytes);
// Writes in place and flushes; a crash may leave a part of the bytes.
[[nodiscard]] Status write_file_synced(const fs::path& path, std::string_view bytes);
[[nodiscard]] Status sync_directory(const fs::path& path);
// Creates the private (mode 0700) directory `<parent>/<prefix>XXXXXX` and returns its path.
[[nodiscard]] Result<fs::path> make_temp_directory(const fs::path& parent, std::string_view prefix);

}  // namespace f8
