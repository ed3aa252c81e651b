// Reading and writing whole files, and a hash that tells bytes apart.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace train {

[[nodiscard]] std::string read_file(const std::filesystem::path& path);

// Replaces the file whole or not at all: a reader never sees a part.
void write_file(const std::filesystem::path& path, std::string_view bytes);

// Gives a hash of 128 bits as 32 hex digits. It finds damage and is no protection against forgery.
[[nodiscard]] std::string hash_hex(std::string_view bytes);

}  // namespace train
