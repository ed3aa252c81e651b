// JSON that arrives from outside: model files, exported trials, the rows of a database. It is
// parsed without exceptions and in linear time. A text that is nested too deep (writing it again
// would recurse as deep), has too many values or repeats a key (parsers differ in which one they
// keep) is refused.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace f8::tuning_db {

inline constexpr size_t kMaxJsonDepth = 64;
inline constexpr size_t kMaxJsonValues = size_t{1} << 24;

// `where` names the text in errors: a file's path, "the header of FILE".
[[nodiscard]] Result<nlohmann::json> parse_json(std::string_view text, std::string_view where);
// Parses an object and hands out its members one by one, in the order of the text: of an object of
// millions, one is in memory at a time. An error of `take` ends it and is returned. A name that comes
// twice is an error too, which is found last.
using TakeMember = std::function<Status(const std::string& name, const nlohmann::json& value)>;
[[nodiscard]] Status parse_json_members(std::string_view text, std::string_view where,
                                        const TakeMember& take);

// Returns written JSON, whose strings escape C0 control characters, with DEL and C1 escaped too: some
// terminals obey them. It reads back as the same value.
[[nodiscard]] std::string without_controls(std::string json);

}  // namespace f8::tuning_db
