// JSON that arrives from outside. It is parsed without exceptions, a repeated key is refused
// (parsers differ in which one they keep), and fields are fetched with errors that name file and
// field.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace f8::tuner {

// Reads a regular file or a pipe of at most `max_bytes`.
[[nodiscard]] Result<std::string> read_bounded(const std::filesystem::path& path, size_t max_bytes);

// `where` names the text in errors: the file's path.
[[nodiscard]] Result<nlohmann::json> parse_json(std::string_view text, std::string_view where);

// The integer `object[field]` in [min, max].
[[nodiscard]] Result<int64_t> integer_field(const nlohmann::json& object, std::string_view field,
                                            std::string_view where, int64_t min, int64_t max);
[[nodiscard]] Result<int64_t> integer_field_or(const nlohmann::json& object, std::string_view field,
                                               std::string_view where, int64_t min, int64_t max,
                                               int64_t missing);

}  // namespace f8::tuner
