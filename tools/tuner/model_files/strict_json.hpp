// Integer fields of JSON that arrives from outside, with errors that name file and field.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.hpp"

namespace f8::tuner {

// The integer `object[field]` in [min, max].
[[nodiscard]] Result<int64_t> integer_field(const nlohmann::json& object, std::string_view field,
                                            std::string_view where, int64_t min, int64_t max);
[[nodiscard]] Result<int64_t> integer_field_or(const nlohmann::json& object, std::string_view field,
                                               std::string_view where, int64_t min, int64_t max,
                                               int64_t missing);

}  // namespace f8::tuner
